"""Dominance between ideals: which ideals need not be extended because a larger ideal is at least as good.

Take a unit ``v`` out of the stages after an ideal and put it into the ideal. The stage that held ``v`` loses its work,
and the nets whose other pins are all in the ideal; it may have to pay, for its other units, for nets with no pin in the
ideal. If that is no more than it loses, then whatever completes the ideal completes the larger one with no higher
loads, so the smaller ideal can be dropped where the larger one is reached as cheaply. (Loads up to a known bound count
as equally cheap, which is what makes the rule strong.)

No other stage changes: a stage that has a pin of a net of ``v``, but not ``v`` itself, pays for the net before and
after. Two ideals cannot drop each other, because the one that stays is always larger.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Bools, Ints
from splitkit.solvers.placement.stages.device_steps import DeviceSteps
from splitkit.solvers.placement.stages.ideals import Ideals


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
    before: list[list[int]] = [[] for _ in range(core.size)]
    for first, then in core.edges.tolist():
        before[then].append(first)
    nets: list[list[int]] = [[] for _ in range(core.size)]
    for net, pin in zip(core.pin_nets.tolist(), core.pins.tolist(), strict=True):
        nets[pin].append(net)
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
