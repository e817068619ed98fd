"""Sequencing operations on machines: bounds hold, the exact search is exact, and the others are never worse."""

from __future__ import annotations

import itertools
import random

import pytest

from splitkit.solvers.solve_sequence import (
    Dispatch,
    SequencingProblem,
    dispatched,
    improved,
    preemptive_bound,
    schedule_length,
    sequenced,
    shortest,
)


def drawn(seed):
    """Random operations, some without a machine and some with two."""
    rng = random.Random(seed)
    count = rng.randint(3, 7)
    return SequencingProblem(
        [rng.choice([0.0, 0.5, 1.0, 2.5]) for _ in range(count)],
        [[i for i in range(own) if rng.random() < 0.25] for own in range(count)],
        [tuple(rng.sample(range(3), rng.choice([0, 1, 1, 2, 2]))) for _ in range(count)],
        [rng.choice([0.0, 0.0, 1.5]) for _ in range(count)],
    )


def least(problem):
    """The shortest makespan of all sequences."""
    count, best = len(problem.durations), float("inf")
    for sequence in itertools.permutations(range(count)):
        ends, free = [None] * count, [0.0] * 3
        for operation in sequence:
            needs = [ends[need] for need in problem.before[operation]]
            if None in needs:
                break
            start = max([0.0, *needs, *(free[machine] for machine in problem.machines[operation])])
            ends[operation] = start + problem.durations[operation]
            for machine in problem.machines[operation]:
                free[machine] = ends[operation]
        else:
            best = min(best, max(end + after for end, after in zip(ends, problem.after, strict=True)))
    return best


def is_schedule(problem, starts):
    ends = [start + duration for start, duration in zip(starts, problem.durations, strict=True)]
    for one, other in itertools.permutations(range(len(starts)), 2):
        if one in problem.before[other] and ends[one] > starts[other]:
            return False
        share = one < other and set(problem.machines[one]) & set(problem.machines[other])
        if share and ends[one] > starts[other] and ends[other] > starts[one]:
            return False
    return True


@pytest.mark.parametrize("seed", range(25))
def test_the_shortest_schedule_is_found_and_proven(seed):
    problem = drawn(seed)
    best = least(problem)
    assert problem.bound <= best
    found = sequenced(problem)
    assert found.value == best == pytest.approx(found.bound)
    assert is_schedule(problem, found.starts) and schedule_length(problem, found.starts) == found.value
    rough = dispatched(problem, [0.0] * len(problem.durations), 1)
    exact, proven = shortest(problem, rough, 10**6, 0.0)
    assert proven and schedule_length(problem, exact) == best
    better = improved(problem, rough, 2000, 0.0)
    assert best <= schedule_length(problem, better) <= schedule_length(problem, rough) and is_schedule(problem, better)


def test_without_effort_nothing_is_proven_beyond_the_bound():
    problem = next(p for p in map(drawn, itertools.count()) if least(p) > p.bound)
    found = sequenced(problem, visits=0)
    assert found.bound == problem.bound < found.value and is_schedule(problem, found.starts)


def test_a_machine_that_may_interrupt_is_never_slower():
    """Carlier's example of a long operation that starts before an urgent one arrives; and against all permutations."""
    assert preemptive_bound([(0.0, 4.0, 0.0), (1.0, 1.0, 7.0)]) == 9.0
    assert preemptive_bound([]) == 0.0
    rng = random.Random(0)
    for _ in range(50):
        jobs = [(rng.choice([0, 1, 3]), rng.choice([0, 1, 2]), rng.choice([0, 2, 5])) for _ in range(4)]
        best = float("inf")
        for order in itertools.permutations(jobs):
            now = value = 0.0
            for head, duration, tail in order:
                now = max(now, head) + duration
                value = max(value, now + tail)
            best = min(best, value)
        assert max(map(sum, jobs)) <= preemptive_bound(jobs) <= best


def test_the_search_finds_what_no_rule_does():
    """A machine with a short operation first and two that feed others: only an exchange gives the least makespan."""
    seeds = (s for s in itertools.count() if _rules(drawn(s)) > least(drawn(s)))
    problem = drawn(next(seeds))
    starts = min(_all_rules(problem), key=lambda s: schedule_length(problem, s))
    assert schedule_length(problem, improved(problem, starts, 10**5, 0.0)) == least(problem)


def _rules(problem):
    return min(schedule_length(problem, starts) for starts in _all_rules(problem))


def _all_rules(problem):
    longest = [tail + duration for tail, duration in zip(problem.tails, problem.durations, strict=True)]
    return [dispatched(problem, urgency, patience) for urgency in (longest, problem.heads) for patience in (0, 0.5, 1)]


def test_a_copy_goes_on_alone():
    problem = SequencingProblem([1.0, 2.0], [[], []], [(0,), (0,)], [0.0, 0.0])
    state = Dispatch(problem)
    other = state.copy()
    state.choose(0)
    assert sorted(other.available) == [0, 1] and state.available == [1]
    assert (state.start_of(1), other.start_of(1)) == (1.0, 0.0)
