"""Branch and bound over all placements of a small problem, one unit after the other in topological order.

The units placed so far include all their predecessors, so their makespan is a lower bound on that of every completion.
What is still to come takes at least its longest path.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from splitkit.solvers.placement.latency.makespan import CPU, Timing, makespan
from splitkit.solvers.placement.problem import Ints, Problem

_MOST_UNITS = 64
_MOST_ITEMS = 600_000  # units and edges in all makespans computed
_ROUNDING = 1e-12  # relative; smaller improvements are not searched for


class BranchAndBound:
    """One search.

    Args:
        problem: the problem.
        timing: the times of the problem's units and transfers.
        group: (n,) units of the same group share a device.
        order: (n,) the units in topological order.
        value: a makespan that is attained; placements that are no better are left out.

    Attributes:
        best: the place of each unit in the best placement found; ``None`` if none was found.
        closed: whether all placements have been visited or excluded.
    """

    def __init__(self, problem: Problem, timing: Timing, group: Ints, order: Ints, value: float = inf) -> None:
        self.best: list[int] | None = None
        self.closed = False
        self._value, self._order = value, order
        accelerators = [device for device in problem.devices if not device.cpu]
        self._pieces = max(map(len, timing.turns), default=1)
        self._alike = [accelerators.index(device) for device in accelerators]  # the first device that is the same
        self._room = [float(device.capacity) for device in accelerators]
        self._groups: list[int] = group[order].tolist()
        self._bytes: list[float] = np.bincount(group, problem.nbytes).tolist()
        self._prefixes = _prefixes(timing, order.tolist()) if problem.units <= _MOST_UNITS else []
        self._left = _MOST_ITEMS // (1 + problem.units + len(problem.edges))
        self._place: list[int] = []
        self._device: dict[int, int] = {}

    def run(self, *, any_will_do: bool = False) -> None:
        """Search all placements, or until the first one, up to a fixed number of steps."""
        self._any = any_will_do
        if self._prefixes:
            self._grow()
            self.closed = self._left > 0 and not (any_will_do and self.best is not None)

    def _grow(self) -> None:
        """Try the places of the next unit, the most promising first."""
        done = len(self._place)
        if done == len(self._groups):
            self.best, self._value = self._in_problem(), self._makespan()
            return
        choices = []
        for place in self._choices(self._groups[done]):
            self._left -= 1
            if self._left <= 0:
                return
            self._place.append(place)
            choices.append((self._makespan(), place))
            self._place.pop()
        for value, place in sorted(choices):
            if self._left <= 0 or value == inf or value >= self._value * (1 - _ROUNDING):
                return
            if self._any and self.best is not None:
                return
            self._with(place)

    def _with(self, place: int) -> None:
        """Continue with a place for the next unit."""
        group = self._groups[len(self._place)]
        is_first = group not in self._device
        device = place if place == CPU else place // self._pieces
        if is_first:
            self._device[group] = device
            if device != CPU:
                self._room[device] -= self._bytes[group]
        self._place.append(place)
        self._grow()
        self._place.pop()
        if is_first:
            del self._device[group]
            if device != CPU:
                self._room[device] += self._bytes[group]

    def _choices(self, group: int) -> list[int]:
        """Return the places where a unit of a group can go; of equal empty devices, only the first one's places."""
        used = set(self._device.values())
        places: list[int] = []
        for device in range(len(self._room)):
            if group in self._device:
                fits = self._device[group] == device
            else:
                twin = any(a == self._alike[device] and d not in used for d, a in enumerate(self._alike[:device]))
                fits = self._room[device] >= self._bytes[group] and not twin
            if fits:
                places += range(device * self._pieces, (device + 1) * self._pieces)
        if self._device.get(group, CPU) == CPU:
            places.append(CPU)
        return places

    def _makespan(self) -> float:
        """Return a lower bound from the units placed so far and the longest paths after them."""
        timing = self._prefixes[len(self._place)]
        return makespan(timing, self._place + [CPU] * (len(timing.before) - len(self._place)))

    def _in_problem(self) -> list[int]:
        place = np.empty(len(self._place), np.int64)
        place[self._order] = self._place
        return list(map(int, place))


def _prefixes(timing: Timing, order: list[int]) -> list[Timing]:
    """Return the timing of the first units of an order, for each number of them."""
    whole = _renumbered(timing, order)
    quickest = [min(row[unit] for row in (*whole.work, whole.cpu)) for unit in range(len(order))]
    longest = [0.0] * len(order)
    for unit in reversed(range(len(order))):
        longest[unit] = quickest[unit] + max((longest[then] for then in whole.after[unit]), default=0.0)
    return [_prefix(whole, longest, size) for size in range(len(order) + 1)]


def _renumbered(timing: Timing, order: list[int]) -> Timing:
    """Return the same timing with the units numbered along an order."""
    number = {unit: place for place, unit in enumerate(order)}
    return Timing(
        work=[[row[unit] for unit in order] for row in timing.work],
        cpu=[timing.cpu[unit] for unit in order],
        before=[[number[other] for other in timing.before[unit]] for unit in order],
        after=[[number[other] for other in timing.after[unit]] for unit in order],
        nets=[(cost, [number[pin] for pin in pins]) for cost, pins in timing.nets],
        of_unit=[timing.of_unit[unit] for unit in order],
        turns=timing.turns,
    )


def _prefix(whole: Timing, longest: list[float], size: int) -> Timing:
    """Return the timing of the first units, with the longest path after each added as a unit on a CPU."""
    rest = {unit: [longest[then] for then in whole.after[unit] if then >= size] for unit in range(size)}
    tails = {unit: max(ways) for unit, ways in rest.items() if ways}
    number = {unit: size + place for place, unit in enumerate(tails)}
    after = [[then for then in whole.after[unit] if then < size] for unit in range(size)]
    for unit, tail in number.items():
        after[unit].append(tail)
    pins = ((cost, [pin for pin in pins if pin < size]) for cost, pins in whole.nets)
    return replace(
        whole,
        cpu=[*whole.cpu[:size], *tails.values()],
        before=[*whole.before[:size], *([unit] for unit in tails)],
        after=[*after, *([] for _ in tails)],
        nets=[(cost, here) for cost, here in pins if len(here) > 1],
    )
