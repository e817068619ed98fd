"""Finds a short schedule of operations on machines, with a bound: by rules, then tabu search, then branch and bound."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from splitkit.solvers.topological import in_turn

VISITS = 1_000_000
"""How many operations each search may give a start: one to three seconds."""
_ROUNDING = 1e-9  # relative; a schedule so near its bound is taken for the shortest


class Sequenced(NamedTuple):
    """A schedule, and a lower bound on the makespan of every schedule of the problem.

    Attributes:
        starts: operation -> start.
        value: the makespan.
        bound: no schedule is shorter, up to rounding; equal to ``value`` if the schedule is proven to be the shortest.
    """

    starts: list[float]
    value: float
    bound: float


def sequenced(problem: SequencingProblem, visits: int = VISITS) -> Sequenced:
    """Return the shortest schedule found.

    Operations with long tails first, or with early heads first, each with a machine that never, sometimes or always
    waits for a more urgent operation; the best of these is improved by `improved`, and then by `shortest`, which is
    exact if the problem is small enough for its effort.
    """
    enough = problem.bound * (1 + _ROUNDING)
    found = _by_rules(problem, enough)
    found = improved(problem, found, visits, enough)
    found, proven = shortest(problem, found, visits, enough)
    value = schedule_length(problem, found)
    return Sequenced(found, value, value if proven else problem.bound)


def _by_rules(problem: SequencingProblem, enough: float) -> list[float]:
    """Return the shortest schedule of all rules, or the first one that is short enough."""
    longest = [tail + duration for tail, duration in zip(problem.tails, problem.durations, strict=True)]
    earliest = [-head for head in problem.heads]
    best, value = list[float](), math.inf
    for urgency, patience in product((longest, earliest), (0, 0.5, 1)):
        found = dispatched(problem, urgency, patience)
        if (length := schedule_length(problem, found)) < value:
            best, value = found, length
        if value <= enough:
            break
    return best


# Finds the shortest schedule of few operations by branch and bound over the choices of `Dispatch.candidates`.


def shortest(problem: SequencingProblem, starts: list[float], visits: int, enough: float) -> tuple[list[float], bool]:
    """Return a schedule that is no longer than a given one, and whether it is proven that none is shorter.

    Args:
        problem: the operations.
        starts: operation -> start, of the given schedule.
        visits: how many operations may be given a start in all, which bounds the effort.
        enough: a lower bound on the makespan.
    """
    best, value = starts, schedule_length(problem, starts)
    stack = [Dispatch(problem)]
    while stack and value > enough:
        if visits <= 0:
            return best, False
        state = stack.pop()
        visits -= len(starts)
        if _at_least(state) >= value:
            continue
        if not state.available:
            best, value = state.starts, schedule_length(problem, state.starts)
            continue
        for operation, _ in sorted(state.candidates(), key=lambda pair: (problem.tails[pair[0]], -pair[1])):
            made = state.copy()
            made.choose(operation)
            stack.append(made)
    return best, True


def _at_least(state: Dispatch) -> float:
    """Return a lower bound on the makespan of what a partial schedule can become."""
    problem = state.problem
    paths = (
        max(start, head) + duration + tail
        for start, head, duration, tail in zip(
            state.starts, problem.heads, problem.durations, problem.tails, strict=True
        )
    )
    waiting = (state.start_of(o) + problem.durations[o] + problem.tails[o] for o in state.available)
    return max(max(paths), max(waiting, default=0.0))


# Improves a schedule by exchanging neighbours on machines along its critical path (Van Laarhoven et al., 1992).


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


# Schedules operations on machines by priorities, one after another.


class Dispatch:
    """A partial schedule: operations without a machine start as soon as they can, the others as they are chosen.

    Attributes:
        starts: operation -> its start, where it is known.
        available: the operations with machines that can be chosen now.
    """

    def __init__(self, problem: SequencingProblem) -> None:
        self.problem = problem
        self.starts = [0.0] * len(problem.durations)
        self.available: list[int] = []
        self._missing = [len(needs) for needs in problem.before]
        self._free: dict[int, float] = {}
        self._release([operation for operation, count in enumerate(self._missing) if not count])

    def start_of(self, operation: int) -> float:
        """Return the earliest start of an available operation after all that were chosen."""
        free = self._free
        return max([self.starts[operation], *(free.get(machine, 0.0) for machine in self.problem.machines[operation])])

    def choose(self, operation: int) -> None:
        """Start an available operation next."""
        start = self.starts[operation] = self.start_of(operation)
        for machine in self.problem.machines[operation]:
            self._free[machine] = start + self.problem.durations[operation]
        self.available.remove(operation)
        self._release(self._over(operation))

    def candidates(self, patience: float = 1.0) -> list[tuple[int, float]]:
        """Return operations that can be chosen next, with their starts.

        With patience 1 these are all that start before another one could be over: some sequence of such choices is
        optimal. For sort an optimal schedule by starts, and shift every operation to the left as far as it goes; if an
        operation could be over before the next one in the sequence starts, then it is that one. With patience 0 they
        are those that can start first.
        """
        starts = [(operation, self.start_of(operation)) for operation in self.available]
        over, soonest = min((start + self.problem.durations[operation], operation) for operation, start in starts)
        if patience == 1:  # an operation without duration may start when it is over
            return [pair for pair in starts if pair[1] < over or pair[0] == soonest]
        first = min(start for _, start in starts)
        limit = first + patience * (over - first)
        return [pair for pair in starts if pair[1] < limit or pair[1] == first]

    def copy(self) -> Dispatch:
        """Return a copy that can be continued on its own."""
        made = Dispatch.__new__(Dispatch)
        made.problem, made.starts, made.available = self.problem, self.starts.copy(), self.available.copy()
        made._missing, made._free = self._missing.copy(), self._free.copy()
        return made

    def _release(self, ready: list[int]) -> None:
        """Run all ready operations that need no machine, and those that they make ready; queue the others."""
        while ready:
            operation = ready.pop()
            if self.problem.machines[operation]:
                self.available.append(operation)
            else:
                ready += self._over(operation)

    def _over(self, operation: int) -> list[int]:
        """Note the end of an operation, and return the operations that waited for nothing else."""
        end, found = self.starts[operation] + self.problem.durations[operation], []
        for other in self.problem.behind[operation]:
            self.starts[other] = max(self.starts[other], end)
            self._missing[other] -= 1
            if not self._missing[other]:
                found.append(other)
        return found


def dispatched(problem: SequencingProblem, urgency: Sequence[float], patience: float) -> list[float]:
    """Return operation -> start, of the schedule that always chooses the most urgent candidate.

    Args:
        problem: the operations.
        urgency: operation -> urgency; of equally urgent ones, the first to start is chosen.
        patience: how long a machine may wait for a more urgent operation, from 0 to 1: see `Dispatch.candidates`.
    """
    state = Dispatch(problem)
    while state.available:
        chosen, _ = min(state.candidates(patience), key=lambda pair: (-urgency[pair[0]], pair[1], pair[0]))
        state.choose(chosen)
    return state.starts


def schedule_length(problem: SequencingProblem, starts: Sequence[float]) -> float:
    """Return the makespan of a schedule."""
    ends = zip(starts, problem.durations, problem.after, strict=True)
    return max(map(sum, ends), default=0.0)


# Defines the problem of sequencing operations on machines, and lower bounds on its makespan.
#
# A job shop (Roy and Sussmann, 1964) of which some operations need no machine, since their order is fixed, and some
# need several machines at once: a message holds the communicators of both of its ranks.


@dataclass(frozen=True, eq=False)
class SequencingProblem:
    """Operations with fixed precedences, some of which hold machines one at a time.

    Attributes:
        durations: seconds of each operation.
        before: operation -> the operations that must be over before it starts; without cycles.
        machines: operation -> the machines that it holds, none for operations in a fixed order.
        after: operation -> seconds that pass after it before the makespan ends.
    """

    durations: Sequence[float]
    before: Sequence[Sequence[int]]
    machines: Sequence[tuple[int, ...]]
    after: Sequence[float]

    @cached_property
    def behind(self) -> list[list[int]]:
        """Operation -> the operations that wait for it."""
        found: list[list[int]] = [[] for _ in self.durations]
        for operation, needs in enumerate(self.before):
            for need in needs:
                found[need].append(operation)
        return found

    @cached_property
    def sequence(self) -> list[int]:
        """All operations in a topological order of the precedences."""
        found = list(in_turn(self.before, lambda _, taken: taken))
        assert len(found) == len(self.before), "precedences without cycles"
        return found

    @cached_property
    def heads(self) -> list[float]:
        """Operation -> its start if machines could do any number of operations at once."""
        found = [0.0] * len(self.durations)
        for operation in self.sequence:
            for need in self.before[operation]:
                found[operation] = max(found[operation], found[need] + self.durations[need])
        return found

    @cached_property
    def tails(self) -> list[float]:
        """Operation -> the seconds from its end to the end of the makespan, if machines could do any number at once."""
        found = list(self.after)
        for operation in reversed(self.sequence):
            for other in self.behind[operation]:
                found[operation] = max(found[operation], found[other] + self.durations[other])
        return found

    @cached_property
    def bound(self) -> float:
        """A lower bound on the makespan: no order of the operations on the machines has a shorter one."""
        jobs: dict[int, list[tuple[float, float, float]]] = {}
        for operation, held in enumerate(self.machines):
            for machine in held:
                job = self.heads[operation], self.durations[operation], self.tails[operation]
                jobs.setdefault(machine, []).append(job)
        triples = zip(self.heads, self.durations, self.tails, strict=True)
        return max([*map(sum, triples), *map(preemptive_bound, jobs.values())], default=0.0)


def preemptive_bound(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Return the shortest makespan of one machine that may interrupt operations (Jackson's schedule; Carlier, 1982).

    It runs the available operation with the longest tail at any time, which is optimal with interruptions, and
    therefore a lower bound without them.

    Args:
        jobs: head, duration and tail of each operation of the machine.
    """
    waiting = list[list[float]]()  # [-tail, seconds left]
    now, found = 0.0, 0.0
    arriving = sorted(jobs, reverse=True)
    while arriving or waiting:
        if not waiting:
            now = max(now, arriving[-1][0])
        while arriving and arriving[-1][0] <= now:
            _, duration, tail = arriving.pop()
            heapq.heappush(waiting, [-tail, duration])
        if not waiting:
            continue
        run = waiting[0][1]
        if arriving:
            run = min(run, arriving[-1][0] - now)
        now += run
        if run >= waiting[0][1]:
            found = max(found, now - heapq.heappop(waiting)[0])
        else:
            waiting[0][1] -= run
    return found
