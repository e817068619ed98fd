"""Capture, plan and picture of a model in one call."""

from __future__ import annotations

from typing import Any

from torch import nn

from splitkit.costs import default, training
from splitkit.engine.split import plan
from splitkit.files import PathLike
from splitkit.frontends.joint_capture import capture
from splitkit.plans.policy import PolicyLike
from splitkit.plans.record import Plan
from splitkit.policies.stages import Stages


def explore(
    model: nn.Module, /, *inputs: Any, policy: PolicyLike | int = 2, page: PathLike | None = None, **kwargs: Any
) -> Plan:
    """Capture a model, plan it, and return the plan, which a notebook shows as a picture.

    This is a shortcut for `splitkit.capture` and `splitkit.plan`::

        sk.explore(model, x)                                    # the picture of two stages
        sk.explore(model, input_ids=ids, policy=4, page="plan.html")

    A number of stages is planned for what the picture shows, training: forward and backward have a price. A policy
    plans for what it is given.

    Args:
        model: the model; it is not changed.
        inputs: positional inputs of an example.
        policy: the number of stages, or a policy.
        page: a file for the interactive page; ``None`` writes none.
        kwargs: keyword inputs of the example.

    Raises:
        CaptureError: SK401 if the model cannot be captured.
        PolicyError: the policy refuses.
        FileError: SK504 if the page cannot be written.
    """
    gm = capture(model, *inputs, **kwargs)
    made = plan(gm, Stages(policy), training(default(gm), gm)) if isinstance(policy, int) else plan(gm, policy)
    if page is not None:
        made.to_html(page)
    return made
