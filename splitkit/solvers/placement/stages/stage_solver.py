"""The search for the best stages of a core: along orders, over ideals, by annealing, and by an integer program.

The first k stages are an *ideal* of the graph: a set of units with all their predecessors. A dynamic program over all
ideals is exact (Tarnawski et al., NeurIPS 2020), but there may be exponentially many. So the search closes the gap from
both sides, the cheapest way first::

    along_orders     the same program over the prefixes of one topological order: a plan, seldom the best
    over_ideals      exact below a limit; ideals whose loads cannot stay below it are never made
    by_reordering    orders that keep the best stages together
    by_annealing     moves of single units
    raise_bound      what must stay together, what must cross a border, Lagrangian shares of nets
    by_program       an integer program over what is left open

Each solver is given the best value as a limit and returns only what is below it, so the later ones have less to do.
Steps are counted, and seconds are converted to steps, so that every machine finds the same plan.

Measured by switching off one at a time (``benchmarks/solver_components.py``): without `over_ideals`, 7 of 9 bounds of
published workloads are 1.9 to 53.6 % weaker; without the Lagrangian shares, the bound of a T5 in six stages over PCIe 4
under 1F1B is 6.6 % lower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from math import log

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement import contract
from splitkit.solvers.placement.anneal import DeviceTable
from splitkit.solvers.placement.contract import contracted_core, tightened_core
from splitkit.solvers.placement.core import BIG, ORDERS, Core, order_by_key, order_within_stages, orders, value_lists
from splitkit.solvers.placement.problem import GRACE, Floats, Ints
from splitkit.solvers.placement.stages.border_bound import border_bound, stage_program, stage_relaxation
from splitkit.solvers.placement.stages.ideal_dp import Effort, TooManyError, best_stages, ideals
from splitkit.solvers.placement.stages.lagrangian_bound import lagrangian_bound
from splitkit.solvers.placement.stages.order_dp import PLACES, DeviceSteps, OrderDP, StageRanks, fits, stage_loads

_MOST_UNITS = 6000  # in larger cores only orders are tried
_MOST_KEPT = 1_000  # units; in larger cores the loads of segments take too much memory to be kept
_REORDERINGS, _UNIT_STEPS = 150, 1_000  # random orders at most; the steps that one counts for, a unit
_REORDERED, _ANNEALED, _PROGRAM = 0.16, 0.4, 1.0  # shares of the time
_MOVES = 400_000  # moves of single units in a second
_FAR = 5.0  # the clock ends the search after this many times the seconds that its steps count for
_STEPS = 9e7  # steps over ideals in a second on a slow machine
_QUICKLY = 0.6  # share of these steps that is spent before anything else is tried
_SHARE, _MOST_FAILURES = 0.6, 2  # of what is left of them for each limit; limits for which that may not do
_PROVEN, _FLOWS = 0.01, 4e5  # relative; minimum cuts for each second, times the units and pins of each
_TIES = 16  # plans of equal value that are drawn from each order


class StageSearch:
    """The best stages so far, numbered from the last to the first, and what is proven about them.

    Attributes:
        best: the best stages; None until some are found.
        bound: a lower bound on the greatest load; `BIG` if no stages exist at all.
        found_by: the solver that found the best stages.
        proved_by: the solver that proved the bound.
        plans: all stages that were found, each better than the ones before it.
        clock: the deadline.
        near: relative; a value this close to the bound is good enough.
    """

    def __init__(
        self,
        core: Core,
        device_steps: DeviceSteps,
        seconds: float,
        *,
        joinable: bool,
        near: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.core = core
        self.device_steps = device_steps
        self.best: StageRanks | None = None
        self.bound = contract.simple_bound(core)
        self.found_by = self.proved_by = "bound"
        self.plans: list[StageRanks] = []
        self.near = near
        self._seconds = seconds
        self.clock = Clock(_FAR * seconds + GRACE, clock)
        self._effort = Effort(int(_STEPS * seconds), self.clock)
        self._joinable = joinable
        self._known: list[OrderDP] = []
        self._unknown = own_and_other_orders(core)
        self._order: Ints = np.arange(core.size)
        self._reach = 1.0  # of the way from the bound to the value, for the next limit over ideals

    @property
    def limit(self) -> int:
        """The value that loads must be below to be an improvement."""
        return self.best.value if self.best else BIG

    @property
    def closed(self) -> bool:
        """Whether no improvement is possible, or none that matters."""
        return self.bound >= self.limit - int(self.limit * self.near)  # whole numbers: floats would round them

    def run(self, *, any_will_do: bool = False) -> None:
        """Run every solver, from the quickest to the slowest, until the gap is closed or the time is over.

        Args:
            any_will_do: stop at the first stages found.
        """
        self.along_orders(any_will_do=any_will_do)
        if any_will_do and self.best:
            return
        if self.core.size > _MOST_UNITS:
            self.by_reordering()
            return
        if not self.closed:
            self.over_ideals(_QUICKLY, failures=1)
        if not self.closed and self.best:
            self.by_reordering()
        if not self.closed and self.best:
            self.by_annealing(_ANNEALED * self._seconds)
        if not self.closed and self.best and not self.clock.is_over():
            self.raise_bound()
        if not self.closed:
            self.over_ideals()
        if not self.closed and not self.clock.is_over():
            self.by_shares()
        if not self.closed and not self.clock.is_over():
            joined = self._joined(self.limit)[0]
            self._prove(stage_relaxation(joined, self.device_steps, self.bound, self.limit, self.clock), "relaxation")
            self.by_program(_PROGRAM * self._seconds)

    def along_orders(self, *, any_will_do: bool = False) -> None:
        """Find the best stages along each of a few orders, the graph's own among them."""
        for index, line in enumerate(self._lines()):
            order = line.order
            if not index:
                self._order = order
            found = line.best(self.device_steps, self.limit)
            if found and not line.whole:
                self._take(found[0], "orders")
                found = line.near(found[1]).best(self.device_steps, self.limit)
            if found:
                self._take(found[0], "orders")
                self._order = order
            if self.core.size > _MOST_KEPT:
                line.forget()
            if self.closed or (self.best and (any_will_do or self.clock.is_over())):
                return

    def _lines(self) -> Iterator[OrderDP]:
        """Yield the dynamic program along each order of the core; each is made once."""
        for index in count():
            if index == len(self._known):
                order = next(self._unknown, None)
                if order is None:
                    return
                self._known.append(OrderDP(self.core, order))
            yield self._known[index]

    def ties(self) -> list[StageRanks]:
        """Return some of the stages that are as good as the best."""
        assert self.best
        random = np.random.default_rng(0)
        found: list[StageRanks] = []
        for line in islice(self._lines(), ORDERS):  # without its own order
            if self.clock.is_over():
                break
            found += line.ties(self.device_steps, self.best.value, _TIES, random)
            if self.core.size > _MOST_KEPT:
                line.forget()
        return found

    def over_ideals(self, share: float = 1.0, failures: int = _MOST_FAILURES) -> None:
        """Find the best stages over all orders if the ideals are few enough; otherwise try limits nearer the bound.

        Args:
            share: the share of the remaining effort that may be spent.
            failures: how many limits may fail for lack of effort.
        """
        effort = self._effort.part(share)
        self._effort.left -= effort.left
        reach = self._reach
        while not self.closed and failures:
            limit, part = self._within(reach), effort.part(_SHARE if failures > 1 else 1.0)
            effort.left -= part.left
            try:
                found, bound = self._over_ideals(limit, part)
            except TooManyError:
                self._reach = reach = reach / 4
                failures -= 1
                continue
            effort.left += part.left
            self._prove(bound, "ideals")
            if found is not None:
                self._try(found)
            if bound < min(limit, found.value if found else limit):
                reach, failures = reach / 8, failures - 1
            reach = min(1.0, 2 * reach)
        self._effort.left += effort.left

    def _within(self, reach: float) -> int:
        """Return a limit between the bound and the value."""
        if reach >= 1:
            return self.limit
        core = self.core
        most = min(self.limit, int((core.work.sum(axis=1) + core.costs.sum(axis=1)).max()) + 1)
        return min(self.limit, self.bound + 1 + int(max(0, most - self.bound) * reach))

    def _try(self, found: StageRanks) -> None:
        """Accept the stages of joined units if they fit and beat the best."""
        if fits(self.core, found.rank, found.kinds, self._flights(found.kinds)):
            value = int(stage_loads(self.core, found.rank, found.kinds).max())
            self._take(StageRanks(value, found.rank, found.kinds), "ideals")

    def by_reordering(self) -> None:
        """Search along random orders in which the stages of the best solution follow each other."""
        random = np.random.default_rng(0)
        places = min(self.core.size + 1, PLACES)
        each = places**2 * (len(self.device_steps.steps) + 8) + _UNIT_STEPS * self.core.size
        for _ in range(max(1, min(_REORDERINGS, int(_REORDERED * _STEPS * self._seconds / each)))):
            if self.best is None or self.closed or self.clock.is_over():
                return
            found = OrderDP(self.core, order_within_stages(self.core, self.best.rank, random)).best(
                self.device_steps, self.limit
            )
            if found:
                self._take(found[0], "orders")

    def by_annealing(self, seconds: float) -> None:
        """Anneal single units between the stages of the best, then search along an order that fits the result."""
        assert self.best
        start, kinds = self.best.rank, self.best.kinds
        places = DeviceTable.of(self.core, kinds, self._flights(kinds), fill=self.device_steps.fill)
        if len(kinds) < 2 or self.clock.is_over():
            return
        walk = UnitAnnealing(self.core, places, start)
        walk.run(int(_MOVES * seconds), self.clock, self.bound / self.core.scale)
        value = int(stage_loads(self.core, walk.best, kinds).max())
        self._take(StageRanks(value, walk.best, kinds), "annealing")
        line = OrderDP(self.core, order_by_key(self.core, walk.best.astype(np.float64)))
        found = line.best(self.device_steps, self.limit)
        if found:
            self._take(found[0], "annealing")

    def _flights(self, kinds: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of microbatches in flight in each stage."""
        if not self.device_steps.ordered:
            return tuple(self.device_steps.flight(after) for after in range(len(kinds)))
        last = len(self.core.kinds) - 1
        return tuple(self.device_steps.flight(last - self.core.kinds[kind].devices[0]) for kind in kinds)

    def raise_bound(self) -> None:
        """Raise the bound by what must be joined and by what must cross the borders."""
        high = self.limit
        filled = sum(len(kind.devices) for kind in self.core.kinds) if self.device_steps.fill else 0
        self._prove(contract.joining_bound(self.core, self.bound, high, acyclic=True, filled=filled), "joining")
        self._prove(border_bound(self.core, self.bound, high), "borders")

    def by_shares(self) -> None:
        """Raise the bound by Lagrangian shares of the nets' costs, where the gap is large."""
        if self.best and self.bound < self.limit * (1 - _PROVEN):
            flows = int(_FLOWS * self._seconds / (self.core.size + len(self.core.pins)))
            self._prove(
                lagrangian_bound(self.core, self.bound, self.limit, self.best.rank, flows, self.clock), "shares"
            )

    def by_program(self, seconds: float) -> None:
        """Solve a mixed-integer program."""
        core, label = self._joined(self.limit)
        found, bound = stage_program(core, self.device_steps, self.limit, seconds, self.clock)
        if found:
            self._take(StageRanks(found.value, found.rank[label], found.kinds), "highs")
        self._prove(min(bound, self.limit), "highs")

    def _over_ideals(self, limit: int, effort: Effort) -> tuple[StageRanks | None, int]:
        """Return stages below a limit, and a bound on their value."""
        joined, label = self._joined(limit)
        found = ideals(joined, self.device_steps, limit, self._order_of(joined, label), effort)
        stages, bound = best_stages(joined, self.device_steps, limit, found, effort, self.bound)
        return (StageRanks(stages.value, stages.rank[label], stages.kinds) if stages else None), bound

    def _joined(self, limit: int) -> tuple[Core, Ints]:
        """Return the core in which all units that must be together below a limit are one, and the new unit of each
        unit.
        """
        own = replace(self.core, group=np.arange(self.core.size))
        if self._joinable:
            own = contracted_core(tightened_core(own, limit))
        return own, own.group

    def _order_of(self, joined: Core, label: Ints) -> Ints:
        """Return a topological order of the joined units that is near the order of the best stages."""
        position = np.empty(self.core.size)
        position[self._order] = np.arange(self.core.size)
        key = np.full(joined.size, np.inf)
        np.minimum.at(key, label, position)
        return order_by_key(joined, key)

    def _take(self, found: StageRanks, solver: str) -> None:
        if found.value < self.limit:
            self.best, self.found_by = found, solver
            self.plans.append(found)

    def _prove(self, bound: int, solver: str) -> None:
        if bound > self.bound:
            self.bound, self.proved_by = bound, solver


def own_and_other_orders(core: Core) -> Iterator[Ints]:
    """Yield the orders of a core from the last unit to the first, and finally its own order, reversed."""
    yield from orders(core)
    yield order_by_key(core, -np.arange(core.size, dtype=np.float64))


# Simulated annealing of one assignment of units to stages, one unit at a time.
#
# A move takes a unit to another stage between those of its neighbours, so that no edge goes back; the two loads that
# change follow from how many pins of each of its nets the two stages hold. One long run gets further on wide graphs
# than the many short ones of `anneal`, which make more moves per second. The state is kept in lists because single
# steps in Python are faster on lists than on arrays.


_POWER = 20.0  # the power of the norm of the loads that approximates the greatest
_HOT, _COLD = 0.3, 0.06  # first and last temperature; the energy is the logarithm of that norm, times the units
_BATCH = 5_000  # moves for which random numbers are drawn at once, and sums are made anew: what is added to drifts


class UnitAnnealing:
    """The state of one annealing run.

    Args:
        core: the core, with its units (n) and nets (m).
        places: the stages (k); no edge may go from one to an earlier one.
        start: (n,) the stage of each unit at the start; it must keep to all constraints.

    Attributes:
        best: (n,) the best assignment so far.
        value: its greatest load, in seconds.
    """

    def __init__(self, core: Core, places: DeviceTable, start: Ints) -> None:
        self._core, self._places = core, places
        self._random = np.random.default_rng(0)
        self._rank: list[int] = start.tolist()
        self._after = value_lists(core.edges[:, 0], core.edges[:, 1], core.size)
        self._before = value_lists(core.edges[:, 1], core.edges[:, 0], core.size)
        self._nets = value_lists(core.pins, core.pin_nets, core.size)
        self._sizes: list[int] = np.diff(core.starts).tolist()
        self._work, self._costs, self._nbytes = _shared(places.work), _shared(places.costs), _shared(places.nbytes)
        self._capacity: list[float] = places.capacity.tolist()
        self.best, self.value = start, float("inf")
        self._recount()
        self._keep()

    def run(self, moves: int, clock: Clock, enough: float = 0.0) -> None:
        """Anneal for a number of proposed moves, or until a value of at most ``enough`` is reached."""
        batches = -(-moves // _BATCH)
        for batch in range(batches):
            if self.value <= enough or clock.is_over():
                return
            self._some(_HOT * (_COLD / _HOT) ** (batch / batches) / self._core.size, enough)
            self._recount()

    def _recount(self) -> None:
        """Compute loads, bytes and pins from scratch."""
        core, places, count = self._core, self._places, len(self._capacity)
        rank = np.array(self._rank, np.int64)
        unit = np.arange(core.size)
        pins = np.zeros((core.costs.shape[1], count), np.int64)
        np.add.at(pins, (core.pin_nets, rank[core.pins]), 1)
        partly = (pins > 0) & (pins < np.diff(core.starts)[:, None])
        loads = (places.costs.T * partly).sum(axis=0) + np.bincount(rank, places.work[rank, unit], count)
        self._loads: list[float] = loads.tolist()
        self._held: list[float] = np.bincount(rank, places.nbytes[rank, unit], count).tolist()
        self._units: list[int] = np.bincount(rank, minlength=count).tolist()
        self._here: list[int] = pins.ravel().tolist()

    def _keep(self) -> None:
        if (worst := max(self._loads)) < self.value * (1 - 1e-12):
            self.best, self.value = np.array(self._rank, np.int64), worst

    def _some(self, heat: float, enough: float) -> None:
        """Make one batch of moves at a temperature."""
        random, last = self._random, len(self._capacity) - 1
        units = random.integers(self._core.size, size=_BATCH).tolist()
        ups = (random.random(_BATCH) < 1 / 2).tolist()
        shares, rises = random.random(_BATCH).tolist(), (heat * random.exponential(size=_BATCH)).tolist()
        rank, after, before, loads = self._rank, self._after, self._before, self._loads
        reference = max(loads) + 1e-300
        energy = sum((load / reference) ** _POWER for load in loads)
        for unit, up, share, rise in zip(units, ups, shares, rises, strict=True):
            old = rank[unit]
            if up:
                end = min([rank[then] for then in after[unit]], default=last)
                if end == old:
                    continue
                new = old + 1 + int(share * (end - old))
            else:
                end = max([rank[first] for first in before[unit]], default=0)
                if end == old:
                    continue
                new = old - 1 - int(share * (old - end))
            if not self._may(unit, old, new):
                continue
            less, more = self._loads_after(unit, old, new)
            then = energy + (less / reference) ** _POWER + (more / reference) ** _POWER
            then -= (loads[old] / reference) ** _POWER + (loads[new] / reference) ** _POWER
            if then > energy and log(then / energy) > _POWER * rise:
                continue
            energy = then
            self._move(unit, old, new, less, more)
            if max(loads) < self.value:
                self._keep()
                if self.value <= enough:
                    return

    def _may(self, unit: int, old: int, new: int) -> bool:
        """Return whether a move keeps to memory, to what stages support, and to the stages that must be filled."""
        if self._places.fill and self._units[old] == 1:
            return False
        return self._held[new] + self._nbytes[new][unit] <= self._capacity[new] and self._work[new][unit] < np.inf

    def _loads_after(self, unit: int, old: int, new: int) -> tuple[float, float]:
        """Return the loads of the two stages after a move."""
        less, more = self._loads[old] - self._work[old][unit], self._loads[new] + self._work[new][unit]
        here, sizes, count = self._here, self._sizes, len(self._loads)
        left, entered = self._costs[old], self._costs[new]
        for net in self._nets[unit]:
            size, place = sizes[net], net * count
            mine, theirs = here[place + old], here[place + new]
            if mine == size:
                less += left[net]
            elif mine == 1:
                less -= left[net]
            if not theirs:
                more += entered[net]
            elif theirs + 1 == size:
                more -= entered[net]
        return max(less, 0.0), more

    def _move(self, unit: int, old: int, new: int, less: float, more: float) -> None:
        self._rank[unit] = new
        self._loads[old], self._loads[new] = less, more
        here, count = self._here, len(self._loads)
        for net in self._nets[unit]:
            here[net * count + old] -= 1
            here[net * count + new] += 1
        self._held[old] -= self._nbytes[old][unit]
        self._held[new] += self._nbytes[new][unit]
        self._units[old] -= 1
        self._units[new] += 1


def _shared(rows: Floats) -> list[list[float]]:
    """Return each row as a list; equal rows share one list."""
    known: dict[bytes, list[float]] = {}
    return [known.setdefault(row.tobytes(), row.tolist()) for row in rows]
