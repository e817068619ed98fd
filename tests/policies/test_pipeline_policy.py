"""The policy `Pipeline`: its plans run like eager mode, keep to the memory, and its claims hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from jointmodels import NAMES, SMALL, assert_steps_alike, captured, ran

from splitkit.costs import roofline
from splitkit.engine.joint_stages.staged_step import StagedStep
from splitkit.errors import NoPlanError, PolicyError, ScheduleError
from splitkit.policies import Pipeline


def assert_like_eager(found, expected):
    """To the bit, but for sums of gradients in another order."""
    loss, gradients, buffers = expected
    close = {
        name: gradient
        for name, gradient in gradients.items()
        if gradient is not None and torch.allclose(found.gradients[name], gradient, rtol=1e-5, atol=1e-7)
    }
    assert_steps_alike(replace(found, gradients={**found.gradients, **close}), (loss, gradients, buffers))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", [Pipeline(2, microbatches=4), Pipeline(2, microbatches=4, memory=1)])
def test_stages_run_like_eager(name, policy):
    joint, args, kwargs, expected = captured(name)
    costs = roofline(joint.graph_module, "h100")
    try:
        plan = policy.assign(joint.flow, costs)
    except NoPlanError as error:
        plan = error.nearest
        if plan is None:
            pytest.skip(str(error))
    step = joint.split(plan)
    assert isinstance(step, StagedStep)
    assert_like_eager(ran(joint, step, args, kwargs), expected)
