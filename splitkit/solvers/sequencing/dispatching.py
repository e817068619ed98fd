"""Schedules operations on machines by priorities, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from splitkit.solvers.sequencing.sequencing_problem import SequencingProblem


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
