"""`Pipeline` against enumeration of all cuts and all choices on small graphs, in every memory that may matter."""

from __future__ import annotations

import itertools

import pytest
import torch
from campaigns import these_first
from pipelinegraphs import all_choices
from torch import nn
from trainingnets import random_training_graph

import splitkit as sk
from splitkit.errors import NoPlanError
from splitkit.pipeline.schedules import pipeline_order
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.policies import Pipeline

WAYS = ((2, "gpipe", 4), (2, "1f1b", 6), (3, "1f1b", 4), (4, "zbv", 4))
FIRST = [(1, WAYS[0]), (5, WAYS[1]), (46, WAYS[3])]
"""The last has a plan that fits only since a stage computes a value again that it holds: messages then come later."""
CASES = [(seed, way) for seed in range(100) for way in WAYS]
MOST = 40_000  # plans of a case


def every_plan(problems, stages, order):
    """(step, peak) of all plans that no other beats; ``None`` if there are too many."""
    known, found = {}, set()
    size, cuts = len(problems.positions.forward), problems.positions.legal.tolist()
    for inner in itertools.combinations(cuts, stages - 1):
        spans = list(itertools.pairwise([0, *inner, size]))
        for span in spans:
            if span not in known:
                problem = problems.problem(*span)
                if len(problem.ops) > 9:
                    return None
                known[span] = {problems.costs_of(problem, choice) for choice in all_choices(problem.savings)}
        for costs in itertools.product(*(known[span] for span in spans)):
            run = simulate_schedule(costs, order)
            found.add((run.seconds, max(run.peaks)))
            if len(found) > MOST:
                return None
    return found


@pytest.mark.parametrize(("seed", "way"), these_first(FIRST, [case for case in CASES if case not in FIRST]))
def test_no_plan_is_missed(seed, way):
    joint, costs = random_training_graph(seed)
    stages, schedule, microbatches = way
    problems = Pipeline(*way).problems(joint.flow, costs)
    if len(problems.positions.legal) < stages - 1:
        pytest.skip("the graph cannot be cut so often")
    plans = every_plan(problems, stages, pipeline_order(schedule, stages, microbatches))
    if not plans:
        pytest.skip("there are too many plans")
    least, top = min(peak for _, peak in plans), min(plans)[1]
    with pytest.raises(NoPlanError, match=rf"memory={least}\) fits"):
        Pipeline(*way, memory=least - 1).found(problems)
    for memory in sorted({least, least + 4, *(least + (top - least) * k // 4 for k in range(1, 5))}):
        found = Pipeline(*way, memory=memory).found(problems)
        best = min(step for step, peak in plans if peak <= memory)
        assert found.run.seconds == pytest.approx(best, rel=1e-9) and max(found.run.peaks) <= memory
        assert found.plan.claim.bound <= best * (1 + 1e-9)


class Three(nn.Module):
    """Its second stage has nine values, of which not all sets are looked at."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise((6, 6, 16, 6)))

    def forward(self, x):
        for layer, act in zip(self.layers, (nn.functional.gelu, torch.sin, torch.tanh), strict=True):
            y = act(layer(x))
            x = y if act is nn.functional.gelu else y + y.mean(-1, keepdim=True) * x.mean(-1, keepdim=True)
        return {"loss": x.square().mean()}


def test_values_of_larger_stages_are_tried_the_other_way():
    joint = sk.capture_joint(Three(), torch.ones(7, 6))
    policy = Pipeline(2, "gpipe", 3, memory=8064)
    found = policy.found(policy.problems(joint.flow, sk.costs.roofline(joint.graph_module, "h100")))
    assert found.run.seconds <= 0.0003880138674626867 and max(found.run.peaks) <= 8064  # the best by enumeration
    assert found.plan.claim.bound <= 0.0003880138674626867


def test_a_leaner_plan_does_not_replace_the_best_plan_of_its_cuts():
    joint, costs = random_training_graph(1)
    policy = Pipeline(4, "zbv", 4, memory=29184)
    found = policy.found(policy.problems(joint.flow, costs))
    assert found.run.seconds == pytest.approx(0.00013605808477611936, rel=1e-9)  # by enumeration
