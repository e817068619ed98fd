"""Lower bounds on the time of a piece of which some units are known to be in it, and some not."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from splitkit.solvers.placement.latency.makespan import Timing
from splitkit.solvers.placement.problem import Ints, Problem

_MOST_GROUPS = 8  # connected groups outside a piece for which all choices are tried
_MOST_NETS = 60  # nets between these groups
_MOST_STEPS = 3_000_000  # nets that are looked at; what is beside a piece counts for nothing from then on


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
        beside = list(self._beside(units, outside)) if self.steps < _MOST_STEPS else []
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
