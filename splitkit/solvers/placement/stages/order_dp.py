"""The best stages along one order of the units: a dynamic program over the places where the order can be divided.

A stage is a segment of the order. What it pays for nets follows from counts of the pins in it: a net counts once for
each pin, minus once for each pair of neighbouring pins that are both in it, minus once if all pins are in it. Pairs
and whole nets are intervals, and two-dimensional prefix sums give how many of them lie inside each segment.

A level says which devices are used up (`DeviceSteps`), and a step from one level to the next uses one more device::

    best[level 0, place 0] = 0
    best[level, j] = min over steps to the level, and places i < j, of max(best[level before, i], load(i, j))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Ints

MOST_LEVELS = 4096
"""A dynamic program visits every level, so problems with more levels are refused to it."""


@dataclass(frozen=True)
class DeviceStep:
    """The assignment of one more stage to a device.

    Attributes:
        low: the level before the step.
        high: the level after the step; levels are numbered so that each comes after the levels that lead to it.
        kind: the class of the device, an index of `Core.kinds`; -1 for a device that stays empty.
        flight: the number of microbatches in flight in this stage.
    """

    low: int
    high: int
    kind: int
    flight: int


@dataclass(frozen=True)
class DeviceSteps:
    """All levels, and the steps between them.

    Attributes:
        used: how many devices of each class are used up, for each level.
        steps: the steps, sorted by the level that they lead to.
        ends: the levels at which every unit may be placed.
        reach: for each level, how much least work its devices can do per unit of the greatest load.
        left: for each level, how much least work the remaining devices can do per unit of the greatest load.
        cpus: for each level, whether its devices may include a CPU, and whether the remaining ones may.
        in_flight: see `Problem`.
        ordered: whether stages take the devices in their given order.
        fill: whether every device must get a unit.
    """

    used: tuple[tuple[int, ...], ...]
    steps: tuple[DeviceStep, ...]
    ends: tuple[int, ...]
    reach: tuple[float, ...]
    left: tuple[float, ...]
    cpus: tuple[tuple[bool, bool], ...]
    in_flight: tuple[int, ...]
    ordered: bool
    fill: bool

    @property
    def least_flight(self) -> int:
        """The fewest microbatches that a stage can have in flight."""
        return min(self.in_flight, default=0)

    @property
    def levels(self) -> int:
        """The number of levels; at level 0 nothing is placed."""
        return len(self.reach)

    def flight(self, after: int) -> int:
        """Return the number of microbatches in flight in a stage with ``after`` stages after it."""
        return in_flight_of_stage(self.in_flight, after)

    def most(self, level: int, limit: int) -> int:
        """Return an upper bound on what a level's devices do within ``limit``, in work at each unit's fastest class."""
        return int(min(self.reach[level] * limit * (1 + 1e-12) + 1, BIG))

    def rest(self, level: int, limit: int) -> int:
        """Return the upper bound of `most` for the remaining devices."""
        return int(min(self.left[level] * limit * (1 + 1e-12) + 1, BIG))


def in_flight_of_stage(in_flight: tuple[int, ...], after: int) -> int:
    """Return the number of microbatches in flight in a stage with ``after`` stages after it; see `Problem`."""
    return in_flight[min(after, len(in_flight) - 1)] if in_flight else 0


def level_count(core: Core, ordered: bool) -> int:
    """Return the number of levels without making them."""
    counts = [len(kind.devices) for kind in core.kinds]
    return sum(counts) + 1 if ordered else prod(count + 1 for count in counts)


def device_steps(core: Core, in_flight: tuple[int, ...], *, ordered: bool, fill: bool) -> DeviceSteps:
    """Return the levels and steps for a core's devices.

    Args:
        core: the core, with its classes of devices; each class is one device if they are ``ordered``.
        in_flight: see `Problem`.
        ordered: whether stages take the devices in their given order.
        fill: whether every device must get a unit.
    """
    counts = [len(kind.devices) for kind in core.kinds]
    if ordered:
        order = sorted(range(len(counts)), key=lambda kind: -core.kinds[kind].devices[0])
        levels = [tuple(int(kind in order[:used]) for kind in range(len(counts))) for used in range(len(counts) + 1)]
    else:
        levels = sorted(product(*(range(count + 1) for count in counts)), key=lambda level: (sum(level), level))
    number = {level: index for index, level in enumerate(levels)}
    steps = []
    for level in levels:
        for kind in range(len(counts)):
            above = (*level[:kind], level[kind] + 1, *level[kind + 1 :])
            if above in number:
                steps.append(DeviceStep(number[level], number[above], kind, in_flight_of_stage(in_flight, sum(level))))
                if ordered and not fill:
                    steps.append(DeviceStep(number[level], number[above], -1, 0))
    steps.sort(key=lambda step: (step.high, step.low, step.kind))
    speeds = class_speeds(core)
    reach = [sum(n * ratio for n, ratio in zip(level, speeds, strict=True)) for level in levels]
    full = tuple(counts)
    cpus = [kind for kind, spec in enumerate(core.kinds) if spec.cpu]
    return DeviceSteps(
        used=tuple(levels),
        steps=tuple(steps),
        ends=(number[full],) if fill or ordered else tuple(range(len(levels))),
        reach=tuple(reach),
        left=tuple(sum((c - n) * r for c, n, r in zip(full, level, speeds, strict=True)) for level in levels),
        cpus=tuple(
            (any(level[kind] for kind in cpus), any(level[kind] < full[kind] for kind in cpus)) for level in levels
        ),
        in_flight=in_flight,
        ordered=ordered,
        fill=fill,
    )


def class_speeds(core: Core) -> list[float]:
    """Return the most work, counted at each unit's fastest class, that each class of devices does in a unit of time."""
    found = []
    for work, barred in zip(core.work, core.barred, strict=True):
        counted = ~barred & (core.least_work > 0)
        found.append(float((core.least_work[counted] / np.maximum(work[counted], 1)).max(initial=0.0)))
    return found


