"""The best stages over all convex sequences: a dynamic program over ideals that extends each ideal to larger ones.

It is exact: a stage is the difference of two ideals, and `ideals` leaves out none that stages below the bound need. The
load of the next stage depends only on the two ideals and the level, and the greatest load overall is the maximum of the
value of the ideal and that load. So of two ways to reach an ideal at a level, the cheaper one is enough (Bellman's
principle, for a maximum instead of a sum).

With ``load(A, B)`` of the stage ``B - A`` on the device that the step to the level uses::

    best[level, B] = min over steps to the level, and ideals A within B, of max(best[level before, A], load(A, B))
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.stages.device_steps import DeviceSteps
from splitkit.solvers.placement.stages.dominance import Dominance, dominance_applies
from splitkit.solvers.placement.stages.ideals import Effort, Ideals, TooManyError, Words, sums_over_ideals
from splitkit.solvers.placement.stages.stage_loads import StageRanks, stage_loads

_MOST_CELLS = 3 * 10**8  # ideals times nets for which the table of pins is kept in memory
_CLOSE = 256  # bisection ends when the interval is 1/256 of the value; then the minimum is computed directly


def best_stages(
    core: Core, device_steps: DeviceSteps, limit: int, found: Ideals, effort: Effort, floor: int = 0
) -> tuple[StageRanks | None, int]:
    """Return stages with a load below ``limit`` (None if none were found), and a lower bound, at most ``limit``.

    The stages are optimal, and the bound is their value, unless the effort ran out.

    Args:
        core: the core; stages go from the last to the first, so its edges must be reversed.
        device_steps: the levels and steps of the devices.
        limit: loads must be below it.
        found: the result of `ideals` for the same arguments.
        effort: how much may be spent; `TooManyError` is raised if even the start costs more.
        floor: a known lower bound; loads below it count as equal to it.
    """
    if found.count * (core.costs.shape[1] + core.size) > _MOST_CELLS:
        raise TooManyError
    if not found.count or found.least[-1] != core.least_work.sum():
        return None, limit
    effort.spend(found.count * (core.costs.shape[1] + core.size))
    search = _Search(core, device_steps, found, effort)
    # Whether there is a load below the middle is easier to say than which is the least: all values up to the middle are
    # then equal, so that a larger ideal nearly always beats the smaller ones in it (`dominance`). So the range is
    # halved by such questions, and only what is left of it is searched for the least. Every answer "none" is a bound.
    low, high, best = floor, limit, None
    while low < high:
        close = search.dominance is None or high - low <= max(1, high // _CLOSE)
        middle = high if best is None else (low + high) // 2
        try:
            some = search.run(low, high) if close else search.run(middle - 1, middle)
        except TooManyError:
            break
        if some:
            best, high = some, some.value
        low = high if close or not best else low if some else middle
    return best, min(low, limit)


class _Search:
    """The values of ideals at levels, propagated to all larger ideals, level by level."""

    def __init__(self, core: Core, device_steps: DeviceSteps, found: Ideals, effort: Effort) -> None:
        self._core = core
        self._device_steps = device_steps
        self._found = found
        self._effort = effort
        members = found.members(core.size)
        counts: NDArray[np.uint16] = core.incidence.astype(np.uint16) @ members.astype(np.uint16)
        self._pins = counts  # (nets, ideals) pins inside
        self._sizes = np.diff(core.starts).astype(np.uint16)
        crossing = (self._pins > 0) & (self._pins < self._sizes[:, None])
        self._crossing = crossing
        self._work = sums_over_ideals(core.work, found.bits)
        self._barred = sums_over_ideals(core.barred.astype(np.int64), found.bits)
        self._boundary = sums_over_ideals(core.costs, _words(crossing))
        self._bytes, self._saved = sums_over_ideals(np.stack([core.nbytes, core.saved]), found.bits)
        self._from: list[list[int]] = [[] for _ in range(device_steps.levels)]
        for index, step in enumerate(device_steps.steps):
            self._from[step.low].append(index)
        self.dominance = Dominance(core, found, self._pins) if dominance_applies(core, device_steps) else None

    def run(self, floor: int, limit: int) -> StageRanks | None:
        """Return stages below a limit: the best, or any that do not exceed the floor; None if there are none."""
        device_steps, count = self._device_steps, self._found.count
        self._limit = limit
        self._values = np.full((device_steps.levels, count), BIG, np.int64)
        self._values[0, 0] = floor
        self._parents = np.full((device_steps.levels, count, 2), -1, np.int32)  # ideal and step
        # One stage takes no more least work than the device that its step uses up, below the limit: ideals with more
        # than that beyond an ideal are not targets. Ideals are sorted by it, so targets are a range.
        gain = max(
            (device_steps.reach[step.high] - device_steps.reach[step.low] for step in device_steps.steps), default=0.0
        )
        self._gain = int(min(gain * limit * (1 + 1e-9) + 1, BIG))
        for level in range(device_steps.levels):
            above = [self._device_steps.steps[index].high for index in self._from[level]]
            self._targets = np.flatnonzero(self._found.allowed[above].any(axis=0))
            self._outside = ~self._found.bits[:, self._targets]
            for ideal in self._start(level):
                self._push(level, ideal)
            self._skip(level)
        return self._stages()

    def _start(self, level: int) -> list[int]:
        """Return the ideals that are worth extending at a level."""
        values = self._values[level]
        chosen = self.dominance.undominated(values, self._limit) if self.dominance else values < self._limit
        return np.flatnonzero(chosen & self._found.allowed[level]).tolist()

    def _push(self, level: int, ideal: int) -> None:
        """Add every possible next stage after an ideal whose load is below the limit."""
        larger = self._larger(ideal)
        if not len(larger):
            return
        touched = self._touched(ideal, larger)
        self._effort.spend(len(larger) * (1 + len(touched[0])))
        loads: dict[int, Ints] = {}
        for index in self._from[level]:
            step = self._device_steps.steps[index]
            if step.kind >= 0:
                if step.kind not in loads:
                    loads[step.kind] = self._loads(step.kind, ideal, larger, *touched)
                self._take(index, ideal, larger, loads[step.kind])

    def _skip(self, level: int) -> None:
        """Step over devices that stay empty."""
        for index in self._from[level]:
            step = self._device_steps.steps[index]
            if step.kind < 0:
                better = np.flatnonzero(self._values[level] < self._values[step.high])
                self._values[step.high, better] = self._values[level, better]
                self._parents[step.high, better, 0], self._parents[step.high, better, 1] = better, index

    def _stages(self) -> StageRanks | None:
        """Return the best stages that end with all units placed."""
        last = self._found.count - 1
        end = min(self._device_steps.ends, key=lambda level: (self._values[level, last], level))
        if self._values[end, last] >= self._limit:
            return None
        path, level, ideal = [last], end, last
        kinds: list[int] = []
        while level or ideal:
            before, index = self._parents[level, ideal].tolist()
            step = self._device_steps.steps[index]
            if step.kind >= 0:
                path.append(before)
                kinds.append(step.kind)
            level, ideal = step.low, before
        inside = replace(self._found, bits=self._found.bits[:, path]).members(self._core.size)
        rank: Ints = len(kinds) - inside.sum(axis=1, dtype=np.int64)
        of_stage = tuple(reversed(kinds))
        return StageRanks(int(stage_loads(self._core, rank, of_stage).max()), rank, of_stage)

    def _larger(self, ideal: int) -> Ints:
        """Return the targets that contain an ideal and not too much more."""
        # sorted by work, and at equal work by size: what holds the ideal comes after it
        least, bits = self._found.least, self._found.bits[:, ideal]
        start = int(np.searchsorted(self._targets, ideal, side="right"))
        end = int(np.searchsorted(self._targets, np.searchsorted(least, least[ideal] + self._gain, side="right")))
        held = np.flatnonzero(bits)  # every ideal holds the bits of a word that has none
        self._effort.spend((end - start) * (1 + len(held)) // 4)
        if not len(held):
            return self._targets[start:end]
        rest = self._outside[held[0], start:end] & bits[held[0]]
        for word in held[1:].tolist():
            rest |= self._outside[word, start:end] & bits[word]
        larger: Ints = self._targets[start:end][rest == 0]
        return larger

    def _touched(self, ideal: int, larger: Ints) -> tuple[Ints, NDArray[np.int8]]:
        """Return the nets that cross an ideal, and how larger ideals change each: (nets, larger) 1, 0 or -1.

        A stage between two ideals pays for the nets that cross the larger one, except those that it does not touch
        (-1), and also for those that it completes (1).
        """
        # Nets that do not cross the smaller ideal need no look. With all pins in it they concern no stage after it;
        # with none they are paid for just if the stage has some pins and not all, which is to cross the larger ideal.
        nets = np.flatnonzero(self._crossing[:, ideal])
        pins = self._pins[nets[:, None], larger[None]]
        grown = (pins > self._pins[nets, ideal][:, None]).astype(np.int8)
        return nets, grown + (pins == self._sizes[nets][:, None]) - np.int8(1)

    def _loads(self, kind: int, ideal: int, larger: Ints, nets: Ints, change: NDArray[np.int8]) -> Ints:
        """Return the loads of the stages between an ideal and larger ones on a class of devices."""
        loads = self._work[kind, larger] - self._work[kind, ideal]
        cost = self._core.costs[kind, nets]
        if self._core.costs[kind].any():
            loads += self._boundary[kind, larger] + cost @ change
        barred = self._barred[kind]  # units of each ideal that the class does not support: one more is in the stage
        return np.where(barred[larger] > barred[ideal], BIG, loads)

    def _take(self, index: int, ideal: int, larger: Ints, loads: Ints) -> None:
        """Apply a step to the larger ideals whose value it lowers."""
        step = self._device_steps.steps[index]
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


def _words(marks: NDArray[np.bool_]) -> Words:
    """Pack marks (m, ideals) into bits (words, ideals)."""
    size = -(-len(marks) // 64) * 8
    packed = np.zeros((size, marks.shape[1]), np.uint8)
    bits = np.packbits(marks, axis=0, bitorder="little")
    packed[: len(bits)] = bits
    words: Words = np.zeros((size // 8, marks.shape[1]), np.uint64)
    for byte, row in enumerate(packed):
        words[byte >> 3] |= row.astype(np.uint64) << np.uint64(8 * (byte & 7))
    return words
