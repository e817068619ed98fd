"""Defines the problem of sequencing operations on machines, and lower bounds on its makespan.

A job shop (Roy and Sussmann, 1964) of which some operations need no machine, since their order is fixed, and some need
several machines at once: a message holds the communicators of both of its ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


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
        missing = [len(needs) for needs in self.before]
        found = [operation for operation, count in enumerate(missing) if not count]
        for operation in found:  # grows
            for other in self.behind[operation]:
                missing[other] -= 1
                if not missing[other]:
                    found.append(other)
        assert len(found) == len(missing), "precedences without cycles"
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
