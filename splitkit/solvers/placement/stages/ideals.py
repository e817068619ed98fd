"""The ideals of a graph that can separate stages whose loads are below a bound.

An ideal contains with each unit all its ancestors. An ideal is kept at a level only if the work in it, with the nets
that cross its border, fits the devices of the level, and the rest fits the remaining devices, each below the bound.
(Ideals: Tarnawski et al., NeurIPS 2020. All numbers are whole: rounding could lose an optimum.)

An ideal is all that a search has to remember: stages in a legal order are the differences of a chain of ideals. The
work and the bytes of the stage between two ideals are differences of sums, and the stage pays for a net if and only if
the net has a pin in the difference and one outside it, which the two ideals decide. How the smaller ideal was divided
into stages does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Bools, Ints
from splitkit.solvers.placement.stages.device_steps import DeviceSteps, class_speeds

Words = NDArray[np.uint64]

MOST_WORDS = 1_200_000
"""Words of 64 units; more of them raise `TooManyError`."""
_PRUNING = 5  # how many times as long it takes to prune the ideals as to decide a unit
_GROWTH = 1.3  # ideals are pruned each time their number has grown by this factor


class TooManyError(Exception):
    """There are more ideals than the search can visit."""


class Effort:
    """How much a search may still spend; steps are counted, so the result is the same on a slow or busy machine.

    Args:
        steps: the number of steps, of some nanoseconds each.
        clock: the deadline.
    """

    def __init__(self, steps: int, clock: Clock) -> None:
        self.left = steps
        self._clock = clock

    def spend(self, steps: int) -> None:
        """Spend some steps; raise `TooManyError` if none are left."""
        self.left -= steps
        if self.left < 0 or self._clock.is_over():
            raise TooManyError

    def part(self, share: float) -> Effort:
        """Return a separate effort with a share of what is left."""
        return Effort(int(self.left * share), self._clock)


@dataclass(frozen=True, eq=False)
class Ideals:
    """The ideals that can end a stage, sorted by work; the first is empty, the last has all units.

    Attributes:
        bits: (words, ideals) the units of each ideal, as bits.
        least: (ideals,) the least work inside each.
        allowed: (levels, ideals) whether the ideal can be reached and completed at the level.
    """

    bits: Words
    least: Ints
    allowed: Bools

    @property
    def count(self) -> int:
        """The number of ideals."""
        return int(self.bits.shape[1])

    def members(self, size: int) -> NDArray[np.uint8]:
        """Return (size, ideals) 1 for each unit that is in an ideal."""
        octets = np.ascontiguousarray(self.bits, "<u8").view(np.uint8).reshape(len(self.bits), self.count, 8)
        rows = np.ascontiguousarray(octets.transpose(0, 2, 1)).reshape(-1, self.count)
        return np.unpackbits(rows, axis=0, count=size, bitorder="little")


def ideals(
    core: Core, device_steps: DeviceSteps, limit: int, order: Ints, effort: Effort, most: int = MOST_WORDS
) -> Ideals:
    """Return the ideals between stages with loads below ``limit``.

    Args:
        core: the core whose units are placed.
        device_steps: the levels and steps of the devices.
        limit: loads must be below it.
        order: (n,) a topological order of the units, in which they are decided.
        effort: how much may be spent.
        most: the most words of ideals; more raise `TooManyError`.
    """
    growing = _Growing(core, device_steps, limit, order, effort)
    for unit in order.tolist():
        growing.decide(unit)
        if growing.bits.size > most:
            growing.prune()
        if growing.bits.size > most:
            raise TooManyError
    growing.prune()
    sizes = sum(np.bitwise_count(word).astype(np.int64) for word in growing.bits)
    by_work = np.lexsort((sizes, growing.inside))
    return Ideals(
        np.ascontiguousarray(growing.bits[:, by_work]), growing.inside[by_work], growing.allowed()[:, by_work]
    )


class _Growing:
    """The ideals of the units decided so far."""

    def __init__(self, core: Core, device_steps: DeviceSteps, limit: int, order: Ints, effort: Effort) -> None:
        self._core = core
        self._effort = effort
        self._device_steps = device_steps
        self._limit = limit - 1  # loads are whole numbers: below the limit is at most this
        paying = [k for k, kind in enumerate(core.kinds) if not kind.cpu]
        # A level takes `reach` least work for each unit of the load: a device of a slow class counts for less, so that
        # what it pays for nets counts for less too. The least of that is certain, whoever pays.
        paid = [
            c if r >= 1 else np.floor(c * r).astype(np.int64)
            for c, r in zip(core.costs, class_speeds(core), strict=True)
        ]
        self._cost = np.min([paid[k] for k in paying], axis=0) if paying else np.zeros(core.costs.shape[1], np.int64)
        self.bits: Words = np.zeros(((core.size + 63) // 64, 1), np.uint64)
        self.inside = np.zeros(1, np.int64)  # least work of what is in
        self._out: Words = self.bits.copy()  # units that are out, and all after them, decided or not
        self._held = np.stack([core.least_work, core.nbytes + device_steps.least_flight * core.saved])
        self._crossing = np.zeros(1, np.int64)  # cost of nets of which some pin is in and some is out
        self._decided: Words = np.zeros(len(self.bits), np.uint64)
        self._room = _room(core, device_steps, self._limit)
        self._checked = 1
        self._before = [_mask(units, core.size) for units in _listed(core.edges[:, ::-1], core.size)]
        self._after = _descendants(core, order)
        pairs = np.stack([core.pins, core.pin_nets], axis=1)
        self._nets = _listed(pairs, core.size)
        self._pins = [_mask(units.tolist(), core.size) for units in np.split(core.pins, core.starts[1:-1])]

    @property
    def count(self) -> int:
        return int(self.bits.shape[1])

    def decide(self, unit: int) -> None:
        """Extend each ideal by the unit where it has all its predecessors, and keep the ideal without it."""
        self._effort.spend(len(self.bits) * self.count)
        # Units are decided in a topological order, so what is before a unit is decided, and an ideal without one of
        # these units is never asked for it again: each ideal of the decided units comes out once.
        ready = self._holds(self._before[unit])
        cut, closed = self._crossing.copy(), self._crossing.copy()
        for net in self._nets[unit]:
            cost = self._cost[net]
            if not cost:
                continue
            # The net begins to cross with the first pin that is decided otherwise than those before it, and counts
            # once: for later pins neither all nor none of those before them are in.
            pins = self._pins[net] & self._decided
            none, full = self._none(pins), self._holds(pins)
            cut += np.where(full & ~none, cost, 0)  # the unit is out, all pins so far were in
            closed += np.where(none & ~full, cost, 0)  # the unit is in, all pins so far were out
        word, bit = unit >> 6, np.uint64(1 << (unit & 63))
        taken = self.bits[:, ready]
        taken[word] |= bit
        self.bits = np.concatenate([self.bits, taken], axis=1)
        self._out = np.concatenate([self._out | self._after[unit][:, None], self._out[:, ready]], axis=1)
        self.inside = np.concatenate([self.inside, self.inside[ready] + self._core.least_work[unit]])
        self._crossing = np.concatenate([cut, closed[ready]])
        self._decided[word] |= bit
        if self.count > _GROWTH * self._checked:
            self.prune()

    def prune(self) -> None:
        """Drop the ideals that no level allows."""
        self._effort.spend(_PRUNING * len(self.bits) * self.count)
        kept = self.allowed().any(axis=0)
        self.bits, self.inside = self.bits[:, kept], self.inside[kept]
        self._crossing, self._out = self._crossing[kept], self._out[:, kept]
        self._checked = max(self.count, 256)

    def allowed(self) -> Bools:
        """Return (levels, ideals) whether the decided units fit: those inside on the level's devices, the others on the
        rest.
        """
        # A net with a pin in and a pin out is cut: of the stages inside, one that has a pin of it pays for it, for it
        # has not all of them, and so does one outside. Hence the loads inside are together at least the work inside and
        # the least cost of the nets that cross. A CPU pays for no net, so where one may be inside nothing is certain
        # of nets. Units that are undecided, and not after one that is out, count on neither side: the sums only grow
        # while units are decided, and what is dropped now could not be allowed later.
        device_steps = self._device_steps
        work_out, bytes_out = sums_over_ideals(self._held, self._out)
        bytes_in = sums_over_ideals(self._held[1:], self.bits)[0]
        allowed = np.empty((device_steps.levels, self.count), np.bool_)
        for level, (cpu_in, cpu_out) in enumerate(device_steps.cpus):
            inside = self.inside if cpu_in else self.inside + self._crossing
            outside = work_out if cpu_out else work_out + self._crossing
            allowed[level] = inside <= device_steps.most(level, self._limit)
            allowed[level] &= outside <= device_steps.rest(level, self._limit)
            room, room_left = self._room[level]
            allowed[level] &= (bytes_in <= room) & (bytes_out <= room_left)
        return allowed

    def _holds(self, mask: Words) -> Bools:
        """Return which ideals have all units of a mask."""
        holds = np.ones(self.count, np.bool_)
        for word in np.flatnonzero(mask).tolist():
            holds &= (self.bits[word] & mask[word]) == mask[word]
        return holds

    def _none(self, mask: Words) -> Bools:
        """Return which ideals have no unit of a mask."""
        none = np.ones(self.count, np.bool_)
        for word in np.flatnonzero(mask).tolist():
            none &= (self.bits[word] & mask[word]) == 0
        return none


def _room(core: Core, device_steps: DeviceSteps, limit: int) -> list[tuple[int, int]]:
    """Return for each level the bytes that its devices hold together within the limit, and the remaining devices."""
    held = core.nbytes + device_steps.least_flight * core.saved
    capacity = [min(kind.capacity, _most_held(held, core.work[k], limit)) for k, kind in enumerate(core.kinds)]

    def together(counts: tuple[int, ...]) -> int:
        return min(BIG, sum(count * room for count, room in zip(counts, capacity, strict=True)))

    full = tuple(len(kind.devices) for kind in core.kinds)
    return [
        (together(level), together(tuple(total - used for total, used in zip(full, level, strict=True))))
        for level in device_steps.used
    ]


def _most_held(held: Ints, work: Ints, limit: int) -> int:
    """Bound the bytes on a device within the limit: those of the units with the most bytes per work, and one more."""
    # The best fractions of a knapsack are the densest items and a part of the next one (Dantzig 1957); that one counts
    # whole here. What takes no work is always held, however little it is: it comes first.
    density = np.where(work > 0, held / np.maximum(work, 1), np.inf)
    by_density = np.argsort(-density, kind="stable")
    within = int(np.searchsorted(np.cumsum(work[by_density]), limit, side="right"))
    return int(held[by_density[: within + 1]].sum())


def _listed(pairs: Ints, size: int) -> list[list[int]]:
    """Return for each unit the units that it is paired with."""
    lists: list[list[int]] = [[] for _ in range(size)]
    for unit, other in pairs.tolist():
        lists[unit].append(other)
    return lists


def _descendants(core: Core, order: Ints) -> list[Words]:
    """Return for each unit the mask of itself and its descendants."""
    after = _listed(core.edges, core.size)
    masks = [_mask([unit], core.size) for unit in range(core.size)]
    for unit in order[::-1].tolist():
        for then in after[unit]:
            masks[unit] |= masks[then]
    return masks


def _mask(units: list[int], size: int) -> Words:
    mask = np.zeros((size + 63) // 64, np.uint64)
    for unit in units:
        mask[unit >> 6] |= np.uint64(1 << (unit & 63))
    return mask


def sums_over_ideals(rows: Ints, bits: Words) -> Ints:
    """Return (r, ideals) the exact sums of (r, n) whole numbers over each ideal, by tables of eight units."""
    # A product of matrices would have to be of floats to be quick, and those round; a table of 256 sums does not.
    size = bits.shape[0] * 64
    padded = np.zeros((len(rows), size), np.int64)
    padded[:, : rows.shape[1]] = rows
    tables = padded.reshape(len(rows), -1, 8) @ _EIGHT.T  # (r, n / 8, 256)
    total = np.zeros((len(rows), bits.shape[1]), np.int64)
    weighty = tables.any(axis=2)
    for block in np.flatnonzero(weighty.any(axis=0)).tolist():
        chosen = (bits[block >> 3] >> np.uint64(8 * (block & 7))).astype(np.uint8)
        for row in np.flatnonzero(weighty[:, block]).tolist():
            total[row] += tables[row, block].take(chosen)
    return total


_EIGHT = (np.arange(256)[:, None] >> np.arange(8)) & 1
"""(256, 8) the bits of each byte."""