def least_paid(core: Core) -> Ints:
    """Return (m,) the least that a device pays for each net, in units of least work; a CPU pays nothing, and is left
    out.
    """
    # A device of a slow class takes less least work in its time, so what it pays for nets counts for less too.
    paid = [
        costs if speed >= 1 else np.floor(costs * speed).astype(np.int64)
        for kind, costs, speed in zip(core.kinds, core.costs, class_speeds(core), strict=True)
        if not kind.cpu
    ]
    least: Ints = np.min([*paid, np.full(core.costs.shape[1], BIG if paid else 0)], axis=0)
    return least


# Stages of a core's units, with their loads and bytes in whole numbers.


@dataclass(frozen=True, eq=False)
class StageRanks:
    """An assignment of units to stages, numbered from the last stage to the first.

    Attributes:
        value: the greatest load, as a whole number.
        rank: (n,) the stage of each unit; 0 is the last stage.
        kinds: the class of each stage's device.
    """

    value: int
    rank: Ints
    kinds: tuple[int, ...]


def stage_loads(core: Core, rank: Ints, kinds: tuple[int, ...]) -> Ints:
    """Return (stages,) the load of each stage, from the definition; each unit must be supported where it is."""
    total = np.zeros(len(kinds), np.int64)
    of_stage = np.array(kinds, np.int64)
    np.add.at(total, rank, core.work[of_stage[rank], np.arange(core.size)])
    pairs = np.unique(core.pin_nets * len(kinds) + rank[core.pins])
    net, stage = pairs // len(kinds), pairs % len(kinds)
    cut = (np.bincount(net, minlength=core.costs.shape[1]) > 1)[net]
    np.add.at(total, stage[cut], core.costs[of_stage[stage[cut]], net[cut]])
    return total


def fits(core: Core, rank: Ints, kinds: tuple[int, ...], flights: tuple[int, ...]) -> bool:
    """Return whether each stage's class supports its units and holds them with the microbatches in flight."""
    of_stage = np.array(kinds, np.int64)
    if core.barred[of_stage[rank], np.arange(core.size)].any():
        return False
    held = np.zeros(len(kinds), np.int64)
    np.add.at(held, rank, core.nbytes + np.array(flights, np.int64)[rank] * core.saved)
    return all(int(most) <= core.kinds[kind].capacity for most, kind in zip(held, kinds, strict=True))


# The steps in which stages are assigned to devices, from the last stage to the first.
#
# A level says which devices are used up. Equal devices are counted, so k equal accelerators and one CPU make (k + 1) x
# 2 levels. The last stage comes first because the microbatches that a stage has in flight depend on the stages after
# it.


PLACES = 2048
"""The most places where an order can be divided: the cheapest of a longer order, then those near the best borders."""


