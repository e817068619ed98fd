"""Improves a schedule by exchanging neighbours on machines along its critical path (Van Laarhoven et al., 1992)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from splitkit.solvers.sequencing.dispatching import schedule_length
from splitkit.solvers.sequencing.sequencing_problem import SequencingProblem

_MEMORY = 12
"""Exchanges for which an exchanged pair is not exchanged back."""


def improved(problem: SequencingProblem, starts: Sequence[float], visits: int, enough: float) -> list[float]:
    """Return a schedule that is no longer than a given one, by tabu search.

    Each step makes the best exchange of two operations that follow each other without a pause on a machine and on a
    critical path; others cannot shorten the makespan.

    Args:
        problem: the operations.
        starts: operation -> start, of the given schedule.
        visits: how many operations may be given a start in all, which bounds the effort.
        enough: a makespan below which the search ends.
    """
    lines = _lines(problem, starts)
    found = _starts(problem, lines)
    assert found is not None, "the lines of a schedule"
    best, value = found, schedule_length(problem, found)
    recent: list[tuple[int, int]] = []
    while visits > 0 and value > enough:
        options = []
        for first, second in _critical(problem, found, lines):
            if (first, second) in recent:
                continue
            _exchange(problem, lines, first, second)
            if (tried := _starts(problem, lines)) is not None:
                options.append((schedule_length(problem, tried), first, second, tried))
            _exchange(problem, lines, second, first)
            visits -= len(starts)
        if not options:
            break
        now, first, second, found = min(options, key=lambda option: option[:3])
        _exchange(problem, lines, first, second)
        recent = [*recent, (second, first)][-_MEMORY:]
        if now < value:
            best, value = found, now
    return best


def _lines(problem: SequencingProblem, starts: Sequence[float]) -> dict[int, list[int]]:
    """Return machine -> its operations, by start."""
    place = {operation: i for i, operation in enumerate(problem.sequence)}
    lines: dict[int, list[int]] = {}
    for operation in sorted(place, key=lambda o: (starts[o], starts[o] + problem.durations[o], place[o])):
        for machine in problem.machines[operation]:
            lines.setdefault(machine, []).append(operation)
    return lines


def _exchange(problem: SequencingProblem, lines: dict[int, list[int]], first: int, second: int) -> None:
    """Exchange two operations on each machine on which one directly follows the other."""
    for machine in set(problem.machines[first]).intersection(problem.machines[second]):
        line = lines[machine]
        at = line.index(first)
        if at + 1 < len(line) and line[at + 1] == second:
            line[at : at + 2] = second, first


def _starts(problem: SequencingProblem, lines: dict[int, list[int]]) -> list[float] | None:
    """Return the earliest starts if machines keep these lines; ``None`` if the lines contradict the precedences."""
    missing = [len(needs) for needs in problem.before]
    following: dict[int, list[int]] = {}
    for line in lines.values():
        for one, other in pairwise(line):
            following.setdefault(one, []).append(other)
            missing[other] += 1
    starts = [0.0] * len(missing)
    queue = [operation for operation, count in enumerate(missing) if not count]
    for operation in queue:  # grows
        end = starts[operation] + problem.durations[operation]
        for other in (*problem.behind[operation], *following.get(operation, ())):
            starts[other] = max(starts[other], end)
            missing[other] -= 1
            if not missing[other]:
                queue.append(other)
    return starts if len(queue) == len(starts) else None


def _critical(
    problem: SequencingProblem, starts: Sequence[float], lines: dict[int, list[int]]
) -> list[tuple[int, int]]:
    """Return the pairs of neighbours on machines along a critical path."""
    previous: dict[int, list[int]] = {}
    for line in lines.values():
        for one, other in pairwise(line):
            previous.setdefault(other, []).append(one)
    ends = [start + duration for start, duration in zip(starts, problem.durations, strict=True)]
    now = max(range(len(ends)), key=lambda operation: ends[operation] + problem.after[operation])
    pairs = []
    while starts[now] > 0:
        need = next((n for n in problem.before[now] if ends[n] == starts[now]), None)
        if need is None:
            need = next(n for n in previous[now] if ends[n] == starts[now])
            pairs.append((need, now))
        now = need
    return pairs
