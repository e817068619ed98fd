"""The best sets of units for devices as a mixed-integer program, without any order; HiGHS solves it, through scipy.

sum of x[v, d] over d = 1           all[e, d] <= x[v, d] <= some[e, d]    for each pin v of net e
work[d] @ x[:, d] + cost[d] @ (some[:, d] - all[:, d]) <= L
"""

from __future__ import annotations

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import Places
from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.mip import Rows
from splitkit.solvers.placement.problem import Floats, Ints

_MARGIN = 1e-6  # relative: what HiGHS may be off


class SetProgram:
    """The program of a core's units on devices.

    Args:
        core: whose units.
        places: the devices.
        limit: seconds; loads are below it.
    """

    def __init__(self, core: Core, places: Places, limit: float) -> None:
        self._core = core
        self._places = places
        self._unit = limit / 100 or 1.0
        self._devices = len(places.work)
        self.rows = rows = Rows()
        self._in = rows.block(core.size, self._devices)
        self._some = rows.block(core.costs.shape[1], self._devices)
        self._all = rows.block(core.costs.shape[1], self._devices)
        self._worst = rows.block(1)
        rows.add([(self._in[:, d], 1.0) for d in range(self._devices)], 1.0, 1.0)
        for d in range(self._devices):
            self._device(d)

    @property
    def size(self) -> int:
        """How many columns."""
        return self.rows.columns

    def solve(self, seconds: float, clock: Clock, *, any_will_do: bool = False) -> tuple[Ints | None, float]:
        """The device of each unit in what is found in time, and a bound on the greatest load, in seconds."""
        places = self._places
        price, low, high = np.zeros(self.size), np.zeros(self.size), np.ones(self.size)
        price[self._worst], high[self._worst] = 1.0, 100.0
        high[self._in] = np.where(np.isinf(places.work.T), 0.0, 1.0)
        self._break_symmetry(high)
        whole = np.zeros(self.size, np.bool_)
        whole[self._in] = True
        result = self.rows.solve(price, whole, low, high, seconds, clock, any_will_do=any_will_do)
        if result.status == 2:
            return None, np.inf
        proven = result.mip_dual_bound
        bound = 0.0 if proven is None or not np.isfinite(proven) else float(proven) * self._unit * (1 - _MARGIN)
        return (None if result.x is None else result.x[self._in].argmax(axis=1).astype(np.int64)), bound

    def _device(self, d: int) -> None:
        core, places, rows = self._core, self._places, self.rows
        here = self._in[core.pins, d]
        rows.add([(here, 1.0), (self._some[core.pin_nets, d], -1.0)], high=0.0)
        rows.add([(here, 1.0), (self._all[core.pin_nets, d], -1.0)], low=0.0)
        work = np.where(np.isinf(places.work[d]), 0.0, places.work[d]) / self._unit
        cost = places.costs[d] / self._unit
        columns = [self._in[:, d], self._some[:, d], self._all[:, d], self._worst]
        rows.add_sum(np.concatenate(columns), np.concatenate([work, cost, -cost, [-1.0]]), high=0.0)
        if places.fill:
            rows.add_sum(self._in[:, d], np.ones(core.size), low=1.0)
        most = float(places.nbytes[d].sum())
        if places.capacity[d] < most:
            rows.add_sum(self._in[:, d], places.nbytes[d] / most, high=places.capacity[d] / most)

    def _break_symmetry(self, high: Floats) -> None:
        """Of devices that are alike the i-th in use holds none of the first i units."""
        places = self._places
        seen: dict[bytes, int] = {}
        for d in range(self._devices):
            key = places.work[d].tobytes() + places.costs[d].tobytes() + places.capacity[d].tobytes()
            place = seen.get(key, 0)
            high[self._in[:place, d]] = 0.0
            seen[key] = place + 1
