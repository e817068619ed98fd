"""The best stages over all convex sequences: a dynamic program over ideals that extends each ideal to larger ones.

It is exact: a stage is the difference of two ideals, and `ideals` leaves out none that stages below the bound need. The
load of the next stage depends only on the two ideals and the level, and the greatest load overall is the maximum of the
value of the ideal and that load. So of two ways to reach an ideal at a level, the cheaper one is enough (Bellman's
principle, for a maximum instead of a sum).

With ``load(A, B)`` of the stage ``B - A`` on the device that the step to the level uses::

    best[level, B] = min over steps to the level, and ideals A within B, of max(best[level before, A], load(A, B))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import BIG, Core, descendants, value_lists
from splitkit.solvers.placement.problem import Bools, Ints
from splitkit.solvers.placement.stages.order_dp import DeviceSteps, StageRanks, least_paid, stage_loads

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


# Dominance between ideals: which ideals need not be extended because a larger ideal is at least as good.
#
# Take a unit ``v`` out of the stages after an ideal and put it into the ideal. The stage that held ``v`` loses its
# work, and the nets whose other pins are all in the ideal; it may have to pay, for its other units, for nets with no
# pin in the ideal. If that is no more than it loses, then whatever completes the ideal completes the larger one with
# no higher loads, so the smaller ideal can be dropped where the larger one is reached as cheaply. (Loads up to a known
# bound count as equally cheap, which is what makes the rule strong.)
#
# No other stage changes: a stage that has a pin of a net of ``v``, but not ``v`` itself, pays for the net before and
# after. Two ideals cannot drop each other, because the one that stays is always larger.


def dominance_applies(core: Core, device_steps: DeviceSteps) -> bool:
    """Return whether a stage may always lose a unit: none must be filled, and no earlier stage has more in flight."""
    # Without the unit its stage may be empty. Then it is left out (which `fill` forbids), and the stages before it have
    # one stage less after them: they must not hold more for that. Where the order of devices is fixed, it stays, empty.
    flights = device_steps.in_flight
    rising = all(low <= high for low, high in pairwise(flights))
    return not device_steps.fill and (device_steps.ordered or rising or not core.saved.any())


class Dominance:
    """The pairs of ideals of which the larger is at least as good to extend.

    Args:
        core: the core whose units are placed.
        found: the ideals.
        pins: (nets, ideals) how many pins of each net are in each ideal.
    """

    def __init__(self, core: Core, found: Ideals, pins: NDArray[np.uint16]) -> None:
        smaller, larger = _covers(core, found, pins)
        self._sizes: Ints = sum((np.bitwise_count(word).astype(np.int64) for word in found.bits), np.zeros(1, np.int64))
        by_size = np.argsort(self._sizes[smaller], kind="stable")
        self._smaller, self._larger = smaller[by_size], larger[by_size]
        self._starts = np.searchsorted(self._sizes[self._smaller], np.arange(core.size + 2))

    def undominated(self, values: Ints, limit: int) -> Bools:
        """Return (ideals,) whether each ideal is better than all larger ones that are as good to extend.

        Args:
            values: (ideals,) the greatest load with which each is reached.
            limit: larger than every value that matters.
        """
        # From the largest down, `least` hands on the best value of all that can be reached by adding units one by one:
        # what is as good as something that is as good as a third is as good as that. A larger ideal may be one that the
        # level does not allow. Then nothing completes it below the limit, and so nothing completes the smaller one.
        least, kept = values.copy(), values < limit
        sizes = self._sizes[kept]
        for size in range(int(sizes.max(initial=0)) - 1, int(sizes.min(initial=0)) - 1, -1):
            those = slice(self._starts[size], self._starts[size + 1])
            smaller, reached = self._smaller[those], least[self._larger[those]]
            kept[smaller[reached <= values[smaller]]] = False
            np.minimum.at(least, smaller, reached)
        return kept


def _covers(core: Core, found: Ideals, pins: NDArray[np.uint16]) -> tuple[Ints, Ints]:
    """Return pairs of ideals: one, and the same with one more unit, which is at least as good to extend."""
    members = found.members(core.size).view(np.bool_)
    before = value_lists(core.edges[:, 1], core.edges[:, 0], core.size)
    nets = value_lists(core.pins, core.pin_nets, core.size)
    # Which ideal has one unit more is found by a hash, with a fixed seed. Ideals of one hash are told apart below: a
    # pair may be missed, so that less is dropped, but no wrong one is found.
    factors = np.random.default_rng(0).integers(2**63, size=len(found.bits), dtype=np.uint64) * 2 + 1
    keys = (found.bits * factors[:, None]).sum(axis=0, dtype=np.uint64)
    order = np.argsort(keys)
    keys = keys[order]
    pairs = [np.zeros((2, 0), np.int64)]
    for unit in range(core.size):
        ready = ~members[unit]
        for other in before[unit]:
            ready &= members[other]
        smaller = np.flatnonzero(ready)
        smaller = smaller[_no_worse(core, unit, nets[unit], pins, smaller)]
        word, bit = unit >> 6, np.uint64(1 << (unit & 63))
        expected = found.bits[:, smaller]
        expected[word] |= bit
        wanted = (expected * factors[:, None]).sum(axis=0, dtype=np.uint64)
        larger = order[np.searchsorted(keys, wanted).clip(max=len(keys) - 1)]
        there = (found.bits[:, larger] == expected).all(axis=0)
        pairs.append(np.stack([smaller[there], larger[there]]))
    smaller, larger = np.concatenate(pairs, axis=1)
    return smaller, larger


def _no_worse(core: Core, unit: int, nets: list[int], pins: NDArray[np.uint16], smaller: Ints) -> Bools:
    """Return whether, for each ideal, losing the unit raises the load of no class of devices in any completion."""
    # A CPU pays for no net, so to lose work never hurts it; a class that does not support the unit did not have it. A
    # net with some pins in the ideal, but not all others, costs the stage the same as before, or nothing any more.
    paying = [k for k, kind in enumerate(core.kinds) if not kind.cpu and not core.barred[k, unit]]
    gain = np.repeat(core.work[paying, unit][:, None], len(smaller), axis=1)
    for net in nets:
        cost = core.costs[paying, net][:, None]
        inside = pins[net, smaller]
        last = int(core.starts[net + 1] - core.starts[net]) - 1
        gain += cost * ((inside == last).astype(np.int64) - (inside == 0))
    no_worse: Bools = np.all(gain >= 0, axis=0)
    return no_worse


# The ideals of a graph that can separate stages whose loads are below a bound.
#
# An ideal contains with each unit all its ancestors. An ideal is kept at a level only if the work in it, with the nets
# that cross its border, fits the devices of the level, and the rest fits the remaining devices, each below the bound.
# (Ideals: Tarnawski et al., NeurIPS 2020. All numbers are whole: rounding could lose an optimum.)
#
# An ideal is all that a search has to remember: stages in a legal order are the differences of a chain of ideals. The
# work and the bytes of the stage between two ideals are differences of sums, and the stage pays for a net if and only
# if the net has a pin in the difference and one outside it, which the two ideals decide. How the smaller ideal was
# divided into stages does not matter.


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
        self._cost = least_paid(core)
        self.bits: Words = np.zeros(((core.size + 63) // 64, 1), np.uint64)
        self.inside = np.zeros(1, np.int64)  # least work of what is in
        self._out: Words = self.bits.copy()  # units that are out, and all after them, decided or not
        self._held = np.stack([core.least_work, core.nbytes + device_steps.least_flight * core.saved])
        self._crossing = np.zeros(1, np.int64)  # cost of nets of which some pin is in and some is out
        self._decided: Words = np.zeros(len(self.bits), np.uint64)
        self._room = _room(core, device_steps, self._limit)
        self._checked = 1
        before = value_lists(core.edges[:, 1], core.edges[:, 0], core.size)
        self._before = [_mask(units, core.size) for units in before]
        self._after = _words(descendants(core).T)
        self._nets = value_lists(core.pins, core.pin_nets, core.size)
        self._pins = [_mask(units.tolist(), core.size) for units in np.split(core.pins, core.starts[1:-1])]

    @property
    def count(self) -> int:
        return int(self.bits.shape[1])

    def decide(self, unit: int) -> None:
        """Extend each ideal by the unit where it has all its predecessors, and keep the ideal without it."""
        self._effort.spend(len(self.bits) * self.count)
        # Units are decided in a topological order, so what is before a unit is decided, and an ideal without one of
        # these units is never asked for it again: each ideal of the decided units comes out once.
        ready = self._has(self._before[unit], all_of_it=True)
        cut, closed = self._crossing.copy(), self._crossing.copy()
        for net in self._nets[unit]:
            cost = self._cost[net]
            if not cost:
                continue
            # The net begins to cross with the first pin that is decided otherwise than those before it, and counts
            # once: for later pins neither all nor none of those before them are in.
            pins = self._pins[net] & self._decided
            none, full = self._has(pins, all_of_it=False), self._has(pins, all_of_it=True)
            cut += np.where(full & ~none, cost, 0)  # the unit is out, all pins so far were in
            closed += np.where(none & ~full, cost, 0)  # the unit is in, all pins so far were out
        word, bit = unit >> 6, np.uint64(1 << (unit & 63))
        taken = self.bits[:, ready]
        taken[word] |= bit
        self.bits = np.concatenate([self.bits, taken], axis=1)
        self._out = np.concatenate([self._out | self._after[:, [unit]], self._out[:, ready]], axis=1)
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

    def _has(self, mask: Words, *, all_of_it: bool) -> Bools:
        """Return which ideals have all units of a mask, or none of them."""
        found = np.ones(self.count, np.bool_)
        for word in np.flatnonzero(mask).tolist():
            found &= (self.bits[word] & mask[word]) == (mask[word] if all_of_it else 0)
        return found


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
