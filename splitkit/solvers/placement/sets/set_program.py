"""The best sets of units for devices as a mixed-integer program, without any order; HiGHS solves it, through scipy.

sum of x[v, d] over d = 1           all[e, d] <= x[v, d] <= some[e, d]    for each pin v of net e
work[d] @ x[:, d] + cost[d] @ (some[:, d] - all[:, d]) <= L

Nets with the same pins are one; one of two pins has one column, what it holds in part, for ``some - all``.
"""

from __future__ import annotations

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import DeviceTable
from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.mip import Rows
from splitkit.solvers.placement.problem import Floats, Ints
from splitkit.solvers.placement.sets.set_frontier import Nets

_MARGIN = 1e-6  # relative; the tolerance of HiGHS
_FAR = 6.0  # the clock's limit, in multiples of the counted time: on a busy machine nodes took four times as long


class SetProgram:
    """The program of a core's units on devices.

    Args:
        core: the core.
        places: the devices.
        limit: seconds; loads must be below it.
    """

    def __init__(self, core: Core, places: DeviceTable, limit: float) -> None:
        self._core = core
        self._places = places
        self._unit = limit / 100 or 1.0
        self._devices = len(places.work)
        self._pins = np.split(core.pins, core.starts[1:-1]) if len(core.pins) else []
        self.rows = rows = Rows()
        self._in = rows.block(core.size, self._devices)
        self._worst = rows.block(1)
        rows.add([(self._in[:, d], 1.0) for d in range(self._devices)], 1.0, 1.0)
        for d in range(self._devices):
            self._device(d)

    @staticmethod
    def columns(core: Core, places: DeviceTable) -> int:
        """Return about how many columns the program would have, without building it."""
        sizes = np.diff(core.starts)
        return sum(core.size + int(np.minimum(sizes[cost > 0] - 1, 2).sum()) for cost in places.costs)

    @property
    def size(self) -> int:
        """The number of columns."""
        return self.rows.columns

    def solve(
        self, seconds: float, clock: Clock, *, known: float = 0.0, any_will_do: bool = False
    ) -> tuple[Ints | None, float]:
        """The device of each unit in what is found in time, and a bound on the greatest load, in seconds.

        Args:
            seconds: the time for the search.
            clock: the deadline.
            known: seconds; a known lower bound on the greatest load.
            any_will_do: accept any placement, whatever its greatest load and however long it took.
        """
        places = self._places
        price, low, high = np.zeros(self.size), np.zeros(self.size), np.ones(self.size)
        price[self._worst], high[self._worst] = 1.0, 100.0
        low[self._worst] = min(known / self._unit * (1 - _MARGIN), 100.0)
        high[self._in] = np.where(np.isinf(places.work.T), 0.0, 1.0)
        self._break_symmetry(high)
        whole = np.zeros(self.size, np.bool_)
        whole[self._in] = True
        result = self.rows.solve(price, whole, low, high, seconds, clock, any_will_do=any_will_do, once=True, far=_FAR)
        if result.status == 2:
            return None, np.inf
        proven = result.mip_dual_bound
        bound = 0.0 if proven is None or not np.isfinite(proven) else float(proven) * self._unit * (1 - _MARGIN)
        return (None if result.x is None else result.x[self._in].argmax(axis=1).astype(np.int64)), bound

    def _device(self, d: int) -> None:
        core, places, rows = self._core, self._places, self.rows
        work = np.where(np.isinf(places.work[d]), 0.0, places.work[d]) / self._unit
        terms = [(self._in[:, d], work), (self._worst, -np.ones(1))]
        nets = Nets.of(self._pins, places.costs[d] / self._unit)
        sizes = np.array([len(pins) for pins in nets.pins], np.int64)
        terms += self._pairs(d, nets, np.flatnonzero(sizes == 2)) + self._larger(d, nets, np.flatnonzero(sizes > 2))
        columns, factors = (np.concatenate(part) for part in zip(*terms, strict=True))
        rows.add_sum(columns, factors, high=0.0)
        if places.fill:
            rows.add_sum(self._in[:, d], np.ones(core.size), low=1.0)
        most = float(places.nbytes[d].sum())
        if places.capacity[d] < most:
            rows.add_sum(self._in[:, d], places.nbytes[d] / most, high=places.capacity[d] / most)

    def _pairs(self, d: int, nets: Nets, which: Ints) -> list[tuple[Ints, Floats]]:
        """Return what nets of two pins add to the load of a device."""
        partly = self.rows.block(len(which))
        one, other = (self._in[np.array([nets.pins[net][at] for net in which], np.int64), d] for at in (0, 1))
        for first, then in ((one, other), (other, one)):
            self.rows.add([(first, 1.0), (then, -1.0), (partly, -1.0)], high=0.0)
        return [(partly, nets.costs[which])]

    def _larger(self, d: int, nets: Nets, which: Ints) -> list[tuple[Ints, Floats]]:
        """Return what nets of more pins add to the load of a device."""
        some, every = self.rows.block(len(which)), self.rows.block(len(which))
        of_pin = np.repeat(np.arange(len(which)), [len(nets.pins[net]) for net in which])
        here = self._in[np.array([pin for net in which for pin in nets.pins[net]], np.int64), d]
        self.rows.add([(here, 1.0), (some[of_pin], -1.0)], high=0.0)
        self.rows.add([(here, 1.0), (every[of_pin], -1.0)], low=0.0)
        return [(some, nets.costs[which]), (every, -nets.costs[which])]

    def _break_symmetry(self, high: Floats) -> None:
        """Add rows: of equal devices, the i-th in use holds none of the first i units."""
        places = self._places
        seen: dict[bytes, int] = {}
        for d in range(self._devices):
            key = places.work[d].tobytes() + places.costs[d].tobytes() + places.capacity[d].tobytes()
            place = seen.get(key, 0)
            high[self._in[:place, d]] = 0.0
            seen[key] = place + 1
