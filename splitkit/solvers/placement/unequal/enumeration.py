"""Exhaustive search for the best placement: group by group, pruned by the best value so far.

The groups are placed in topological order. Loads never shrink when another group is placed, so a partial placement
whose greatest load reaches the best value cannot be completed to a better one. Empty devices that can be exchanged
without changing anything are interchangeable: only the first is tried.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.unequal.link_model import UnequalLinks

_ROOM = 2.0**52
_EVERY = 256  # steps between two checks of the clock
_CHECKED = 100  # steps that cost as much as the true memory of one placement

Paid = tuple[int, ...]
"""What each device pays for one value."""


class Enumeration:
    """A depth-first search over groups; the loads only grow, so a branch whose load is no better is cut off.

    All sums are over whole numbers. A branch is also cut off if the work that is left does not fit between the loads
    and the best value.

    Args:
        linked: the problem.
        order: the groups in topological order.
        steps: how many placements of a single group are tried.
        clock: the deadline.
        has_room: (n,) devices -> whether they have room, if the groups' bytes do not tell.

    Attributes:
        best: (n,) devices; None if nothing better than the known value was found.
        proven: whether all placements were tried or cut off.
    """

    def __init__(
        self,
        linked: UnequalLinks,
        order: Ints,
        steps: int,
        clock: Clock | None = None,
        has_room: Callable[[Ints], bool] | None = None,
    ) -> None:
        self.best: Ints | None = None
        self.proven = False
        self._linked, self._order, self._left, self._clock = linked, order.tolist(), steps, clock
        self._has_room = has_room
        supported = np.isfinite(linked.work)
        most = np.where(supported, linked.work, 0.0).sum() + linked.devices * linked.prices.sum()
        self.scale = _ROOM / most if most else 1.0
        self._work = [[int(t * self.scale) if np.isfinite(t) else None for t in row] for row in linked.work.tolist()]
        self._price = [[[int(t * self.scale) for t in row] for row in table] for table in linked.prices.tolist()]
        self._touches: list[list[tuple[int, bool]]] = [[] for _ in range(linked.size)]
        for value, (maker, readers) in enumerate(zip(linked.makers.tolist(), linked.readers, strict=True)):
            self._touches[maker].append((value, True))
            for reader in readers.tolist():
                self._touches[reader].append((value, False))
        self._before: list[list[int]] = [[] for _ in range(linked.size)]
        for first, then in linked.edges.tolist() if linked.acyclic else ():
            self._before[then].append(first)
        self._paid: dict[tuple[int, int, int], Paid] = {}
        self._alike = _alike(linked)
        self._prepare_rest()

    def _prepare_rest(self) -> None:
        """Compute the least work left at each place in the order, and the speed of each device at it."""
        work = np.array([[np.inf if t is None else t for t in row] for row in self._work], np.float64)
        least = work.min(axis=0, initial=np.inf)
        coming = least[self._order]
        self._rest: list[float] = [*np.cumsum(coming[::-1])[::-1].tolist(), 0.0]
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(work > 0, least / work, np.where(least > 0, 0.0, 1.0))
        counted = np.where(least > 0, ratio, 0.0)
        self._speed: list[float] = counted.max(axis=1, initial=0.0).tolist()

    def run(self, value: float) -> None:
        """Search for a placement that beats a value by more than rounding."""
        linked = self._linked
        self._most = int(value * self.scale * (1 - 1e-9)) if np.isfinite(value) else int(_ROOM)
        self._device = [-1] * linked.size
        self._held = [0] * linked.devices
        self._maker = [-1] * len(linked.sizes)
        self._readers = [0] * len(linked.sizes)
        self._nothing: Paid = (0,) * linked.devices
        self.proven = self._place(0, [0] * linked.devices, [0] * linked.devices)

    def _place(self, position: int, loads: list[int], after: list[int]) -> bool:
        """Place the remaining groups; return False if the steps ran out. ``after`` has the devices behind
        each device.
        """
        if position == len(self._order):
            whole = np.array(self._device, np.int64)
            self._left -= 0 if self._has_room is None else _CHECKED
            if self._has_room is None or self._has_room(whole):
                self._most, self.best = max(loads), whole
            return True
        group, ways = self._order[position], []
        for device in self._choices(group):
            way = self._with(group, device, loads, after)
            if way is not None:
                ways.append((max(way[0]), device, *way))
        for most, device, grown, closed, states in sorted(ways, key=lambda way: way[:2]):
            if most >= self._most or not self._fits_rest(position + 1, grown):
                continue
            self._left -= 1
            if self._left < 0 or (self._clock is not None and self._left % _EVERY == 0 and self._clock.is_over()):
                return False
            saved = [(value, self._maker[value], self._readers[value]) for value, _, _ in states]
            self._device[group] = device
            self._held[device] += int(self._linked.nbytes[group])
            for value, maker, readers in states:
                self._maker[value], self._readers[value] = maker, readers
            done = self._place(position + 1, grown, closed)
            for value, maker, readers in saved:
                self._maker[value], self._readers[value] = maker, readers
            self._held[device] -= int(self._linked.nbytes[group])
            self._device[group] = -1
            if not done:
                return False
        return True

    def _choices(self, group: int) -> list[int]:
        """Return the devices that support the group and have room; of equal empty devices only the first."""
        found: list[int] = []
        used = {device for device in self._device if device >= 0}
        for device in range(self._linked.devices):
            if self._work[device][group] is None:
                continue
            if self._held[device] + self._linked.nbytes[group] > self._linked.capacity[device]:
                continue
            if device not in used and any(other not in used for other in self._alike[device]):
                continue
            found.append(device)
        return found

    def _with(
        self, group: int, device: int, loads: list[int], after: list[int]
    ) -> tuple[list[int], list[int], list[tuple[int, int, int]]] | None:
        """Return the loads with a group on a device, the devices behind each device, and the changed values."""
        closed = after
        for first in self._before[group]:
            home = self._device[first]
            if home != device and not closed[home] >> device & 1:
                if closed[device] >> home & 1:
                    return None
                gained = closed[device] | 1 << device
                closed = [
                    later | gained if place == home or later >> home & 1 else later
                    for place, later in enumerate(closed)
                ]
        grown, states = loads.copy(), []
        work = self._work[device][group]
        assert work is not None
        grown[device] += work
        for value, makes in self._touches[group]:
            maker, readers = self._maker[value], self._readers[value]
            now = (device, readers) if makes else (maker, readers | 1 << device)
            if now == (maker, readers):
                continue
            states.append((value, *now))
            for place, (more, less) in enumerate(
                zip(self._payment(value, *now), self._payment(value, maker, readers), strict=True)
            ):
                grown[place] += more - less
        return grown, closed, states

    def _payment(self, value: int, maker: int, readers: int) -> Paid:
        """Return what each device pays for a value with a given maker and readers; zeros if the maker is unknown."""
        if maker < 0 or not readers:
            return self._nothing
        key = value, maker, readers
        if key not in self._paid:
            price, paid = self._price[value][maker], [0] * self._linked.devices
            for device in range(self._linked.devices):
                if readers >> device & 1 and device != maker:
                    paid[maker] = max(paid[maker], price[device])
                    paid[device] = price[device]
            self._paid[key] = tuple(0 if cpu else p for p, cpu in zip(paid, self._linked.cpu.tolist(), strict=True))
        return self._paid[key]

    def _fits_rest(self, position: int, loads: list[int]) -> bool:
        room = sum((self._most - load) * speed for load, speed in zip(loads, self._speed, strict=True))
        return room * (1 + 1e-9) + 1 >= self._rest[position]


def _alike(linked: UnequalLinks) -> list[list[int]]:
    """Return for each device the earlier devices with which it can be exchanged without changing anything."""
    count = linked.devices
    return [[other for other in range(device) if _exchangeable(linked, device, other)] for device in range(count)]


def _exchangeable(linked: UnequalLinks, a: int, b: int) -> bool:
    swapped = np.arange(linked.devices)
    swapped[[a, b]] = b, a
    return bool(
        np.array_equal(linked.work[a], linked.work[b])
        and linked.capacity[a] == linked.capacity[b]
        and linked.cpu[a] == linked.cpu[b]
        and np.array_equal(linked.latency, linked.latency[np.ix_(swapped, swapped)])
        and np.array_equal(linked.slowness, linked.slowness[np.ix_(swapped, swapped)])
    )