class OrderDP:
    """One order of the units, its places, and the loads of its segments."""

    def __init__(self, core: Core, order: Ints, places: Ints | None = None) -> None:
        self.core = core
        self.order = order
        self._spans, self._span_nets = _intervals(core, order)
        self.places = self._cheapest(PLACES) if places is None else places
        self._loads: dict[int, Ints] = {}
        self._least = self._prefix(core.least_work)
        self._bytes, self._saved = self._prefix(core.nbytes), self._prefix(core.saved)

    @property
    def whole(self) -> bool:
        """Whether every position of the order is a place."""
        return len(self.places) == self.core.size + 1

    def forget(self) -> None:
        """Free the loads of the segments; they are computed again on demand."""
        self._loads.clear()

    def near(self, cuts: Ints) -> OrderDP:
        """Return the same order with the places next to given ones."""
        reach = max(1, PLACES // (2 * max(1, len(cuts))))
        around = (cuts[:, None] + np.arange(-reach, reach + 1)[None]).ravel()
        size = self.core.size
        return OrderDP(self.core, self.order, np.unique(np.concatenate([[0, size], np.clip(around, 0, size)])))

    def best(self, device_steps: DeviceSteps, limit: int) -> tuple[StageRanks, Ints] | None:
        """Return the best stages with all loads below ``limit``, and the places of their borders; None if there are
        none.
        """
        values = self._values(device_steps, limit)
        end = min(device_steps.ends, key=lambda level: (values[level, -1], level))
        if values[end, -1] >= limit:
            return None
        return self._path(device_steps, values, end, int(values[end, -1]))

    def _values(self, device_steps: DeviceSteps, limit: int) -> Ints:
        """Return (levels, places) the least greatest load of what lies before each place; ``BIG`` if it is not below
        the limit.
        """
        values = np.full((device_steps.levels, len(self.places)), BIG, np.int64)
        values[0, 0] = 0
        windows = [self._window(device_steps, level, limit) for level in range(device_steps.levels)]
        for step in device_steps.steps:
            if step.kind < 0:
                values[step.high] = np.minimum(values[step.high], values[step.low])
                continue
            (a, b), (c, d) = windows[step.low], windows[step.high]
            reached = np.flatnonzero(values[step.low, a:b] < limit)
            if not len(reached) or c >= d:
                continue
            a, b = a + int(reached[0]), a + int(reached[-1]) + 1
            worst = np.maximum(self.stretches(step, a, b, c, d), values[step.low, a:b, None]).min(axis=0)
            values[step.high, c:d] = np.minimum(values[step.high, c:d], np.where(worst < limit, worst, BIG))
        return values

    def _window(self, device_steps: DeviceSteps, level: int, limit: int) -> tuple[int, int]:
        """Return the range of places that a level can reach and from which the remaining devices reach the end."""
        total = int(self._least[-1])
        low = np.searchsorted(self._least, total - device_steps.rest(level, limit), side="left")
        high = np.searchsorted(self._least, device_steps.most(level, limit), side="right")
        return int(low), int(high)

    def stretches(self, step: DeviceStep, a: int, b: int, c: int, d: int) -> Ints:
        """Return (b - a, d - c) the loads of segments from places a to b to places c to d; ``BIG`` if illegal."""
        loads = self._load(step.kind)[a:b, c:d]
        kind = self.core.kinds[step.kind]
        if kind.capacity < int(self._bytes[-1]) + step.flight * int(self._saved[-1]):
            held = self._bytes + step.flight * self._saved
            loads = np.where(held[None, c:d] - held[a:b, None] > kind.capacity, BIG, loads)
        return loads

    def _load(self, kind: int) -> Ints:
        """Return (places, places) the load of each segment on a device of a class."""
        tables = self.core.work, self.core.barred, self.core.costs
        same = (k for k in range(kind) if all(np.array_equal(rows[k], rows[kind]) for rows in tables))
        kind = next(same, kind)  # the first class that is alike
        if kind not in self._loads:
            if len(self._loads) > 8:
                self._loads.clear()
            self._loads[kind] = self._computed(kind)
        return self._loads[kind]

    def _computed(self, kind: int) -> Ints:
        core = self.core
        work, barred = self._prefix(core.work[kind]), self._prefix(core.barred[kind].astype(np.int64))
        loads = work[None, :] - work[:, None]
        if core.costs[kind].any():
            at_pins = np.zeros(core.size, np.int64)
            np.add.at(at_pins, core.pins, core.costs[kind][core.pin_nets])
            pins = self._prefix(at_pins)
            loads += pins[None, :] - pins[:, None]
            loads -= self._inside(core.costs[kind])
        loads[barred[None, :] > barred[:, None]] = BIG
        loads[np.tri(len(self.places), dtype=np.bool_)] = BIG
        return loads

    def _inside(self, costs: Ints) -> Ints:
        """Return (places, places) the cost of the intervals inside each segment."""
        count = len(self.places)
        cell = np.searchsorted(self.places, self._spans, side="right") - 1
        inside = np.zeros((count, count), np.int64)
        np.add.at(inside, (cell[:, 0], cell[:, 1] + 1), costs[self._span_nets])
        inside[:] = np.cumsum(inside[::-1], axis=0)[::-1]
        return np.cumsum(inside, axis=1, out=inside)

    def _prefix(self, weights: Ints) -> Ints:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(weights[self.order])])[self.places]

    def _cheapest(self, most: int) -> Ints:
        """Return all places, or from each block of places the one where the crossing nets cost least."""
        size = self.core.size
        if size < most:
            return np.arange(size + 1)
        crossing = np.zeros(size + 1, np.int64)
        whole = self._spans[-self.core.costs.shape[1] :]
        cost = self.core.costs.max(axis=0, initial=0)
        np.add.at(crossing, whole[:, 0] + 1, cost)
        np.add.at(crossing, whole[:, 1] + 1, -cost)
        crossing = np.cumsum(crossing)
        block = np.arange(1, size) * (most - 2) // size
        by_cost = np.lexsort((crossing[1:size], block))
        first = np.unique(block[by_cost], return_index=True)[1]
        return np.concatenate([[0], 1 + by_cost[first], [size]]).astype(np.int64)

    def ties(
        self, device_steps: DeviceSteps, value: int, count: int, random: np.random.Generator
    ) -> Iterator[StageRanks]:
        """Yield stages with all loads at most ``value``, drawn step by step at random; some may repeat."""
        values = self._values(device_steps, value + 1)
        ends = [level for level in device_steps.ends if values[level, -1] <= value]
        for _ in range(count if ends else 0):
            yield self._path(device_steps, values, ends[int(random.integers(len(ends)))], value, random)[0]

    def _path(
        self, device_steps: DeviceSteps, values: Ints, end: int, value: int, random: np.random.Generator | None = None
    ) -> tuple[StageRanks, Ints]:
        """Return stages with loads up to a value, traced back from the last step (any, or at random), and their
        borders.
        """
        level, place = end, len(self.places) - 1
        cuts: list[tuple[int, int]] = []
        while place or level:
            step, before = self._came_from(device_steps, values, level, place, value, random)
            if step.kind >= 0:
                cuts.append((int(self.places[place]), step.kind))
            level, place = step.low, before
        cuts.reverse()
        rank = np.empty(self.core.size, np.int64)
        ends = np.array([cut for cut, _ in cuts], np.int64)
        rank[self.order] = np.searchsorted(ends, np.arange(self.core.size), side="right")
        return StageRanks(value, rank, tuple(kind for _, kind in cuts)), ends[:-1]

    def _came_from(
        self,
        device_steps: DeviceSteps,
        values: Ints,
        level: int,
        place: int,
        value: int,
        random: np.random.Generator | None,
    ) -> tuple[DeviceStep, int]:
        """Return a step to a place with no greater load than ``value``, and the place where it starts."""
        choices: list[tuple[DeviceStep, Ints]] = []
        for step in device_steps.steps:
            if step.high != level:
                continue
            if step.kind < 0:
                starts = np.array([place])[values[step.low, [place]] <= value]
            else:
                loads = self.stretches(step, 0, place, place, place + 1)[:, 0] if place else np.zeros(0, np.int64)
                starts = np.flatnonzero((loads <= value) & (values[step.low, :place] <= value))
            if len(starts):
                if random is None:
                    return step, int(starts[-1])
                choices.append((step, starts))
        assert random is not None and choices, "a value that no step reaches"
        step, starts = choices[int(random.integers(len(choices)))]
        return step, int(starts[int(random.integers(len(starts)))])


def _intervals(core: Core, order: Ints) -> tuple[Ints, Ints]:
    """Return the intervals between neighbouring pins of each net, those from first to last pin, and their nets."""
    position = np.empty(core.size, np.int64)
    position[order] = np.arange(core.size)
    at = position[core.pins]
    by_net = np.lexsort((at, core.pin_nets))
    at, nets = at[by_net], core.pin_nets[by_net]
    same = nets[1:] == nets[:-1]
    pairs = np.stack([at[:-1][same], at[1:][same]], axis=1)
    whole = np.stack([at[core.starts[:-1]], at[core.starts[1:] - 1]], axis=1)
    return np.concatenate([pairs, whole]), np.concatenate([nets[1:][same], np.arange(core.costs.shape[1])])
