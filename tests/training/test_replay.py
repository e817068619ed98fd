"""Runs of choices without plans: the same steps, bytes and saved storages as of their plans."""

from __future__ import annotations

import numpy as np
import pytest
from campaigns import few_of_many, these_first
from choices import steps
from hypothesis import strategies as st
from jointmodels import wide
from smallnets import NETS

from splitkit.costs import unit
from splitkit.testing import models
from splitkit.training.choices import Replay, savings
from splitkit.training.peaks import Peaks


def assert_alike(problem, peaks, runs):
    choice = problem.choose(runs)
    one, other = Replay(problem, peaks).trace(choice), peaks.trace(choice.plan())
    assert one.steps.tolist() == other.steps.tolist() and one.forward == other.forward
    assert one.timeline.tolist() == other.timeline.tolist()
    assert one.saved.tolist() == other.saved.tolist() and one.saved_bytes == choice.nbytes


@few_of_many(100, 300, steps(), st.integers(0, 2**32 - 1))
def test_any_choice_of_any_step(made, seed):
    flow, costs = made
    problem = savings(flow, costs)
    assert_alike(problem, Peaks(flow), np.random.default_rng(seed).random(len(problem.ops)) < 0.5)


@pytest.mark.parametrize("name", these_first(["gpt2", *NETS], [name for name in models.NAMES if name != "gpt2"]))
def test_choices_of_models(name):
    joint, _ = wide(name)
    problem, peaks, random = savings(joint.flow, unit(joint.graph_module)), Peaks(joint.flow), np.random.default_rng(0)
    for share in (0.0, 0.3, 0.7, 1.0):
        assert_alike(problem, peaks, random.random(len(problem.ops)) < share)
