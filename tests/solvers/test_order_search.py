"""Orders of actions: the search against the enumeration of all orders, and each method alone."""

from __future__ import annotations

from itertools import islice

import pytest
from campaigns import these_first
from orderproblems import NO_LIMIT, SHAPES, least_value, random_problem

from splitkit.solvers.exact_order import Windows, branch, tighten
from splitkit.solvers.order_problem import ActionBytes, OrderProblem, StepState, time_rows
from splitkit.solvers.order_search import (
    DeadlineRule,
    DeadlineScheduler,
    ListScheduler,
    improve_rows,
    list_rules,
    row_peak,
    rows_one_by_one,
    search_order,
    work_or_path_bound,
)


def even(stages, microbatches, room=NO_LIMIT, saved=10, waiting=4):
    uses = ActionBytes(saved), ActionBytes(0, 0, waiting - saved), ActionBytes(0, 0, -waiting)
    zeros = (0.0,) * stages
    ends = tuple(range(stages))
    travel = ((0.0, 0.0),) * stages
    return OrderProblem(microbatches, ends, ((1.0,) * 3,) * stages, travel, (uses,) * stages, (room,) * stages, zeros)


@pytest.mark.parametrize("first", these_first([0], range(12, 600, 12)))
def test_the_search_and_branching_alone_find_the_best_of_all_orders(first):
    for number in range(first, first + 12):
        problem = random_problem(number)
        best, found = least_value(problem), search_order(problem, effort=0.05)
        if best is None:
            assert found is None or len(problem.room) < len(problem.rank_of)
            continue
        assert found is not None and found.timed.value >= best - 1e-9, number
        assert found.bound <= best + 1e-9, number
        if found.optimal:
            assert found.timed.value == pytest.approx(best), number
        start = time_rows(problem, rows_one_by_one(problem))
        windows = Windows.within(problem, 2 * abs(start.value) + 5)
        assert tighten(problem, windows)
        alone, whole = branch(problem, windows, 2 * abs(start.value) + 5, 10**6)
        assert whole and alone.value == pytest.approx(best), number
        assert branch(problem, windows, best, 10**6) == (None, True), number


@pytest.mark.parametrize("number", [13, 50])
def test_it_starts_from_the_best_order_that_is_known(number):
    """Without effort it finds none as good by itself."""
    problem = random_problem(number)
    good, poor = search_order(problem).timed, search_order(problem, effort=0).timed
    assert good.value < poor.value
    for known in ([good.rows, poor.rows], [poor.rows, good.rows]):
        assert search_order(problem, known, effort=0).timed.value == good.value


@pytest.mark.parametrize("number", [2019, 2036, 2048, 2072, 2113, 2311, 2331])
def test_branching_finds_orders_in_which_a_rank_waits_and_keeps_states_that_are_hardly_worse(number):
    """Problems on which branching is wrong without waiting, or if it drops states that are better by up to 0.6."""
    problem = random_problem(number)
    start = time_rows(problem, rows_one_by_one(problem))
    limit = 2 * abs(start.value) + 5
    found, whole = branch(problem, Windows.within(problem, limit), limit, 10**6)
    assert whole and found.value == pytest.approx(least_value(problem))


@pytest.mark.parametrize("first", these_first([1000], range(1012, 1600, 12)))
def test_no_bound_is_above_the_best_of_all_orders(first):
    for number in range(first, first + 12):
        problem = random_problem(number, bytes_during=number % 2 == 0)
        best = least_value(problem)
        if best is None:
            continue
        assert work_or_path_bound(problem) <= best + 1e-9
        for above in (1e-9, 0.1, 3.0):
            assert tighten(problem, Windows.within(problem, best + above)), number


def test_the_search_proves_what_it_finds_on_small_problems():
    hows = set()
    for number in range(24, 48):
        found = search_order(random_problem(number), effort=0.2)
        assert found is None or found.optimal, number
        hows.add(found and found.how)
    assert {"work", "windows", "branching"} <= hows


def test_windows_hold_the_actions_of_an_order_of_their_value():
    for number in range(0, 36, 2):
        problem = random_problem(number)
        timed = time_rows(problem, rows_one_by_one(problem))
        if timed is None:
            continue
        windows = Windows.within(problem, timed.value + 1e-6)
        assert tighten(problem, windows), number
        state, waiting = StepState(problem), [list(row) for row in timed.rows]
        while any(waiting):
            for row in filter(None, waiting):
                stage, kind = row[0]
                start, count = state.start(stage, kind), state.counts[stage][kind]
                if start is None:
                    continue
                row.pop(0)
                state.run(stage, kind, start)
                end = start + problem.seconds[stage][kind]
                if kind < 2:
                    since, due = (
                        (windows.forward_from, windows.forward_to), (windows.input_from, windows.input_to)
                    )[kind]  # fmt: skip
                    assert since[stage][count] <= start + 1e-9 and end <= due[stage][count] + 1e-9, number


def test_memory_bounds_the_step_from_below():
    """With room for p forwards ZB-H1 is the best order of equal times, (p - 1) (F + I - W) above the work; with less
    room a proven bound is above the work and the path.
    """
    found = search_order(even(4, 6, room=40))
    assert found.optimal and found.timed.value == 6 * 3 + 3 and found.how == "work"
    tight = search_order(even(4, 6, room=20), effort=0.2)
    assert found.timed.value < tight.bound <= tight.timed.value and tight.how in ("windows", "branching")
    assert work_or_path_bound(even(4, 6, room=20)) == 21


def test_each_rule_makes_an_order_or_says_that_it_cannot_go_on():
    for number in range(len(SHAPES)):
        problem = random_problem(number)
        windows = Windows.within(problem, 1e3)
        made = [ListScheduler(problem, rule).schedule() for rule in islice(list_rules(problem), 40)]
        made.append(DeadlineScheduler(problem, windows, DeadlineRule((3,) * problem.stages, 0.25, True)).schedule())
        for found in filter(None, made):
            again = time_rows(problem, found.rows)
            assert again is not None and again.value == found.value and again.ends == found.ends
            peaks = [row_peak(problem, row) for row in found.rows]
            assert all(peak <= room for peak, room in zip(peaks, problem.room, strict=True))


def test_descent_never_makes_an_order_worse_and_leaves_a_better_one():
    problem = even(3, 4)
    start = time_rows(problem, rows_one_by_one(problem))
    found = improve_rows(problem, start, 400, 0.0)
    assert found.value < start.value
    assert time_rows(problem, found.rows).value == found.value
    assert improve_rows(problem, start, 0, 0.0) == start


def test_an_order_that_deadlocks_or_is_not_whole_has_no_times():
    problem = even(2, 1)
    assert time_rows(problem, [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2)]]) is not None
    assert time_rows(problem, [[(0, 1), (0, 0), (0, 2)], [(1, 0), (1, 1), (1, 2)]]) is None
    assert time_rows(problem, [[(0, 0), (0, 1)], [(1, 0), (1, 1), (1, 2)]]) is None
    assert time_rows(even(2, 2, room=9), [[(0, 0), (0, 1), (0, 2)] * 2, [(1, 0), (1, 1), (1, 2)] * 2]) is None
