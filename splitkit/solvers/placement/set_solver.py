"""The search for sets of units with the least greatest load, regardless of the order between them.

Measured on nine published workloads, by switching off one at a time: without annealing, 7 plans are worse, by up to
1.8 %; without the cover, 3 bounds are 3.4 to 42 % weaker; without the integer program, one plan is 12.8 % worse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array, hstack

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement import contract
from splitkit.solvers.placement.anneal import DeviceTable, Population, cooling, population_size
from splitkit.solvers.placement.contract import check_placeable, contracted_core, tightened_core
from splitkit.solvers.placement.core import Core, colour_groups, core_of, exact_links
from splitkit.solvers.placement.packing import (
    BestSets,
    Nets,
    SetProgram,
    SetTable,
    find_sets,
    infeasible,
    is_placeable,
    narrow_order,
)
from splitkit.solvers.placement.problem import GRACE, Bools, Floats, Ints, Problem
from splitkit.solvers.placement.solution import InfeasibleError, Solution, faults, loads
from splitkit.solvers.placement.stages.contiguous import contiguous

# A lower bound on the greatest load of arbitrary sets: how much all devices together can cover with one set each.
#
# Each unit gets a worth; the worths sum to 1. A device with load L holds a set of load at most L, including the cost of
# each net that it cuts; `frontier` computes the greatest worth of such a set. If the greatest worths of all devices sum
# to less than 1, some unit is left over, so no placement has all loads at most L. This is the Lagrangian dual of the
# decomposition into one set for each device (Dantzig and Wolfe 1960). Unlike the linear relaxation of the integer
# program, it knows that a device cannot hold everything or parts of many sets, so cut nets cost.
#
# The worths come from a bundle of cutting planes in a trust region (Kelley 1960; Lemarechal 1975): each set of greatest
# worth is a plane, and a linear program finds the worths near the best so far that minimise the maximum of the planes.
# The bound holds for any worths.


_COARSE, _FINE = 150, 600  # steps into which loads up to the limit are rounded, in the first and the second phase
_MARGIN = 1e-9  # share of the total worth; larger than the rounding errors of sums of floats
_LEAST, _MOST, _START = 1e-4, 50.0, 0.5  # radius of the trust region, in mean worths of a unit
_WIDER, _NARROWER = 1.5, 0.8  # times the radius, from one round to the next
_COVER_BOUND_SMALL = 1e-4  # if the predicted gain is smaller, the region becomes wider
_PATIENCE, _GAIN = 80, 1e-3  # rounds within which the bound must grow by this, relative
_FULL, _KEPT = 400, 250  # planes
_ROUND_SECONDS = 5e-3, 1e-4, 5e-6, 3e-9  # of a round, about; more for each unit, transition, state and load
_MOST_UNITS = 600  # of a core; with 37 to 4,800, five requests had the same bounds
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
        core: the core; memory is ignored.
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
        dual = self._first()
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

    def _first(self) -> _Dual:
        least = self._core.least_work / self._core.scale
        total = float(least.sum())
        worth: Floats = least / total if total else np.full(len(least), 1 / max(1, len(least)))
        cpus = np.array([kind.cpu for kind in self._core.kinds])
        return _Dual(worth, np.where(cpus, 1 / _QUICKER, 1.0) / (self._limit * float(self._counts.sum())))

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
            wider = better or height - lowest < _COVER_BOUND_SMALL
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
        within = self._within(unit, round(self._limit / unit))
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


SECONDS = 50.0  # of callers that name none; policies have their own
_SMALL = 1_200  # columns of an integer program that comes before annealing
_LARGE = 1_700  # columns of one that still comes after it: larger ones find and prove less than what comes before
_STAGES, _ANNEALED, _MOST_ANNEALED, _COVERED, _PROGRAM = 0.15, 0.25, 0.5, 0.5, 0.2  # of the time
_FAR = 2.0  # the clock ends the search after this many times the seconds that its steps count for
_CLOSE = 2e-6  # relative; the tolerance of the integer program


def noncontiguous(problem: Problem, *, seconds: float = SECONDS, clock: Clock | None = None) -> Solution:
    """Return one set of units for each device with a small greatest load, in any order, so nothing is in flight.

    The best stages are annealed (`anneal`). A decomposition into sets bounds how much the devices can cover
    (`cover_bound`), and a mixed-integer program finds and proves the optimum of small problems. The same problem gives
    the same placement also on a machine half as fast.

    Args:
        problem: the problem; its ``edges``, ``in_flight``, ``ordered`` and ``fill`` do not matter.
        seconds: the time for the search; its steps are counted, and the clock ends it only after twice as long.
        clock: the clock of the whole search that this is a part of; it ends this search too.

    Raises:
        InfeasibleError: there is no placement, or none was found.
    """
    problem = replace(problem, in_flight=(), ordered=False, fill=False)
    core = core_of(problem, colour_groups(problem))
    check_placeable(problem, core)
    joinable = exact_links(problem)
    small = contracted_core(core, acyclic=False) if joinable else core
    search = _SetSearch(problem, small, seconds, joinable, clock)
    search.run()
    if search.best is None:
        raise infeasible(problem, proven=search.excluded)
    device = search.best[small.group]
    value = loads(problem, device)
    wrong = faults(problem, device)
    assert not wrong, wrong
    return Solution(
        device=device,
        order=(),
        value=float(value.max()),
        bound=min(float(value.max()), search.bound),
        solver=search.found_by if search.found_by == search.proved_by else f"{search.found_by}, {search.proved_by}",
        loads=value,
        tolerance=_CLOSE,
        timed_out=search.clock.timed_out,
    )


class _SetSearch:
    """The best sets so far, and what is proven, in seconds of the problem."""

    def __init__(
        self, problem: Problem, core: Core, seconds: float, joinable: bool, clock: Clock | None = None
    ) -> None:
        self._problem = problem
        self._core = core
        self._seconds = seconds
        self.clock = Clock(_FAR * seconds + GRACE, clock)
        self._joinable = joinable
        self._places = DeviceTable.of_problem(problem, core)
        self.best: Ints | None = None
        self.value = np.inf
        self.bound = contract.simple_bound_seconds(core)
        self.excluded = False
        self.found_by = self.proved_by = "bound"

    def run(self) -> None:
        self._start()
        if self.excluded or self.best is None or self._closed or self.clock.is_over():
            return
        self._join()
        if self._columns(self._core) <= _SMALL:
            self._program(self._seconds * _STAGES)
        if not self._closed:
            most = self._columns(self._core) > _LARGE  # no program comes after it
            self._anneal(self._seconds * (_MOST_ANNEALED if most else _ANNEALED))
        if not self._closed:
            self._join()
            cover = CoverBound(self._tightened(), self.value)
            self._prove(cover.run(self.bound, self._seconds * _COVERED, self.clock), "cover")
        if not self._closed:
            self._program(self._seconds * _PROGRAM)

    @property
    def _closed(self) -> bool:
        return self.bound >= self.value * (1 - _CLOSE)

    def _columns(self, core: Core) -> int:
        return SetProgram.columns(
            core, self._places if core is self._core else DeviceTable.of_problem(self._problem, core)
        )

    def _start(self) -> None:
        """Start from the best stages, or from any sets that fit."""
        try:
            stages = contiguous(self._problem, seconds=self._seconds * _STAGES, clock=self.clock)
        except InfeasibleError:
            some, self.excluded = find_sets(self._core, self._places, self._seconds * _STAGES, self.clock)
            if some is not None:
                self._take(some, "packing")
            return
        self.clock.timed_out |= stages.timed_out
        _, first = np.unique(self._core.group, return_index=True)
        self._take(stages.device[first], "stages")

    def _join(self) -> None:
        """Raise the bound by what must be joined."""
        low, high = int(self.bound * self._core.scale), int(self.value * self._core.scale)
        joined = contract.joining_bound(self._core, low, high, acyclic=False)
        self._prove((joined - self._core.slack) / self._core.scale, "joining")

    def _anneal(self, seconds: float) -> None:
        assert self.best is not None
        core = self._core
        size = population_size(core, len(self._places.work))
        population = Population(core, self._places, self.best, size)
        population.run(cooling(population.rounds(seconds), self.clock), self.bound)
        self._take(population.best, "annealing")

    def _program(self, seconds: float) -> None:
        """Solve the integer program over the core with units joined that must be together."""
        own = self._tightened()
        if self._columns(own) > _LARGE or self.clock.is_over():
            return
        places = DeviceTable.of_problem(self._problem, own)
        found, bound = SetProgram(own, places, self.value * (1 + _CLOSE)).solve(seconds, self.clock, known=self.bound)
        if found is not None and is_placeable(own, places, found):
            self._take(found[own.group], "highs")
        self._prove(min(bound, self.value), "highs")

    def _tightened(self) -> Core:
        """Return the core with units joined that every placement no worse than the best keeps together."""
        own = replace(self._core, group=np.arange(self._core.size))
        if not self._joinable:
            return own
        return tightened_core(own, int(self.value * own.scale * (1 + _CLOSE)) + 1, acyclic=False)

    def _take(self, device: Ints, solver: str) -> None:
        value = float(loads(self._problem, device[self._core.group]).max())
        if value < self.value:
            self.best, self.value, self.found_by = device.copy(), value, solver

    def _prove(self, bound: float, solver: str) -> None:
        if bound > self.bound:
            self.bound, self.proved_by = bound, solver
