"""A lower bound on the greatest load of arbitrary sets: how much all devices together can cover with one set each.

Each unit gets a worth; the worths sum to 1. A device with load L holds a set of load at most L, including the cost of
each net that it cuts; `frontier` computes the greatest worth of such a set. If the greatest worths of all devices sum
to less than 1, some unit is left over, so no placement has all loads at most L. This is the Lagrangian dual of the
decomposition into one set for each device (Dantzig and Wolfe 1960). Unlike the linear relaxation of the integer
program, it knows that a device cannot hold everything or parts of many sets, so cut nets cost.

The worths come from a bundle of cutting planes in a trust region (Kelley 1960; Lemarechal 1975): each set of greatest
worth is a plane, and a linear program finds the worths near the best so far that minimise the maximum of the planes.
The bound holds for any worths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, hstack

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Bools, Floats, Ints
from splitkit.solvers.placement.sets.set_frontier import BestSets, Nets, SetTable, narrow_order

_COARSE, _FINE = 150, 600  # steps into which loads up to the limit are rounded, in the first and the second phase
_MARGIN = 1e-9  # share of the total worth; larger than the rounding errors of sums of floats
_LEAST, _MOST, _START = 1e-4, 50.0, 0.5  # radius of the trust region, in mean worths of a unit
_WIDER, _NARROWER = 1.5, 0.8
_SMALL = 1e-4  # if the predicted gain is smaller, the region becomes wider
_PATIENCE, _GAIN = 80, 1e-3  # rounds within which the bound must grow by this, relative
_FULL, _KEPT = 400, 250  # planes
_ROUND_SECONDS = 5e-3, 1e-4, 5e-6, 3e-9  # of a round, about; more for each unit, transition, state and load
_MOST_UNITS = 600
_MOST_CELLS = 20_000_000  # states and loads that are held at once
_QUICKER = 23.0  # a first guess of how much less a second of a CPU is worth


@dataclass(frozen=True, eq=False)
class _Plane:
    """A set on a class of devices."""

    kind: int
    units: Bools
    load: float
    floor: int


@dataclass(frozen=True, eq=False)
class _Dual:
    """The worths of units, and of a second of each class of devices."""

    worth: Floats
    prices: Floats


class CoverBound:
    """The bound for a core's units, in any order.

    Args:
        core: the core; memory and devices to be filled are ignored.
        limit: seconds; a greatest load that is attained.
    """

    def __init__(self, core: Core, limit: float) -> None:
        self._core = core
        self._limit = limit
        self._counts = np.array([len(kind.devices) for kind in core.kinds])
        self._work = core.work / core.scale
        self._costs = core.costs / core.scale
        self._frontiers: list[SetTable] = []
        self._planes: dict[tuple[int, bytes], _Plane] = {}
        self.bound = 0.0

    def run(self, low: float, seconds: float, clock: Clock) -> float:
        """Return a lower bound on the greatest load, in seconds; never more than the limit.

        Args:
            low: a lower bound that is already known.
            seconds: about how long to search, counted in rounds.
            clock: the deadline.
        """
        self.bound = low
        if self._core.size > _MOST_UNITS or self._limit <= max(low, 0.0):
            return min(low, self._limit)
        self._lay_out()
        dual = _Dual(self._first_worth(), self._first_prices())
        states = max((frontier.states for frontier in self._frontiers), default=1)
        for parts in (_COARSE, min(_FINE, max(_COARSE, _MOST_CELLS // states))):
            dual = self._phase(dual, parts, self._rounds(seconds / 2, parts), clock)
        return min(self.bound, self._limit)

    def _lay_out(self) -> None:
        core = self._core
        pins = np.split(core.pins, core.starts[1:-1]) if len(core.pins) else []
        for work, barred, costs in zip(self._work, core.barred, self._costs, strict=True):
            nets = Nets.of(pins, costs)
            order = narrow_order(core.size, nets) if nets.pins else np.arange(core.size)
            self._frontiers.append(SetTable(work, barred, nets, order))

    def _rounds(self, seconds: float, parts: int) -> int:
        least, each, move, cell = _ROUND_SECONDS
        size = sum(frontier.states for frontier in self._frontiers)
        moves = sum(frontier.moves for frontier in self._frontiers)
        return int(seconds / (least + each * self._core.size + move * moves + cell * size * parts))

    def _first_worth(self) -> Floats:
        least = self._core.least_work / self._core.scale
        total = float(least.sum())
        worth: Floats = least / total if total else np.full(len(least), 1 / max(1, len(least)))
        return worth

    def _first_prices(self) -> Floats:
        cpus = np.array([kind.cpu for kind in self._core.kinds])
        return np.where(cpus, 1 / _QUICKER, 1.0) / (self._limit * float(self._counts.sum()))

    def _phase(self, best: _Dual, parts: int, rounds: int, clock: Clock) -> _Dual:
        """Return the best dual after some rounds with loads rounded to ``parts`` steps of the limit."""
        unit = self._limit / parts
        self._planes = {
            key: _Plane(plane.kind, plane.units, plane.load, int(plane.load / unit))
            for key, plane in self._planes.items()
        }
        height = self._weigh(best, unit, parts)
        radius, since, mark = _START, 0, self.bound
        for _ in range(rounds):
            if clock.is_over() or self.bound >= self._limit or since > _PATIENCE:
                break
            since += 1
            if self.bound > mark * (1 + _GAIN):
                since, mark = 0, self.bound
            step = self._next(best, radius, unit)
            if step is None:
                radius = max(radius * _NARROWER, _LEAST)
                continue
            dual, lowest = step
            before = self.bound
            now = self._weigh(dual, unit, parts)
            better = self.bound > before or now < height
            if better:
                best, height = dual, now
            wider = better or height - lowest < _SMALL
            radius = min(radius * _WIDER, _MOST) if wider else max(radius * _NARROWER, _LEAST)
        return best

    def _weigh(self, dual: _Dual, unit: float, parts: int) -> float:
        """Raise the bound by what these worths prove, keep the sets of greatest worth, and return the most that all
        devices cover at the bound.
        """
        loads = unit * np.arange(parts + 1)
        found = [
            frontier.best(dual.worth, unit, parts, float(price))
            for frontier, price in zip(self._frontiers, dual.prices, strict=True)
        ]
        # What a set leaves of the load counts at the price, so that rounding down loses little.
        worths = [best.value - price * loads for best, price in zip(found, dual.prices, strict=True)]
        most = sum(
            count * np.maximum.accumulate(worth) for count, worth in zip(self._counts.tolist(), worths, strict=True)
        )
        slope = float(self._counts @ dual.prices)
        need = float(dual.worth.sum()) - _MARGIN
        short = np.flatnonzero(most + slope * (loads + unit) < need)
        proven = 0.0 if not len(short) else float(loads[short[-1]]) + unit
        place = int(short[-1]) + 1 if len(short) else 0
        if place <= parts and slope > 0:
            proven = max(proven, min((need - float(most[place])) / slope, proven + unit))
        self.bound = max(self.bound, min(proven * (1 - _MARGIN), self._limit))
        within = self._within(unit, parts)
        for kind, (best, worth) in enumerate(zip(found, worths, strict=True)):
            self._keep(kind, best, int(worth[: within + 1].argmax()))
        return float(most[within]) + slope * self.bound

    def _within(self, unit: float, parts: int) -> int:
        """Return the load up to which the next proof is attempted."""
        return min(int(self.bound / unit + 1e-3), parts)

    def _keep(self, kind: int, best: BestSets, load: int) -> None:
        chosen = best.chosen(load)
        held = self._core.incidence @ chosen.astype(np.int64)
        cut = (held > 0) & (held < np.diff(self._core.starts))
        true = float(self._work[kind][chosen].sum() + self._costs[kind][cut].sum())
        self._planes[kind, chosen.tobytes()] = _Plane(kind, chosen, true, load)

    def _next(self, best: _Dual, radius: float, unit: float) -> tuple[_Dual, float] | None:
        """Return the worths near the best that minimise the maximum of the planes, and that minimum."""
        size, kinds = self._core.size, len(self._counts)
        within = self._within(unit, int(self._limit / unit))
        planes = [plane for plane in self._planes.values() if plane.floor <= within]
        matrix = self._matrix(planes)
        total = np.concatenate([np.ones(size), np.zeros(2 * kinds)])[None]
        reach, spare = radius / size, radius * (best.prices + 1e-3 / self._limit)
        low = np.concatenate([best.worth - reach, np.maximum(best.prices - spare, 0.0), np.full(kinds, -np.inf)])
        high = np.concatenate([best.worth + reach, best.prices + spare, np.full(kinds, np.inf)])
        result = linprog(
            np.concatenate([np.zeros(size + kinds), self._counts]),
            A_ub=matrix,
            b_ub=np.zeros(len(planes)),
            A_eq=total,
            b_eq=[1.0],
            bounds=np.stack([low, high], axis=1),
            method="highs",
        )
        if result.x is None:
            return None
        self._forget(planes, result.ineqlin.residual)
        prices = np.maximum(result.x[size : size + kinds], 0.0)
        return _Dual(result.x[:size], prices), float(result.fun)

    def _matrix(self, planes: list[_Plane]) -> coo_array:
        """Rows ``worth of the set + price * what it leaves of the load - most of its class <= 0``."""
        kinds = np.array([plane.kind for plane in planes], np.int64)
        row, shape = np.arange(len(planes)), (len(planes), len(self._counts))
        left = self.bound - np.array([plane.load for plane in planes])
        sets = coo_array(np.array([plane.units for plane in planes], np.float64))
        spare = coo_array((left, (row, kinds)), shape=shape)
        return hstack([sets, spare, coo_array((-np.ones(len(planes)), (row, kinds)), shape=shape)], format="csr")

    def _forget(self, planes: list[_Plane], slack: Floats) -> None:
        """Drop the planes with the most slack when there are many."""
        if len(self._planes) > _FULL:
            near: Ints = np.argsort(slack, kind="stable")[:_KEPT]
            self._planes = {(planes[i].kind, planes[i].units.tobytes()): planes[i] for i in sorted(near.tolist())}
