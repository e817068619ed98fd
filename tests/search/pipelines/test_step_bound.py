"""The bound for any order of actions: below the best plan of brute force, and each of its parts below the truth."""

from __future__ import annotations

from itertools import combinations

import pytest
from campaigns import these_first
from pipelinegraphs import all_choices, brute_force, random_joint
from pytest import approx

from splitkit.costs import Link, Links
from splitkit.pipeline.schedules import pipeline_order, schedule_named
from splitkit.search.pipelines.cut_search import CutSearch, candidate_cuts
from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.search.pipelines.step_bound import PieceHulls, SpanHulls, SpanTables, StepBound
from splitkit.search.recompute.pareto_cuts import Hull

KINDS = ("zbv", "interleaved-1f1b", "interleaved-zero-bubble", "dualpipev", "v-half", "1f1b")
CASES = [(seed, kind) for seed in range(20) for kind in KINDS]
FIRST = [(seed, kind) for seed, kind in enumerate(KINDS)]


def searching(flow, costs, schedule, stages, microbatches, memory, links=None):
    order = pipeline_order(schedule, stages, microbatches)
    problems = StageProblems(JointPositions(flow), costs, "adam", schedule_named(schedule).divided)
    return CutSearch(StageFrontiers(problems), order, links, [memory] * len(order.ranks))


def proven(search):
    found = StepBound(search.choices, search.order, search.links, search.cuts)
    return found.run([search._even(), *search._balanced()])[0]


@pytest.mark.parametrize(("seed", "schedule"), these_first(FIRST, [case for case in CASES if case not in FIRST]))
def test_no_plan_is_quicker_than_the_bound(seed, schedule):
    flow, costs = random_joint(seed, ops=4)
    stages = 3 if schedule == "1f1b" else 4
    links = Links(Link(2048.0, 1.0)) if seed % 2 else None
    free = searching(flow, costs, schedule, stages, 4, None, links)
    whole = free.run()[0]
    peak = max(whole.run.peaks)
    for memory in (None, int(peak * 0.9), int(peak * 0.7)):
        best, count = brute_force(flow, costs, stages, schedule, 4, memory, links)
        assert count > 4
        bound = proven(searching(flow, costs, schedule, stages, 4, memory, links))
        assert bound * (1 - 1e-9) <= best
        assert bound > 0.5 * best or best == float("inf")


@pytest.fixture(scope="module", params=range(2))
def spans(request):
    """Problems of a divided backward, their tables, and the numbers and positions of all stages."""
    flow, costs = random_joint(request.param, ops=5)
    problems = StageProblems(JointPositions(flow), costs, "adam", divided=True)
    cuts = candidate_cuts(problems)
    return problems, SpanTables(problems, cuts), [(i, j, int(cuts[i]), int(cuts[j])) for i, j in pairs(len(cuts))]


def pairs(size):
    return combinations(range(size), 2)


def test_tables_have_the_times_of_stages_and_at_most_their_bytes(spans):
    problems, tables, stages = spans
    for i, j, start, end in stages:
        problem, times = problems.problem(start, end), problems.least_seconds(start, end, 0.0)
        found = [table[i, j] for table in (tables.forward, tables.inputs, tables.weights)]
        assert found == approx([times.forward, times.backward_input, times.backward_weight])
        assert tables.held[i, j] == problem.held
        for choice in all_choices(problem.savings):
            costs = problems.costs_of(problem, choice)
            assert tables.fixed[i, j] == costs.fixed_bytes
            assert tables.temporary[i, j] <= costs.temporary_bytes
            assert costs.deferred_bytes is None or tables.waiting[i, j] <= costs.deferred_bytes


def test_the_hull_is_below_all_choices_and_pieces_are_below_the_hull(spans):
    problems, tables, stages = spans
    pieces = PieceHulls(SpanHulls(problems, tables.cuts))
    for price, weight in ((0.0, 1.0), (1.0, 0.0), (1.0, 900.0)):
        below = pieces.least([(price, weight)])[0]
        for i, j, start, end in stages:
            problem = problems.problem(start, end).savings
            hull = Hull(problem)
            bound, corner = hull.least(price, weight)
            least = min(price * c.nbytes + weight * c.seconds for c in all_choices(problem))
            assert bound <= least * (1 + 1e-9) + 1e-9
            assert bound == approx(least, rel=1e-6, abs=1e-6)
            assert price * corner.first + weight * corner.second * hull.tick == approx(least, rel=1e-6, abs=1e-6)
            assert below[i, j] <= least * (1 + 1e-9) + 1e-9


def test_the_memory_of_a_stage_is_that_of_its_largest_op_or_of_its_gradients(spans):
    problems, tables, every = spans
    needs = [*problems.peaks.needs_of_backward()]
    made = problems.peaks.gradients
    for i, j, first, last in every:
        inside = [nbytes for low, high, nbytes in needs if first <= low and high < last]
        assert tables.temporary[i, j] == max([0, made[last] - made[first], *inside])
    assert any(tables.temporary[i, j] > made[last] - made[first] for i, j, first, last in every)
