"""The best stages over all convex sequences: a dynamic program over ideals, each value pushed on to larger ideals.

It is exact: a stage is what lies between two ideals, and `ideals` leaves out none that stages below the bound need.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.ideals import Ideals, TooManyError
from splitkit.solvers.placement.ladder import Ladder
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.stages import Stages

_MOST_CELLS = 3 * 10**8  # ideals times nets that are kept in memory


def best_stages(
    core: Core, ladder: Ladder, limit: int, found: Ideals, still_time: Callable[[], bool] = lambda: True
) -> Stages | None:
    """The stages with the least greatest load below ``limit``, or None if there are none.

    Args:
        core: whose units; stages are from the last one back, so its edges go back too.
        ladder: the levels.
        limit: above all loads.
        found: what `ideals` gave for these.
        still_time: asked from time to time; `TooManyError` is raised when it says no.
    """
    if found.count * (core.costs.shape[1] + core.size) > _MOST_CELLS:
        raise TooManyError
    if not found.count or found.least[-1] != core.least_work.sum():
        return None
    search = _Search(core, ladder, limit, found)
    for ideal in range(found.count):
        search.push(ideal)
        if not ideal % 256 and not still_time():
            raise TooManyError
    return search.stages()


class _Search:
    """Values of ideals at levels, each pushed on to all ideals that it is in, in order of work."""

    def __init__(self, core: Core, ladder: Ladder, limit: int, found: Ideals) -> None:
        self._core = core
        self._ladder = ladder
        self._limit = limit
        self._found = found
        members = found.members(core.size)
        self._outside = ~found.bits
        self._pins = (core.incidence @ members.astype(np.int32)).astype(np.uint16)  # (nets, ideals) pins inside
        self._sizes = np.diff(core.starts).astype(np.uint16)
        crossing = (self._pins > 0) & (self._pins < self._sizes[:, None])
        self._crossing = crossing
        self._work = core.work @ members.astype(np.int64)
        self._barred = core.barred.astype(np.int64) @ members.astype(np.int64)
        self._boundary = core.costs @ crossing.astype(np.int64)
        self._bytes, self._saved = core.nbytes @ members.astype(np.int64), core.saved @ members.astype(np.int64)
        self._values = np.full((ladder.levels, found.count), BIG, np.int64)
        self._values[0, 0] = 0
        self._parents = np.full((ladder.levels, found.count, 2), -1, np.int32)  # ideal and step
        self._from: list[list[int]] = [[] for _ in range(ladder.levels)]
        for index, step in enumerate(ladder.steps):
            self._from[step.low].append(index)
        gain = max((ladder.reach[step.high] - ladder.reach[step.low] for step in ladder.steps), default=0.0)
        self._gain = int(min(gain * limit * (1 + 1e-9) + 1, BIG))

    def push(self, ideal: int) -> None:
        """One more stage after an ideal, every one that is below the limit."""
        self._skip(ideal)
        levels = np.flatnonzero((self._values[:, ideal] < self._limit) & self._found.allowed[:, ideal]).tolist()
        if not levels:
            return
        larger = self._larger(ideal)
        if not len(larger):
            return
        kinds = {self._ladder.steps[index].kind for level in levels for index in self._from[level]} - {-1}
        touched = self._touched(ideal, larger)
        loads = {kind: self._loads(kind, ideal, larger, *touched) for kind in sorted(kinds)}
        for level in levels:
            for index in self._from[level]:
                step = self._ladder.steps[index]
                if step.kind >= 0:
                    self._take(index, ideal, larger, loads[step.kind])

    def stages(self) -> Stages | None:
        """The best stages that end at everything."""
        last = self._found.count - 1
        self._skip(last)
        end = min(self._ladder.ends, key=lambda level: (self._values[level, last], level))
        value = int(self._values[end, last])
        if value >= self._limit:
            return None
        members = self._found.members(self._core.size)
        parts, kinds, level, ideal = [], [], end, last
        while level or ideal:
            before, index = self._parents[level, ideal].tolist()
            step = self._ladder.steps[index]
            if step.kind >= 0:
                parts.append(members[:, ideal] > members[:, before])
                kinds.append(step.kind)
            level, ideal = step.low, before
        rank = np.zeros(self._core.size, np.int64)
        for place, part in enumerate(reversed(parts)):
            rank[part] = place
        return Stages(value, rank, tuple(reversed(kinds)))

    def _skip(self, ideal: int) -> None:
        """Go over devices that stay empty."""
        for index, step in enumerate(self._ladder.steps):
            if step.kind < 0 and self._values[step.low, ideal] < self._values[step.high, ideal]:
                self._values[step.high, ideal] = self._values[step.low, ideal]
                self._parents[step.high, ideal] = ideal, index

    def _larger(self, ideal: int) -> Ints:
        """The ideals that hold this one and not too much more."""
        least, bits, outside = self._found.least, self._found.bits, self._outside
        end = int(np.searchsorted(least, least[ideal] + self._gain, side="right"))
        held = np.flatnonzero(bits[:, ideal])
        if not len(held):
            return np.arange(ideal + 1, end)
        rest = outside[held[0], ideal + 1 : end] & bits[held[0], ideal]
        for word in held[1:].tolist():
            rest |= outside[word, ideal + 1 : end] & bits[word, ideal]
        return np.flatnonzero(rest == 0) + (ideal + 1)

    def _touched(self, ideal: int, larger: Ints) -> tuple[Ints, NDArray[np.int8]]:
        """The nets that cross an ideal, and of each what larger ideals change: (nets, larger) 1, 0 or -1.

        A stage between two ideals pays the nets that cross the larger one, not those that it does not touch (-1),
        and those that it completes too (1).
        """
        nets = np.flatnonzero(self._crossing[:, ideal])
        pins = self._pins[nets[:, None], larger[None]]
        grown = (pins > self._pins[nets, ideal][:, None]).astype(np.int8)
        return nets, grown + (pins == self._sizes[nets][:, None]) - np.int8(1)

    def _loads(self, kind: int, ideal: int, larger: Ints, nets: Ints, change: NDArray[np.int8]) -> Ints:
        """The loads of the stages between an ideal and larger ones on a class of devices."""
        loads = self._work[kind, larger] - self._work[kind, ideal]
        cost = self._core.costs[kind, nets]
        if self._core.costs[kind].any():
            loads += self._boundary[kind, larger] + cost @ change
        barred = self._barred[kind]
        return np.where(barred[larger] > barred[ideal], BIG, loads)

    def _take(self, index: int, ideal: int, larger: Ints, loads: Ints) -> None:
        """Take a step to the larger ideals where that is better than what they have."""
        step = self._ladder.steps[index]
        value = self._values[step.low, ideal]
        worst = np.maximum(loads, value)
        better = worst < np.minimum(self._values[step.high, larger], self._limit)
        capacity = self._core.kinds[step.kind].capacity
        if capacity < BIG:
            held = self._bytes[larger] - self._bytes[ideal]
            held += step.flight * (self._saved[larger] - self._saved[ideal])
            better &= held <= capacity
        chosen = larger[better]
        self._values[step.high, chosen] = worst[better]
        self._parents[step.high, chosen] = ideal, index
