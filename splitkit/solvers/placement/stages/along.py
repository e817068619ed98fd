"""The best stages along one order of the units: a dynamic program over the places where it can be cut.

A stage is a stretch of the order. What it pays for nets follows from counts of the pins in it: a net counts once for
each pin, less once for each pair of neighbouring pins that are both in it, less once if all are in it. Pairs and
whole nets are intervals; how many lie inside each stretch are sums over two dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.stages.ladder import Ladder, Step
from splitkit.solvers.placement.stages.stages import StageRanks

PLACES = 2048
"""Where an order can be cut, at most; of a longer one the cheapest places are taken, then those near the best cuts."""


class Along:
    """One order of the units, its places, and the loads of its stretches."""

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
        """Whether every place of the order is one."""
        return len(self.places) == self.core.size + 1

    def forget(self) -> None:
        """Give up the loads of stretches, which are many; they are found again if asked for."""
        self._loads.clear()

    def near(self, cuts: Ints) -> Along:
        """The same order with the places next to given ones."""
        reach = max(1, PLACES // (2 * max(1, len(cuts))))
        around = (cuts[:, None] + np.arange(-reach, reach + 1)[None]).ravel()
        size = self.core.size
        return Along(self.core, self.order, np.unique(np.concatenate([[0, size], np.clip(around, 0, size)])))

    def best(self, ladder: Ladder, limit: int) -> tuple[StageRanks, Ints] | None:
        """The best stages with all loads below ``limit`` and where they are cut, or None."""
        values = self._values(ladder, limit)
        end = min(ladder.ends, key=lambda level: (values[level, -1], level))
        if values[end, -1] >= limit:
            return None
        return self._path(ladder, values, end, int(values[end, -1]))

    def _values(self, ladder: Ladder, limit: int) -> Ints:
        """(levels, places) the least greatest load of what lies before each place; ``BIG`` if it is not less."""
        values = np.full((ladder.levels, len(self.places)), BIG, np.int64)
        values[0, 0] = 0
        windows = [self._window(ladder, level, limit) for level in range(ladder.levels)]
        for step in ladder.steps:
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

    def _window(self, ladder: Ladder, level: int, limit: int) -> tuple[int, int]:
        """Places that a level can reach, and from which the devices that are left reach the end."""
        total = int(self._least[-1])
        low = np.searchsorted(self._least, total - ladder.rest(level, limit), side="left")
        high = np.searchsorted(self._least, ladder.most(level, limit), side="right")
        return int(low), int(high)

    def stretches(self, step: Step, a: int, b: int, c: int, d: int) -> Ints:
        """(b - a, d - c) the loads of stretches from places a to b to places c to d; ``BIG`` for what may not be."""
        loads = self._load(step.kind)[a:b, c:d]
        kind = self.core.kinds[step.kind]
        if kind.capacity < int(self._bytes[-1]) + step.flight * int(self._saved[-1]):
            held = self._bytes + step.flight * self._saved
            loads = np.where(held[None, c:d] - held[a:b, None] > kind.capacity, BIG, loads)
        return loads

    def _load(self, kind: int) -> Ints:
        """(places, places) the load of each stretch on a device of a class."""
        if kind not in self._loads:
            core = self.core
            alike = [
                k
                for k in self._loads
                if np.array_equal(core.work[k], core.work[kind])
                and np.array_equal(core.barred[k], core.barred[kind])
                and np.array_equal(core.costs[k], core.costs[kind])
            ]
            if len(self._loads) > 8:
                self._loads.clear()
            self._loads[kind] = self._loads[alike[0]] if alike and alike[0] in self._loads else self._computed(kind)
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
        """(places, places) the cost of the intervals that lie within each stretch."""
        count = len(self.places)
        cell = np.searchsorted(self.places, self._spans, side="right") - 1
        inside = np.zeros((count, count), np.int64)
        np.add.at(inside, (cell[:, 0], cell[:, 1] + 1), costs[self._span_nets])
        inside[:] = np.cumsum(inside[::-1], axis=0)[::-1]
        return np.cumsum(inside, axis=1, out=inside)

    def _prefix(self, weights: Ints) -> Ints:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(weights[self.order])])[self.places]

    def _cheapest(self, most: int) -> Ints:
        """All places, or the one of each block of places where the nets that cross it cost least."""
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

    def ties(self, ladder: Ladder, value: int, count: int, random: np.random.Generator) -> Iterator[StageRanks]:
        """Some of the stages with all loads at most ``value``, drawn step by step; the same may come twice."""
        values = self._values(ladder, value + 1)
        ends = [level for level in ladder.ends if values[level, -1] <= value]
        for _ in range(count if ends else 0):
            yield self._path(ladder, values, ends[int(random.integers(len(ends)))], value, random)[0]

    def _path(
        self, ladder: Ladder, values: Ints, end: int, value: int, random: np.random.Generator | None = None
    ) -> tuple[StageRanks, Ints]:
        """Stages with loads up to a value, from the last step back: any, or drawn at random; and their cuts."""
        level, place = end, len(self.places) - 1
        cuts: list[tuple[int, int]] = []
        while place or level:
            step, before = self._came_from(ladder, values, level, place, value, random)
            if step.kind >= 0:
                cuts.append((int(self.places[place]), step.kind))
            level, place = step.low, before
        cuts.reverse()
        rank = np.empty(self.core.size, np.int64)
        ends = np.array([cut for cut, _ in cuts], np.int64)
        rank[self.order] = np.searchsorted(ends, np.arange(self.core.size), side="right")
        return StageRanks(value, rank, tuple(kind for _, kind in cuts)), ends[:-1]

    def _came_from(
        self, ladder: Ladder, values: Ints, level: int, place: int, value: int, random: np.random.Generator | None
    ) -> tuple[Step, int]:
        """A step to a place with no greater load than ``value``, and the place from which it starts."""
        choices: list[tuple[Step, Ints]] = []
        for step in ladder.steps:
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
    """The intervals between neighbouring pins of each net, then from its first to its last pin; and their nets."""
    position = np.empty(core.size, np.int64)
    position[order] = np.arange(core.size)
    at = position[core.pins]
    by_net = np.lexsort((at, core.pin_nets))
    at, nets = at[by_net], core.pin_nets[by_net]
    same = nets[1:] == nets[:-1]
    pairs = np.stack([at[:-1][same], at[1:][same]], axis=1)
    whole = np.stack([at[core.starts[:-1]], at[core.starts[1:] - 1]], axis=1)
    return np.concatenate([pairs, whole]), np.concatenate([nets[1:][same], np.arange(core.costs.shape[1])])
