"""Local search on simulated peaks: the same every time, never worse, and below what its seeds reach."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from campaigns import these_first
from jointmodels import wide
from smallnets import NETS, loss_or_sum

from splitkit.costs import roofline
from splitkit.frontends.joint_capture import capture_joint
from splitkit.search.recompute import plan_pool as pool
from splitkit.search.recompute.plan_pool import Descent
from splitkit.testing import models
from splitkit.training.choices import savings
from splitkit.training.peaks import Peaks

LAYERS = {"layers": 3, "width": 64, "heads": 2, "batch": 2, "seq": 32, "vocab": 101}


def fresh(name):
    """A joint graph that nobody else has."""
    made = NETS[name]() if name in NETS else models.build(name, **LAYERS)
    return capture_joint(made.model, *made.args, **made.kwargs, loss=loss_or_sum)


@cache
def kept(name):
    """A joint graph for all tests of this file; nobody may change it."""
    return wide(name)[0] if name in NETS else fresh(name)


def descent_of(joint):
    seen = pool.Pool(savings(joint.flow, roofline(joint.graph_module)), Peaks(joint.flow))
    for runs in (True, False):  # what `sow` begins with
        seen.see(np.full(len(seen.savings.ops), runs))
    return Descent(seen)


def test_layers_play_the_same_parts():
    """Ops of the middle layer have the same group as those of the others, but at the ends of the stack."""
    descent = descent_of(kept("llama"))
    sizes = [len(group) for group in descent.groups]
    assert sum(sizes) == len(descent.free) and sizes.count(3) >= 5
    ops = descent.savings.ops
    assert all(len({str(ops[i].target) for i in group}) == 1 for group in descent.groups)


@pytest.mark.parametrize("name", these_first(["unet"], ["llama"]))
def test_lower_than_the_seeds_and_the_same_again(name):
    lows = []
    for joint in (kept(name), fresh(name)):
        descent = descent_of(joint)
        descent.sow()
        seeds = descent.pool.lowest().peak
        descent.lower(others=True)
        lows.append(descent.pool.lowest())
    assert lows[0].peak < seeds
    assert lows[0].peak == lows[1].peak and lows[0].runs.tolist() == lows[1].runs.tolist()


@pytest.mark.parametrize("name", these_first(["llama"], ["gpt2", "resnet"]))
def test_cheaper_plans_stay_within_the_budget(name):
    descent = descent_of(kept(name))
    seen, before = descent.pool, descent.pool.lowest()
    budget = before.peak
    descent.under(budget)
    descent.cheaper(budget)
    best = seen.best(lambda s: s.peak <= budget)
    assert best.peak <= budget and best.seconds < before.seconds
