"""`CutSearch` against brute force over all cuts and all choices of recompute."""

from __future__ import annotations

from itertools import chain

import pytest
from campaigns import these_first
from pipelinegraphs import Prices, brute_force, random_joint

from splitkit.costs import Link, Links
from splitkit.errors import NoPlanError
from splitkit.pipeline.schedules import pipeline_order
from splitkit.policies import Pipeline
from splitkit.search.pipelines import cut_search
from splitkit.search.pipelines.cut_search import CutSearch, candidate_cuts
from splitkit.search.pipelines.joint_positions import JointPositions, bytes_across
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems

CASES = [(seed, schedule) for seed in range(12) for schedule in ("1f1b", "gpipe", "zbv")]
FIRST = [(0, "1f1b"), (2, "gpipe"), (4, "zbv")]


def prepared(flow, costs, stages, schedule, microbatches, memory, links=None):
    order = pipeline_order(schedule, stages, microbatches)
    problems = StageProblems(JointPositions(flow), costs, "adam", schedule == "zbv")
    return CutSearch(StageFrontiers(problems), order, links, [memory] * len(order.ranks))


def search(*asked):
    return prepared(*asked).run()


@pytest.mark.parametrize(("seed", "schedule"), these_first(FIRST, [case for case in CASES if case not in FIRST]))
def test_two_stages_are_as_good_as_brute_force_says(seed, schedule):
    flow, costs = random_joint(seed, ops=4)
    links = Links(Link(2048.0, 1.0)) if seed % 2 else None
    whole = max(search(flow, costs, 2, schedule, 3, None, links)[0].run.peaks)
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
    whole = max(search(flow, costs, 3, "1f1b", 3, None)[0].run.peaks)
    for share in (None, 0.8):
        memory = None if share is None else int(whole * share)
        found, bound = search(flow, costs, 3, "1f1b", 3, memory)
        best, _ = brute_force(flow, costs, 3, "1f1b", 3, memory)
        assert bound * (1 - 1e-12) <= best
        if found is not None:
            assert best <= found.seconds + 1e-9
            assert memory is None or max(found.run.peaks) <= memory


class Quick(Prices):
    """Some ops take no time."""

    def seconds(self, node):
        return super().seconds(node) if node.name[-1] in "258" else 0.0


@pytest.mark.parametrize("seed", range(4))
def test_of_too_many_cuts_those_that_send_the_fewest_bytes_are_looked_at(seed):
    flow, costs = random_joint(seed, ops=9)
    problems = StageProblems(JointPositions(flow), Quick(costs.known), "adam", False)
    legal = problems.positions.legal
    sent = bytes_across(problems.positions.activations, legal) + bytes_across(problems.positions.gradients, legal)
    sent = dict(zip(legal.tolist(), sent.tolist(), strict=True))
    time = problems.seconds
    for most in range(1, len(legal)):
        chosen = candidate_cuts(problems, most)[1:-1].tolist()
        assert len(chosen) <= most
        for cut in {*legal.tolist()} - {*chosen}:
            twin = any(time[other] == time[cut] and sent[other] <= sent[cut] for other in chosen)
            assert twin or (len(chosen) == most and max(sent[other] for other in chosen) <= sent[cut])
    assert candidate_cuts(problems, len(legal))[1:-1].tolist() == legal.tolist()


@pytest.mark.parametrize(("seed", "schedule", "stages"), [(0, "1f1b", 3), (3, "zbv", 4), (5, "gpipe", 2)])
def test_what_a_rank_computes_in_a_step_is_what_the_simulation_says(seed, schedule, stages):
    made = prepared(*random_joint(seed), stages, schedule, 5, None)
    made.run()
    scored = [one for one in made.scoring.tried.values() if one is not None]
    for one in scored:
        spans, loads = made.scoring._spans(one.ends), made.choices.loads
        points = [[one.points[stage] for stage in load.stages] for load in loads]
        assert one.run.busy == pytest.approx([*map(made.scoring._busy, spans, points)])
    assert scored and any(max(one.run.busy) > 0 for one in scored)


def test_few_cuts_near_the_leanest_ones_are_looked_at(monkeypatch):
    """Three rounds of neighbours would be looked at in this graph: 7, 6 and 3."""
    asked, leaner = [], CutSearch._leaner

    def counted(made, candidates, best):
        asked.append(list(candidates))
        return leaner(made, asked[-1], best)

    monkeypatch.setattr(cut_search, "_TINY", 0)
    monkeypatch.setattr(cut_search, "_LEAN", 12)
    monkeypatch.setattr(CutSearch, "_leaner", counted)
    made = prepared(*random_joint(8, ops=9), 3, "1f1b", 3, None)
    least = max(made.smallest.run.peaks)
    first, *near = [[tuple(int(made.cuts[e]) for e in ends) for ends in each] for each in asked]
    assert [len(each) for each in near] == [7, 5]
    assert least == min(max(made.scoring.leanest(ends).run.peaks) for ends in [*first, *chain.from_iterable(near)])
