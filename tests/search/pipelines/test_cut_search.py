"""`CutSearch` against brute force over all cuts and all choices of recompute."""

from __future__ import annotations

import pytest
from campaigns import these_first
from pipelinegraphs import brute_force, random_joint

from splitkit.costs import Link, Links
from splitkit.errors import NoPlanError
from splitkit.pipeline.schedules import pipeline_order
from splitkit.policies import Pipeline
from splitkit.search.pipelines.cut_search import CutSearch
from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems

CASES = [(seed, schedule) for seed in range(12) for schedule in ("1f1b", "gpipe", "zbv")]
FIRST = [(0, "1f1b"), (2, "gpipe"), (4, "zbv")]


def search(flow, costs, stages, schedule, microbatches, memory, links=None):
    order = pipeline_order(schedule, stages, microbatches)
    problems = StageProblems(JointPositions.of(flow), costs, "adam", schedule == "zbv")
    return CutSearch(StageFrontiers(problems), order, links, [memory] * len(order.ranks)).run()


@pytest.mark.parametrize(("seed", "schedule"), these_first(FIRST, [case for case in CASES if case not in FIRST]))
def test_two_stages_are_as_good_as_brute_force_says(seed, schedule):
    flow, costs = random_joint(seed, ops=4)
    links = Links(Link(2048.0, 1.0)) if seed % 2 else None
    whole = max(search(flow, costs, 2, schedule, 3, None, links).best.run.peaks)
    for share in (None, 0.9, 0.75):
        memory = None if share is None else int(whole * share)
        best, count = brute_force(flow, costs, 2, schedule, 3, memory, links)
        assert count > 8
        try:
            claim = Pipeline(2, schedule, 3, memory, links).assign(flow, costs).claim
        except NoPlanError:  # brute force may know choices that take less while they compute
            continue
        assert claim.bound * (1 - 1e-12) <= best <= claim.value + 1e-9
        assert not claim.optimal or claim.value == pytest.approx(best)


@pytest.mark.parametrize("seed", these_first([1], range(2, 8)))
def test_the_path_bound_of_three_stages_holds(seed):
    flow, costs = random_joint(seed, ops=3)
    whole = max(search(flow, costs, 3, "1f1b", 3, None).best.run.peaks)
    for share in (None, 0.8):
        memory = None if share is None else int(whole * share)
        found = search(flow, costs, 3, "1f1b", 3, memory)
        best, _ = brute_force(flow, costs, 3, "1f1b", 3, memory)
        assert found.bound * (1 - 1e-12) <= best
        if found.best is not None:
            assert best <= found.best.seconds + 1e-9
            assert memory is None or max(found.best.run.peaks) <= memory
