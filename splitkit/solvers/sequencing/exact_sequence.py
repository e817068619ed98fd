"""Finds the shortest schedule of few operations by branch and bound over the choices of `Dispatch.candidates`."""

from __future__ import annotations

from splitkit.solvers.sequencing.dispatching import Dispatch, schedule_length
from splitkit.solvers.sequencing.sequencing_problem import SequencingProblem


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
