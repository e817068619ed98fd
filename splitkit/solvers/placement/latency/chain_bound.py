"""A lower bound on the makespan from one path through the graph, divided optimally into pieces and units on CPUs.

A piece starts when all its inputs are there and delivers everything at its end, so no path leaves it and comes back:
the units of a path that are in one piece are consecutive, and whatever lies between two units of a piece is in it too,
with its work and its memory. What comes before a unit that the path passes before the piece, or after a unit that it
passes afterwards, is not in the piece, so nets between the two are cut and cost time. Other units are in the piece or
not, whichever costs less. The pieces and CPU units of a path run one after another, so the least sum of their times is
a bound: over all divisions of the path into no more pieces than there are, each of which fits a device.
"""

from __future__ import annotations

from math import inf

import numpy as np

from splitkit.solvers.placement.latency.makespan import Timing
from splitkit.solvers.placement.latency.piece_bounds import Hulls, PieceHull
from splitkit.solvers.placement.problem import Floats, Ints, Problem

_MOST_STEPS = 6_000_000  # nets visited for one path
_MOST_UNITS = 5000
_MARGIN = 1e-9  # relative; larger than the rounding errors of sums of floats


def chain_bound(problem: Problem, timing: Timing, group: Ints, order: Ints, value: float) -> float:
    """Return a lower bound on the makespan: the greatest bound of some paths through the graph.

    Args:
        problem: the problem.
        timing: the times of the problem's units and transfers.
        group: (n,) units of the same group share a device.
        order: (n,) the units in topological order.
        value: a makespan that is attained.
    """
    best = 0.0
    if 0 < problem.units <= _MOST_UNITS:
        for way in paths_to_bound(problem, timing, order.tolist()):
            if best < value:
                best = max(best, bound_of_path(timing, Hulls(problem, timing, group, order.tolist()), way, value))
    return best


def bound_of_path(timing: Timing, hulls: Hulls, way: list[int], value: float) -> float:
    """Return the least sum of times along a path, at most the value; 0 if that takes too many steps.

    Args:
        timing: the times of units and transfers.
        hulls: the hulls of the graph.
        way: the units of the path, from one without predecessors to one without successors.
        value: a makespan that is attained.
    """
    pieces = len(timing.work)
    best = np.full((len(way) + 1, pieces + 1), inf)  # by place, and by pieces so far
    best[0, 0] = 0.0
    for start, unit in enumerate(way):
        if hulls.steps > _MOST_STEPS:
            return 0.0
        best[start + 1] = np.minimum(best[start + 1], best[start] + timing.cpu[unit])
        most = value - float(best[start].min())
        for end, time in _runs(hulls, way, start, most):
            best[end + 1, 1:] = np.minimum(best[end + 1, 1:], best[start, :-1] + time)
    return min(value, float(best[-1].min()) * (1 - _MARGIN))


def _runs(hulls: Hulls, way: list[int], start: int, most: float) -> list[tuple[int, float]]:
    """Return the last place and the least time of each piece that a path can enter at a place, within ``most``."""
    passed = hulls.before[way[start - 1]] | 1 << way[start - 1] if start else 0
    hull, found = PieceHull(), []
    for end in range(start, len(way)):
        hull = hulls.grown(hull, way[end])
        if hulls.work(hull.units) > most or hull.units & passed:
            break
        coming = hulls.after[way[end + 1]] | 1 << way[end + 1] if end + 1 < len(way) else 0
        if not hull.units & coming:
            found.append((end, hulls.takes(hull.units, passed | coming)))
    return found


def paths_to_bound(problem: Problem, timing: Timing, order: list[int]) -> list[list[int]]:
    """Return the longest paths by time, by memory, by the cost of their nets, by all of these, and by units."""
    quickest = np.min(np.array([*timing.work, timing.cpu]), axis=0)
    sent = np.array([sum(timing.nets[net][0] for net in nets) for nets in timing.of_unit], np.float64)
    parts = [each / (each.sum() or 1.0) for each in (quickest, problem.nbytes.astype(np.float64), sent)]
    weights = [*parts, parts[0] + parts[1] + parts[2], np.ones(problem.units)]
    return [list(way) for way in dict.fromkeys(tuple(_longest(timing, order, weight)) for weight in weights)]


def _longest(timing: Timing, order: list[int], weight: Floats) -> list[int]:
    """Return the longest path through the graph."""
    length, came = [0.0] * len(order), [-1] * len(order)
    for unit in order:
        came[unit] = max(timing.before[unit], key=lambda other: length[other], default=-1)
        length[unit] = float(weight[unit]) + (length[came[unit]] if came[unit] >= 0 else 0.0)
    unit = max((unit for unit in order if not timing.after[unit]), key=lambda unit: length[unit])
    way = []
    while unit >= 0:
        way.append(unit)
        unit = came[unit]
    return way[::-1]
