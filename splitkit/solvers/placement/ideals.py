"""The ideals of a graph between which the stages can lie whose loads are below a bound.

An ideal holds with each unit all units before it. An ideal is kept at a level only if the work in it, with the nets
that cross it, fits the devices of the level, and the rest fits the devices that are left, each below the bound.
(Ideals: Tarnawski et al., NeurIPS 2020. Everything is whole numbers: rounding would lose optima.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.ladder import Ladder
from splitkit.solvers.placement.problem import Bools, Ints

Words = NDArray[np.uint64]

MOST_IDEALS = 150_000


class TooManyError(Exception):
    """There are more ideals than can be gone through, or the time is over."""


@dataclass(frozen=True, eq=False)
class Ideals:
    """Ideals that can end a stage, sorted by work; the first is empty, the last is everything.

    Attributes:
        bits: (words, ideals) which units are in each.
        least: (ideals,) least work inside.
        allowed: (levels, ideals) whether it can be reached and left.
    """

    bits: Words
    least: Ints
    allowed: Bools

    @property
    def count(self) -> int:
        """How many."""
        return int(self.bits.shape[1])

    def members(self, size: int) -> NDArray[np.uint8]:
        """(size, ideals) 1 for a unit that is in an ideal."""
        unit = np.arange(size)
        members: NDArray[np.uint8] = (
            self.bits[unit >> 6] >> (unit & 63).astype(np.uint64)[:, None] & np.uint64(1)
        ).astype(np.uint8)
        return members


def ideals(
    core: Core,
    ladder: Ladder,
    limit: int,
    order: Ints,
    still_time: Callable[[], bool] = lambda: True,
    most: int = MOST_IDEALS,
) -> Ideals:
    """The ideals between stages with loads below ``limit``.

    Args:
        core: whose units.
        ladder: the levels.
        limit: above the loads that are looked for.
        order: (n,) a topological order of the units: the one in which they are decided.
        still_time: asked from time to time; `TooManyError` is raised when it says no.
        most: ideals; more raise `TooManyError`.
    """
    growing = _Growing(core, ladder, limit)
    for unit in order.tolist():
        growing.decide(unit)
        if growing.count > most:
            growing.prune()
        if growing.count > most or not still_time():
            raise TooManyError
    growing.prune()
    sizes = sum(np.bitwise_count(word).astype(np.int64) for word in growing.bits)
    by_work = np.lexsort((sizes, growing.inside))
    return Ideals(
        np.ascontiguousarray(growing.bits[:, by_work]), growing.inside[by_work], growing.allowed()[:, by_work]
    )


class _Growing:
    """Ideals of the units that are decided so far."""

    def __init__(self, core: Core, ladder: Ladder, limit: int) -> None:
        self._core = core
        self._ladder = ladder
        self._limit = limit - 1
        paying = [k for k, kind in enumerate(core.kinds) if not kind.host]
        self._cost = core.costs[paying].min(axis=0) if paying else np.zeros(core.costs.shape[1], np.int64)
        self.bits: Words = np.zeros(((core.size + 63) // 64, 1), np.uint64)
        self.inside = np.zeros(1, np.int64)  # least work of what is in
        self._bytes = np.zeros(1, np.int64)  # of what is in
        self._crossing = np.zeros(1, np.int64)  # cost of nets of which some pin is in and some is out
        self._decided: Words = np.zeros(len(self.bits), np.uint64)
        self._total = 0
        self._all_bytes = 0
        self._room = _room(core, ladder)
        self._checked = 1
        self._before = [_mask(units, core.size) for units in _listed(core.edges[:, ::-1], core.size)]
        pairs = np.stack([core.pins, core.pin_nets], axis=1)
        self._nets = _listed(pairs, core.size)
        self._pins = [_mask(units.tolist(), core.size) for units in np.split(core.pins, core.starts[1:-1])]

    @property
    def count(self) -> int:
        return int(self.bits.shape[1])

    def decide(self, unit: int) -> None:
        """Each ideal without the unit, and with it where all before it is in."""
        ready = self._holds(self._before[unit])
        cut, closed = self._crossing.copy(), self._crossing.copy()
        for net in self._nets[unit]:
            cost = self._cost[net]
            if not cost:
                continue
            pins = self._pins[net] & self._decided
            none, full = self._none(pins), self._holds(pins)
            cut += np.where(full & ~none, cost, 0)  # the unit is out, all pins so far were in
            closed += np.where(none & ~full, cost, 0)  # the unit is in, all pins so far were out
        word, bit = unit >> 6, np.uint64(1 << (unit & 63))
        taken = self.bits[:, ready]
        taken[word] |= bit
        work = int(self._core.least_work[unit])
        self.bits = np.concatenate([self.bits, taken], axis=1)
        self.inside = np.concatenate([self.inside, self.inside[ready] + work])
        self._crossing = np.concatenate([cut, closed[ready]])
        held = int(self._core.nbytes[unit] + self._ladder.least_flight * self._core.saved[unit])
        self._bytes = np.concatenate([self._bytes, self._bytes[ready] + held])
        self._all_bytes += held
        self._decided[word] |= bit
        self._total += work
        if self.count > 2 * self._checked:
            self.prune()

    def prune(self) -> None:
        """Drop the ideals that no level allows."""
        kept = self.allowed().any(axis=0)
        self.bits, self.inside = self.bits[:, kept], self.inside[kept]
        self._crossing, self._bytes = self._crossing[kept], self._bytes[kept]
        self._checked = max(self.count, 256)

    def allowed(self) -> Bools:
        """(levels, ideals) whether what is decided fits: inside the devices of the level, outside those left."""
        ladder = self._ladder
        allowed = np.empty((ladder.levels, self.count), np.bool_)
        for level, (host_in, host_out) in enumerate(ladder.hosts):
            inside = self.inside if host_in else self.inside + self._crossing
            outside = self._total - self.inside
            outside = outside if host_out else outside + self._crossing
            allowed[level] = inside <= ladder.most(level, self._limit)
            allowed[level] &= outside <= ladder.rest(level, self._limit)
            room, room_left = self._room[level]
            allowed[level] &= (self._bytes <= room) & (self._all_bytes - self._bytes <= room_left)
        return allowed

    def _holds(self, mask: Words) -> Bools:
        """Which ideals have all units of a mask."""
        holds = np.ones(self.count, np.bool_)
        for word in np.flatnonzero(mask).tolist():
            holds &= (self.bits[word] & mask[word]) == mask[word]
        return holds

    def _none(self, mask: Words) -> Bools:
        """Which ideals have no unit of a mask."""
        none = np.ones(self.count, np.bool_)
        for word in np.flatnonzero(mask).tolist():
            none &= (self.bits[word] & mask[word]) == 0
        return none


def _room(core: Core, ladder: Ladder) -> list[tuple[int, int]]:
    """For each level the bytes that its devices hold together, and those that are left."""
    capacity = [kind.capacity for kind in core.kinds]

    def together(counts: tuple[int, ...]) -> int:
        return min(BIG, sum(count * room for count, room in zip(counts, capacity, strict=True)))

    full = tuple(len(kind.devices) for kind in core.kinds)
    return [
        (together(level), together(tuple(total - used for total, used in zip(full, level, strict=True))))
        for level in ladder.used
    ]


def _listed(pairs: Ints, size: int) -> list[list[int]]:
    """For each unit what it is paired with."""
    lists: list[list[int]] = [[] for _ in range(size)]
    for unit, other in pairs.tolist():
        lists[unit].append(other)
    return lists


def _mask(units: list[int], size: int) -> Words:
    mask = np.zeros((size + 63) // 64, np.uint64)
    for unit in units:
        mask[unit >> 6] |= np.uint64(1 << (unit & 63))
    return mask
