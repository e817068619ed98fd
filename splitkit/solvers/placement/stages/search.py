"""The search for the best stages of a core: along orders, over ideals, by annealing, by an integer program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement import bounds
from splitkit.solvers.placement.anneal import Places
from splitkit.solvers.placement.contract import relaxed, tightened
from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.orders import ORDERS, by_key, orders, within
from splitkit.solvers.placement.problem import GRACE, Ints
from splitkit.solvers.placement.stages.along import PLACES, Along
from splitkit.solvers.placement.stages.borders import by_borders
from splitkit.solvers.placement.stages.idealpath import best_stages
from splitkit.solvers.placement.stages.ideals import Effort, TooManyError, ideals
from splitkit.solvers.placement.stages.ladder import Ladder
from splitkit.solvers.placement.stages.program import stage_program, stage_relaxation
from splitkit.solvers.placement.stages.shares import by_shares
from splitkit.solvers.placement.stages.stages import StageRanks, fits, stage_loads
from splitkit.solvers.placement.stages.walk import Walk

MOST_UNITS = 6000
"""Beyond so many units only orders are tried."""
_MOST_KEPT = 1_000  # of larger cores the loads of stretches are not kept
_REORDERINGS, _UNIT_STEPS = 150, 1_000
_REORDERED, _ANNEALED, _PROGRAM = 0.16, 0.4, 1.0  # of the time
_MOVES = 400_000  # of single units, for each second
_FAR = 5.0  # times as long may it take as its steps are counted for
_STEPS = 9e7  # over ideals, for each second: what a slow machine does
_QUICKLY = 0.6  # of them before anything else is tried
_SHARE, _MOST_FAILURES = 0.6, 2  # of what is left of them for each limit; limits for which that may not do
_PROVEN, _FLOWS = 0.01, 4e5  # relative; minimum cuts for each second, times the units and pins of each
_RELAXED = (1.0, 0.02, 0.001)  # work on a host that a relaxation leaves out, as shares of the limit
_TIES = 16  # plans of equal value that are drawn, of each order


class StageSearch:
    """The best stages so far, from the last to the first, and what is proven.

    Attributes:
        best: None until some are found.
        bound: no greatest load is less; `BIG` if there are no stages at all.
        found_by: the solver that found the best.
        proved_by: the solver that proved the bound.
        plans: all that were found, each better than those before it.
        clock: the end of the search.
        near: relative; a value so near the bound is good enough.
    """

    def __init__(
        self,
        core: Core,
        ladder: Ladder,
        seconds: float,
        *,
        joinable: bool,
        near: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.core = core
        self.ladder = ladder
        self.best: StageRanks | None = None
        self.bound = bounds.simple(core)
        self.found_by = self.proved_by = "bound"
        self.plans: list[StageRanks] = []
        self.near = near
        self._seconds = seconds
        self.clock = Clock(_FAR * seconds + GRACE, clock)
        self._effort = Effort(int(_STEPS * seconds), self.clock)
        self._joinable = joinable
        self._known: list[Along] = []
        self._unknown = own_and_other_orders(core)
        self._order: Ints = np.arange(core.size)
        self._reach = 1.0  # of the way from the bound to the value, for the next limit over ideals

    @property
    def limit(self) -> int:
        """What loads must be below to be better."""
        return self.best.value if self.best else BIG

    @property
    def closed(self) -> bool:
        """Whether nothing better is possible, or nothing that matters."""
        return self.bound >= self.limit - int(self.limit * self.near)  # whole numbers: floats would round them

    def run(self, *, any_will_do: bool = False) -> None:
        """Everything, from the quickest to the longest, until it is closed or the time is over.

        Args:
            any_will_do: stop at the first stages.
        """
        self.along_orders(any_will_do=any_will_do)
        if any_will_do and self.best:
            return
        if self.core.size > MOST_UNITS:
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
            self._prove(stage_relaxation(joined, self.ladder, self.bound, self.limit, self.clock), "relaxation")
            self.by_program(_PROGRAM * self._seconds)

    def along_orders(self, *, any_will_do: bool = False) -> None:
        """The best along each of a few orders, the graph's own among them."""
        for index, line in enumerate(self._lines()):
            order = line.order
            if not index:
                self._order = order
            found = line.best(self.ladder, self.limit)
            if found and not line.whole:
                self._take(found[0], "orders")
                found = line.near(found[1]).best(self.ladder, self.limit)
            if found:
                self._take(found[0], "orders")
                self._order = order
            if self.core.size > _MOST_KEPT:
                line.forget()
            if self.closed or (self.best and (any_will_do or self.clock.is_over())):
                return

    def _lines(self) -> Iterator[Along]:
        """The core along each of its orders, made once for all who ask."""
        for index in count():
            if index == len(self._known):
                order = next(self._unknown, None)
                if order is None:
                    return
                self._known.append(Along(self.core, order))
            yield self._known[index]

    def ties(self) -> list[StageRanks]:
        """Some of the stages that are as good as the best."""
        assert self.best
        random = np.random.default_rng(0)
        found: list[StageRanks] = []
        for line in islice(self._lines(), ORDERS):  # without its own order
            if self.clock.is_over():
                break
            found += line.ties(self.ladder, self.best.value, _TIES, random)
            if self.core.size > _MOST_KEPT:
                line.forget()
        return found

    def over_ideals(self, share: float = 1.0, failures: int = _MOST_FAILURES) -> None:
        """The best over all orders, if the ideals are not too many; if they are, below limits nearer to the bound.

        First over a relaxation (`contract.relaxed`), while that tells something, then over finer ones.

        Args:
            share: of the effort that is left.
            failures: limits for which that may not do.
        """
        shares = [*(_RELAXED if self._joinable else ()), 0.0]
        effort = self._effort.part(share)
        self._effort.left -= effort.left
        reach = self._reach
        while not self.closed and failures:
            limit, part = self._within(reach), effort.part(_SHARE if failures > 1 else 1.0)
            effort.left -= part.left
            try:
                found, bound = self._over_ideals(limit, shares[0], part)
            except TooManyError:
                self._reach = reach = reach / 4
                failures -= 1
                continue
            effort.left += part.left
            self._prove(bound, "ideals")
            better = found is not None and self._try(found)
            if bound < min(limit, found.value if found else limit):
                reach, failures = reach / 8, failures - 1
            elif found and not better and len(shares) > 1:
                shares = shares[1:]
            reach = min(1.0, 2 * reach)
        self._effort.left += effort.left

    def _within(self, reach: float) -> int:
        """A limit between the bound and the value."""
        if reach >= 1:
            return self.limit
        core = self.core
        most = min(self.limit, int((core.work.sum(axis=1) + core.costs.sum(axis=1)).max()) + 1)
        return min(self.limit, self.bound + 1 + int(max(0, most - self.bound) * reach))

    def _try(self, found: StageRanks) -> bool:
        """Take the stages of a relaxation if they are better than the best; whether they are."""
        if not fits(self.core, found.rank, found.kinds, self._flights(found.kinds)):
            return False
        before = self.limit
        value = int(stage_loads(self.core, found.rank, found.kinds).max())
        self._take(StageRanks(value, found.rank, found.kinds), "ideals")
        return self.limit < before

    def by_reordering(self) -> None:
        """The best along random orders in which the stages of the best come one after another."""
        random = np.random.default_rng(0)
        places = min(self.core.size + 1, PLACES)
        each = places**2 * (len(self.ladder.steps) + 8) + _UNIT_STEPS * self.core.size
        for _ in range(max(1, min(_REORDERINGS, int(_REORDERED * _STEPS * self._seconds / each)))):
            if self.best is None or self.closed or self.clock.is_over():
                return
            found = Along(self.core, within(self.core, self.best.rank, random)).best(self.ladder, self.limit)
            if found:
                self._take(found[0], "orders")

    def by_annealing(self, seconds: float) -> None:
        """Moves of single units between the stages of the best, annealed, then the best along an order that fits."""
        assert self.best
        start, kinds = self.best.rank, self.best.kinds
        places = Places.of(self.core, kinds, self._flights(kinds), fill=self.ladder.fill)
        if len(kinds) < 2 or self.clock.is_over():
            return
        walk = Walk(self.core, places, start)
        walk.run(int(_MOVES * seconds), self.clock, self.bound / self.core.scale)
        value = int(stage_loads(self.core, walk.best, kinds).max())
        self._take(StageRanks(value, walk.best, kinds), "annealing")
        line = Along(self.core, by_key(self.core, walk.best.astype(np.float64)))
        found = line.best(self.ladder, self.limit)
        if found:
            self._take(found[0], "annealing")

    def _flights(self, kinds: tuple[int, ...]) -> tuple[int, ...]:
        """Microbatches in flight in each stage."""
        if not self.ladder.ordered:
            return tuple(self.ladder.flight(after) for after in range(len(kinds)))
        last = len(self.core.kinds) - 1
        return tuple(self.ladder.flight(last - self.core.kinds[kind].devices[0]) for kind in kinds)

    def raise_bound(self, value: int | None = None) -> None:
        """A bound from what would have to be joined, and from what must cross the borders.

        Args:
            value: a greatest load that is reached; that of the best by default.
        """
        high = self.limit if value is None else value
        filled = sum(len(kind.devices) for kind in self.core.kinds) if self.ladder.fill else 0
        self._prove(bounds.by_joining(self.core, self.bound, high, acyclic=True, filled=filled), "joining")
        self._prove(by_borders(self.core, self.bound, high), "borders")

    def by_shares(self) -> None:
        """A bound from what all borders together cost, where there is much to prove."""
        if self.best and self.bound < self.limit * (1 - _PROVEN):
            flows = int(_FLOWS * self._seconds / (self.core.size + len(self.core.pins)))
            self._prove(by_shares(self.core, self.bound, self.limit, self.best.rank, flows, self.clock), "shares")

    def by_program(self, seconds: float) -> None:
        """A mixed-integer program."""
        core, label = self._joined(self.limit)
        found, bound = stage_program(core, self.ladder, self.limit, seconds, self.clock)
        if found:
            self._take(StageRanks(found.value, found.rank[label], found.kinds), "highs")
        self._prove(min(bound, self.limit), "highs")

    def _over_ideals(self, limit: int, share: float, effort: Effort) -> tuple[StageRanks | None, int]:
        """Stages below a limit of the core relaxed with a share, and a bound on what they can be."""
        joined, label = self._joined(limit, share)
        found = ideals(joined, self.ladder, limit, self._order_of(joined, label), effort)
        stages, bound = best_stages(joined, self.ladder, limit, found, effort, self.bound)
        return (StageRanks(stages.value, stages.rank[label], stages.kinds) if stages else None), bound

    def _joined(self, limit: int, share: float = 0.0) -> tuple[Core, Ints]:
        """The core with all joined that must be together below a limit, and the unit there of each unit.

        What joins, each with a share of the limit as its work on a host or less, counts for nothing there.
        """
        own = replace(self.core, group=np.arange(self.core.size))
        if self._joinable:
            own = relaxed(tightened(own, limit), int(share * limit))
        return own, own.group

    def _order_of(self, joined: Core, label: Ints) -> Ints:
        """A topological order of joined units near the one of the best stages."""
        position = np.empty(self.core.size)
        position[self._order] = np.arange(self.core.size)
        key = np.full(joined.size, np.inf)
        np.minimum.at(key, label, position)
        return by_key(joined, key)

    def _take(self, found: StageRanks, solver: str) -> None:
        if found.value < self.limit:
            self.best, self.found_by = found, solver
            self.plans.append(found)

    def _prove(self, bound: int, solver: str) -> None:
        if bound > self.bound:
            self.bound, self.proved_by = bound, solver


def own_and_other_orders(core: Core) -> Iterator[Ints]:
    """The orders of a core from the last unit to the first, and at last its own, the numbers turned round."""
    yield from orders(core)
    yield by_key(core, -np.arange(core.size, dtype=np.float64))
