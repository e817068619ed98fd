"""A lower bound on the makespan from one way through the graph, cut into pieces and host units as well as can be.

A piece starts when all its inputs are there and gives when it ends, so no way leaves it and comes back: the units of a
way that are in one piece follow each other, and whatever lies between any two units of a piece is in it, with its work
and its memory. What is before a unit that the way passed before the piece, or after one that it passes afterwards, is
not in it, so nets between the two are cut, and cost. What is beside the way is in the piece or not, whichever costs
less. The pieces and host units of a way come one after another: the least sum of their times, over all ways to cut it
into no more pieces than there are, each of which fits a device, is a bound.
"""

from __future__ import annotations

from math import inf

import numpy as np

from splitkit.solvers.placement.latency.hull import Hulls, PieceHull
from splitkit.solvers.placement.latency.makespan import Timing
from splitkit.solvers.placement.problem import Floats, Ints, Problem

_MOST_STEPS = 6_000_000  # nets that are looked at, for one way
_MOST_UNITS = 5000
_MARGIN = 1e-9  # relative: more than sums of floats can be off


def chain_bound(problem: Problem, timing: Timing, group: Ints, order: Ints, value: float) -> float:
    """No makespan is less than this: the greatest bound of some ways through the graph.

    Args:
        problem: what is placed.
        timing: how long units and messages of the problem take.
        group: (n,) units of the same group share a device.
        order: (n,) the units, each after those before it.
        value: a makespan that is reached.
    """
    best = 0.0
    if 0 < problem.units <= _MOST_UNITS:
        for way in ways(problem, timing, order.tolist()):
            if best < value:
                best = max(best, way_bound(timing, Hulls(problem, timing, group, order.tolist()), way, value))
    return best


def way_bound(timing: Timing, hulls: Hulls, way: list[int], value: float) -> float:
    """No makespan is less than the least sum of times along a way, or than the value; 0 if that is too much work.

    Args:
        timing: how long units and messages take.
        hulls: of the graph.
        way: units, each directly before the next, from one with none before it to one with none after it.
        value: a makespan that is reached.
    """
    pieces = len(timing.work)
    best = np.full((len(way) + 1, pieces + 1), inf)  # by place, and by pieces so far
    best[0, 0] = 0.0
    for start, unit in enumerate(way):
        if hulls.steps > _MOST_STEPS:
            return 0.0
        best[start + 1] = np.minimum(best[start + 1], best[start] + timing.host[unit])
        most = value - float(best[start].min())
        for end, time in _runs(hulls, way, start, most):
            best[end + 1, 1:] = np.minimum(best[end + 1, 1:], best[start, :-1] + time)
    return min(value, float(best[-1].min()) * (1 - _MARGIN))


def _runs(hulls: Hulls, way: list[int], start: int, most: float) -> list[tuple[int, float]]:
    """The last place and the least time of each piece that a way enters at a place, those that are not too long."""
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


def ways(problem: Problem, timing: Timing, order: list[int]) -> list[list[int]]:
    """The ways that are longest in time, in memory, in the cost of their nets, in all of these, and in units."""
    quickest = np.min(np.array([*timing.work, timing.host]), axis=0)
    sent = np.array([sum(timing.nets[net][0] for net in nets) for nets in timing.of_unit], np.float64)
    parts = [each / (each.sum() or 1.0) for each in (quickest, problem.nbytes.astype(np.float64), sent)]
    weights = [*parts, parts[0] + parts[1] + parts[2], np.ones(problem.units)]
    return [list(way) for way in dict.fromkeys(tuple(_longest(timing, order, weight)) for weight in weights)]


def _longest(timing: Timing, order: list[int], weight: Floats) -> list[int]:
    """The longest way through the graph."""
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
