"""The makespan of pieces on accelerators and units on CPUs, from the definition."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from splitkit.solvers.placement.core import distinct_pairs, value_lists
from splitkit.solvers.placement.problem import Floats, Ints, Problem

# Lower bounds on the time of a piece of which some units are known to be in it, and some not.


_MOST_GROUPS = 8  # connected groups outside a piece for which all choices are tried
_MOST_NETS = 60  # nets between these groups
_PIECE_BOUNDS_MOST_STEPS = 3_000_000  # nets that are looked at; what is beside a piece counts for nothing from then on


@dataclass(frozen=True, eq=False)
class PieceHull:
    """The units that are certainly in a piece, as bits, and all units before and after them."""

    units: int = 0
    before: int = 0
    after: int = 0


class Hulls:
    """The pieces of one graph, as sets of bits.

    Args:
        problem: the problem.
        timing: the times of the problem's units and transfers.
        group: (n,) units of the same group share a device.
        order: (n,) the units in topological order.

    Attributes:
        before: the ancestors of each unit.
        after: the descendants of each unit.
        steps: the number of nets visited so far.
    """

    def __init__(self, problem: Problem, timing: Timing, group: Ints, order: list[int]) -> None:
        self._timing = timing
        one_each = max(map(len, timing.turns), default=1) == 1  # so that a group on a device is in one piece
        self._mates = _mates(group) if one_each else [1 << unit for unit in range(problem.units)]
        self.before, self.after = _reached(timing.before, order), _reached(timing.after, order[::-1])
        self._nets = [(sum(1 << pin for pin in pins), cost) for cost, pins in timing.nets]
        room: dict[int, float] = {}
        for device in problem.devices:
            if not device.cpu:
                room[device.kind] = max(room.get(device.kind, 0.0), float(device.capacity))
        self._kinds = [(problem.seconds[kind].tolist(), capacity) for kind, capacity in room.items()]
        self._nbytes = problem.nbytes.tolist()
        self._all = (1 << problem.units) - 1
        self.steps = 0

    def grown(self, hull: PieceHull, unit: int) -> PieceHull:
        """Return the hull with one more unit and all that must come with it: units between, and those that share its
        device.
        """
        units, before, after = hull.units, hull.before, hull.after
        fresh = self._mates[unit] & ~units
        while fresh:
            units |= fresh
            for other in _bits(fresh):
                before |= self.before[other]
                after |= self.after[other]
            fresh = before & after & ~units
            for other in _bits(fresh):
                fresh |= self._mates[other]
            fresh &= ~units
        return PieceHull(units, before, after)

    def work(self, units: int) -> float:
        """Return the least work of the units on a device that has room for them; infinite if none has."""
        those = _bits(units)
        held = sum(self._nbytes[unit] for unit in those)
        return min((sum(work[v] for v in those) for work, room in self._kinds if held <= room), default=inf)

    def takes(self, units: int, outside: int) -> float:
        """Return a lower bound on the time of a piece.

        Args:
            units: units that are in it; more may be.
            outside: units that are not in it.
        """
        self.steps += len(self._nets)
        cut = sum(cost for pins, cost in self._nets if pins & units and pins & outside)
        beside = list(self._beside(units, outside)) if self.steps < _PIECE_BOUNDS_MOST_STEPS else []
        those = _bits(units)
        held = sum(self._nbytes[unit] for unit in those)
        least = inf
        for work, room in self._kinds:
            if held <= room:
                time = sum(work[unit] for unit in those) + cut
                least = min(
                    least, time + sum(self._least(near, nets, units, work, room - held) for near, nets in beside)
                )
        return least

    def _beside(self, units: int, outside: int) -> list[tuple[list[int], list[int]]]:
        """Return the connected groups of units that may be in a piece or not, with the nets that connect them.

        A net that is certainly cut is left out, and no net connects two of the results.
        """
        free = self._all & ~units & ~outside
        found, seen = [], 0
        for pins, _ in self._nets:
            if pins & units and pins & free & ~seen and not pins & outside:
                near, nets = self._near(pins & free, units, outside, free)
                seen |= near
                groups = self._groups(near)
                if nets and len(groups) <= _MOST_GROUPS:
                    found.append((groups, nets))
        return found

    def _near(self, start: int, units: int, outside: int, free: int) -> tuple[int, list[int]]:
        """Return the free units connected to a unit, and their nets; no nets if there are too many."""
        near, fresh = 0, start
        nets: dict[int, None] = {}
        while fresh and len(nets) <= _MOST_NETS:
            for unit in _bits(fresh):
                fresh |= self._mates[unit] & free
            fresh &= ~near
            near |= fresh
            touching = [net for unit in _bits(fresh) for net in self._timing.of_unit[unit]]
            fresh = 0
            for net in touching:
                pins = self._nets[net][0]
                if net not in nets and not (pins & units and pins & outside):
                    nets[net] = None
                    fresh |= pins & free & ~near
        return near | fresh, [] if fresh else list(nets)

    def _groups(self, units: int) -> list[int]:
        found = []
        while units:
            found.append(self._mates[(units & -units).bit_length() - 1] & units)
            units &= ~found[-1]
        return found

    def _least(self, groups: list[int], nets: list[int], units: int, work: list[float], room: float) -> float:
        """Return the least work and net cost over all choices of groups that are in the piece."""
        least = inf
        self.steps += len(nets) << len(groups)
        for choice in range(1 << len(groups)):
            taken = sum(group for place, group in enumerate(groups) if choice >> place & 1)
            those = _bits(taken)
            if sum(self._nbytes[unit] for unit in those) > room:
                continue
            cost = sum(work[unit] for unit in those)
            for net in nets:
                pins, price = self._nets[net]
                if 0 != pins & (units | taken) != pins:
                    cost += price
            least = min(least, cost)
        return least


def _mates(group: Ints) -> list[int]:
    """Return the units of the same group as each unit, as bits."""
    of_group: dict[int, int] = {}
    for unit, label in enumerate(group.tolist()):
        of_group[label] = of_group.get(label, 0) | 1 << unit
    return [of_group[label] for label in group.tolist()]


def _reached(steps: list[list[int]], order: list[int]) -> list[int]:
    """Return the units that are reachable from each unit, as bits."""
    reached = [0] * len(steps)
    for unit in order:
        for other in steps[unit]:
            reached[unit] |= reached[other] | 1 << other
    return reached


def _bits(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


_MOST_STEPS = 6_000_000  # nets visited for one path
_MOST_UNITS = 5000  # what lies before and after each is a number of as many bits
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


# A lower bound on the makespan from one path through the graph, divided optimally into pieces and units on CPUs.
#
# A piece starts when all its inputs are there and delivers everything at its end, so no path leaves it and comes back:
# the units of a path that are in one piece are consecutive, and whatever lies between two units of a piece is in it
# too, with its work and its memory. What comes before a unit that the path passes before the piece, or after a unit
# that it passes afterwards, is not in the piece, so nets between the two are cut and cost time. Other units are in the
# piece or not, whichever costs less. The pieces and CPU units of a path run one after another, so the least sum of
# their times is a bound: over all divisions of the path into no more pieces than there are, each of which fits a
# device.


CPU = -1
"""The place of a unit on a CPU; all other places are pieces."""


@dataclass(frozen=True, eq=False)
class Timing:
    """A problem as lists, from which many makespans are computed.

    Attributes:
        work: the time of each unit in each piece, by piece; infinite where the device does not support it.
        cpu: the time of each unit on a CPU; infinite where no CPU supports it.
        before: the units before each unit.
        after: the units after each unit.
        nets: (cost, pins) of each net, each pin once, the maker first.
        of_unit: the nets of each unit.
        turns: for each device its pieces, in the order in which they run.
    """

    work: list[list[float]]
    cpu: list[float]
    before: list[list[int]]
    after: list[list[int]]
    nets: list[tuple[float, list[int]]]
    of_unit: list[list[int]]
    turns: list[list[int]]

    @classmethod
    def of(cls, problem: Problem, pieces: int) -> Timing:
        """Return the timing of a problem with so many pieces on each accelerator."""
        accelerators = [d for d, device in enumerate(problem.devices) if not device.cpu]
        cpus = sorted({device.kind for device in problem.devices if device.cpu})
        first, then = distinct_pairs(problem.edges[problem.edges[:, 0] != problem.edges[:, 1]]).T
        nets: list[tuple[float, list[int]]] = []
        of_unit: list[list[int]] = [[] for _ in range(problem.units)]
        for net, cost in enumerate(problem.net_costs.tolist()):
            pins = list(dict.fromkeys(problem.pins[problem.net_starts[net] : problem.net_starts[net + 1]].tolist()))
            if len(pins) > 1 and cost:
                for pin in pins:
                    of_unit[pin].append(len(nets))
                nets.append((cost, pins))
        return cls(
            work=[problem.seconds[problem.devices[d].kind].tolist() for d in accelerators for _ in range(pieces)],
            cpu=[min((float(problem.seconds[kind, v]) for kind in cpus), default=inf) for v in range(problem.units)],
            before=value_lists(then, first, problem.units),
            after=value_lists(first, then, problem.units),
            nets=nets,
            of_unit=of_unit,
            turns=[list(range(i * pieces, (i + 1) * pieces)) for i in range(len(accelerators))],
        )


def makespan(timing: Timing, place: list[int]) -> float:
    """Return when the last unit or piece ends; infinite if pieces wait for each other in a cycle.

    Args:
        timing: the times of the problem's units and transfers.
        place: `CPU` or a piece, for each unit.
    """
    takes, members = piece_times(timing, place)
    pieces = len(takes)
    missing = [0] * pieces
    for piece, units in enumerate(members):
        missing[piece] = sum(1 for unit in units for other in timing.before[unit] if place[other] != piece)
    following = _following(timing, members, missing)
    start = [0.0] * pieces
    begin = [0.0] * len(place)
    wanted = [len(units) for units in timing.before]
    ready = [unit for unit, count in enumerate(wanted) if not count and place[unit] == CPU]
    ready += [~piece for piece in range(pieces) if members[piece] and not missing[piece]]
    done, last = 0, 0.0
    while ready:
        item = ready.pop()
        if item >= 0:
            finish, units = begin[item] + timing.cpu[item], [item]
        else:
            finish, units = start[~item] + takes[~item], members[~item]
            then = following[~item]
            if then >= 0:
                start[then] = max(start[then], finish)
                missing[then] -= 1
                if not missing[then]:
                    ready.append(~then)
        done += len(units)
        last = max(last, finish)
        for unit in units:
            here = place[unit]
            for then in timing.after[unit]:
                there = place[then]
                if there == CPU:
                    begin[then] = max(begin[then], finish)
                    wanted[then] -= 1
                    if not wanted[then]:
                        ready.append(then)
                elif there != here:
                    start[there] = max(start[there], finish)
                    missing[there] -= 1
                    if not missing[there]:
                        ready.append(~there)
    return last if done == len(place) else inf


def piece_times(timing: Timing, place: list[int]) -> tuple[list[float], list[list[int]]]:
    """Return how long each piece takes, and its units."""
    takes = [0.0] * len(timing.work)
    members: list[list[int]] = [[] for _ in takes]
    for unit, piece in enumerate(place):
        if piece >= 0:
            members[piece].append(unit)
            takes[piece] += timing.work[piece][unit]
    for cost, pins in timing.nets:
        holders = {place[pin] for pin in pins}
        if len(holders) > 1:
            for piece in holders:
                if piece >= 0:
                    takes[piece] += cost
    return takes, members


def _following(timing: Timing, members: list[list[int]], missing: list[int]) -> list[int]:
    """Return the next piece on the device of each piece, -1 for none; that piece waits for one thing more."""
    following = [-1] * len(members)
    for turns in timing.turns:
        used = [piece for piece in turns if members[piece]]
        for piece, then in pairwise(used):
            following[piece] = then
            missing[then] += 1
    return following
