"""What no plan can be below: below every plan there is, and reached where there is nothing to choose."""

from __future__ import annotations

import numpy as np
import torch
from campaigns import few_of_many
from capturedmodels import captured_example
from choices import steps
from hypothesis import strategies as st
from jointgraphs import Hand

from splitkit.costs import roofline, unit
from splitkit.search.recompute import plan_pool as pool
from splitkit.search.recompute.memory_limits import MomentLimits
from splitkit.search.recompute.recompute_search import Bounds, RecomputeSearch
from splitkit.training.choices import savings
from splitkit.training.peaks import Peaks


@few_of_many(60, 150, steps(), st.integers(0, 2**32 - 1))
def test_no_plan_is_below_what_any_other_plan_proves(made, seed):
    flow, costs = made
    problem, random = savings(flow, costs), np.random.default_rng(seed)
    seen = pool.Pool(problem, Peaks(flow))
    traces = [seen.trace(random.random(len(problem.ops)) < share)[1] for share in (0.0, 0.3, 0.5, 0.7, 1.0)]
    bounds = Bounds(MomentLimits(problem, seen.peaks))
    assert max(map(bounds.peak, traces)) <= min(trace.peak for trace in traces)


def bound_of(flow):
    """In KiB, and the peak of the lowest plan."""
    problem = savings(flow, unit(flow.root))
    search = RecomputeSearch(pool.Pool(problem, Peaks(flow)))
    low = search.lowest_peak()
    return search.least_peak() >> 10, low.peak >> 10


def test_what_a_node_reads_and_makes_is_there():
    h = Hand().inputs(x=1).op("a", 8, "x").op("loss", 1, "a").gradients(t=1)
    h.back("g1", 16, "t").back("g2", 4, "g1", "a")
    assert bound_of(h.flow("loss", "g2")) == (1 + 1 + 1 + 8 + 16 + 4,) * 2  # x, t, the loss, a, g1, g2


def test_gradients_that_a_node_waits_for_are_there():
    h = Hand().inputs(x=1).op("loss", 1, "x").gradients(t=1)
    h.back("g1", 16, "t").back("g2", 4, "g1").back("g3", 32, "g2")
    assert bound_of(h.flow("loss", "g1 g3")) == (1 + 1 + 1 + 16 + 4 + 32,) * 2


def test_what_may_not_be_computed_again_is_there_between():
    h = Hand().inputs(x=1).op("r", 8, "x", target=torch.ops.aten.rand_like.default).op("a", 8, "r")
    h.op("loss", 1, "a").gradients(t=1)
    h.back("g1", 32, "t").back("g2", 1, "g1").back("g3", 1, "g2", "a")
    assert bound_of(h.flow("loss", "g3")) == (1 + 1 + 1 + 8 + 32 + 1,) * 2  # r or a, while g2 is made of g1


def test_masks_and_logits_leave_no_room_below_what_is_found():
    joint = captured_example("gpt2", "joint", layers=1, width=64, heads=2, batch=4, seq=64, vocab=2003).graph
    problem = savings(joint.flow, roofline(joint.graph_module))
    search = RecomputeSearch(pool.Pool(problem, Peaks(joint.flow)))
    low = search.lowest_peak()
    assert search.least_peak() <= low.peak <= 1.01 * search.least_peak()
