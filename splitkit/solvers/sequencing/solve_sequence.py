"""Finds a short schedule of operations on machines, with a bound: by rules, then tabu search, then branch and bound."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

from splitkit.solvers.sequencing.dispatching import dispatched, schedule_length
from splitkit.solvers.sequencing.exact_sequence import shortest
from splitkit.solvers.sequencing.sequence_search import improved
from splitkit.solvers.sequencing.sequencing_problem import SequencingProblem

VISITS = 1_000_000
"""How many operations each search may give a start: one to three seconds."""
_ROUNDING = 1e-9


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
