"""The search for the best stages of a core: along orders, over ideals, by annealing, by an integer program."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from splitkit.solvers.placement import bounds, cpsat
from splitkit.solvers.placement.anneal import Places, Population, Schedule, rows_of
from splitkit.solvers.placement.contract import relaxed, tightened
from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.idealpath import best_stages
from splitkit.solvers.placement.ideals import TooManyError, ideals
from splitkit.solvers.placement.ladder import Ladder
from splitkit.solvers.placement.linear import Line
from splitkit.solvers.placement.orders import by_key, orders, within
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.program import stage_program
from splitkit.solvers.placement.stages import Stages, fits, stage_loads

MOST_UNITS = 6000
"""Beyond so many units only orders are tried."""
_REORDERINGS, _REORDERED_UNITS = 150, 150_000
_REORDERED, _ANNEALED = 0.3, 0.4  # of the time
_HALVINGS = 6
_RELAXED = (1.0, 0.02, 0.001)  # work on a host that a relaxation leaves out, as shares of the limit
_TIES = 16  # plans of equal value that are drawn, of each order


class Search:
    """The best stages so far, from the last to the first, and what is proven.

    Attributes:
        best: None until some are found.
        bound: no greatest load is less; `BIG` if there are no stages at all.
        found_by: the solver that found the best.
        proved_by: the solver that proved the bound.
        plans: all that were found, each better than those before it.
    """

    def __init__(self, core: Core, ladder: Ladder, seconds: float, *, joinable: bool) -> None:
        self.core = core
        self.ladder = ladder
        self.best: Stages | None = None
        self.bound = bounds.simple(core)
        self.found_by = self.proved_by = "bound"
        self.plans: list[Stages] = []
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._joinable = joinable
        self._order: Ints = np.arange(core.size)

    @property
    def limit(self) -> int:
        """What loads must be below to be better."""
        return self.best.value if self.best else BIG

    @property
    def closed(self) -> bool:
        """Whether nothing better is possible."""
        return self.bound >= self.limit

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
            self.over_ideals()
        if not self.closed and self.best:
            before = self.limit
            self.by_reordering()
            if self.limit < before:
                self.over_ideals()
        if not self.closed and self.best:
            before = self.limit
            self.by_annealing(self._seconds * _ANNEALED)
            if self.limit < before:
                self.over_ideals()
        if not self.closed and self.best:
            self.raise_bound()
        if not self.closed and self._time_left() > 0:
            if self.best and cpsat.available():
                self.by_cpsat()
            else:
                self.by_program()

    def along_orders(self, *, any_will_do: bool = False) -> None:
        """The best along each of a few orders."""
        for index, order in enumerate(orders(self.core)):
            line = Line(self.core, order)
            if not index:
                self._order = order
            found = line.best(self.ladder, self.limit)
            if found and not line.whole:
                self._take(found[0], "orders")
                found = line.near(found[1]).best(self.ladder, self.limit)
            if found:
                self._take(found[0], "orders")
                self._order = order
            if self.closed or (any_will_do and self.best):
                return

    def ties(self) -> list[Stages]:
        """Some of the stages that are as good as the best."""
        assert self.best
        random = np.random.default_rng(0)
        found: list[Stages] = []
        for order in orders(self.core):
            if self._time_left() <= 0:
                break
            found += Line(self.core, order).ties(self.ladder, self.best.value, _TIES, random)
        return found

    def over_ideals(self) -> None:
        """The best over all orders, if the ideals are not too many."""
        try:
            if self._joinable and any(self._relaxed_is_enough(share) for share in _RELAXED):
                return
            found = self._over_ideals(self.limit)
        except TooManyError:
            return
        if found:
            self._take(found, "ideals")
        self._prove(self.limit, "ideals")

    def _relaxed_is_enough(self, share: float) -> bool:
        """Whether even a relaxation has nothing better than the best; what it has is tried first."""
        while self.best:
            found = self._over_ideals(self.limit, share)
            if found is None:
                self._prove(self.limit, "ideals")
                return True
            self._prove(found.value, "ideals")
            if not self._try(found):
                return False
        return False

    def _try(self, found: Stages) -> bool:
        """Take the stages of a relaxation if they are better than the best; whether they are."""
        if not fits(self.core, found.rank, found.kinds, self._flights(found.kinds)):
            return False
        before = self.limit
        value = int(stage_loads(self.core, found.rank, found.kinds).max())
        self._take(Stages(value, found.rank, found.kinds), "ideals")
        return self.limit < before

    def by_reordering(self) -> None:
        """The best along random orders in which the stages of the best come one after another."""
        random = np.random.default_rng(0)
        start = self._time_left()
        for _ in range(max(1, min(_REORDERINGS, _REORDERED_UNITS // self.core.size))):
            if self.best is None or self.closed or start - self._time_left() > _REORDERED * self._seconds:
                return
            found = Line(self.core, within(self.core, self.best.rank, random)).best(self.ladder, self.limit)
            if found:
                self._take(found[0], "orders")

    def by_annealing(self, seconds: float) -> None:
        """Moves of single units between the stages of the best, annealed, then the best along an order that fits."""
        assert self.best
        start, kinds = self.best.rank, self.best.kinds
        places = Places.of(self.core, kinds, self._flights(kinds), staged=True, fill=self.ladder.fill)
        if len(kinds) < 2 or self._time_left() <= 0:
            return
        population = Population(self.core, places, start, rows_of(self.core, len(kinds)))
        population.run(Schedule(population.rounds(seconds), self._deadline), self.bound / self.core.scale)
        value = int(stage_loads(self.core, population.best, kinds).max())
        self._take(Stages(value, population.best, kinds), "annealing")
        line = Line(self.core, by_key(self.core, population.best.astype(np.float64)))
        found = line.best(self.ladder, self.limit)
        if found:
            self._take(found[0], "annealing")

    def _flights(self, kinds: tuple[int, ...]) -> tuple[int, ...]:
        """Microbatches in flight in each stage."""
        if not self.ladder.ordered:
            return tuple(self.ladder.flight(after) for after in range(len(kinds)))
        last = len(self.core.kinds) - 1
        return tuple(self.ladder.flight(last - self.core.kinds[kind].devices[0]) for kind in kinds)

    def raise_bound(self) -> None:
        """Bounds from what would have to be joined, and from ideals that are fewer below a lower limit."""
        joined = bounds.by_joining(self.core, self.bound, self.limit, acyclic=True) if self._joinable else 0
        self._prove(joined, "joining")
        low, high = self.bound, self.limit
        for _ in range(_HALVINGS):
            middle = (low + high + 1) // 2
            if self._time_left() <= 0 or middle <= low:
                return
            try:
                found = self._over_ideals(middle, _RELAXED[0])
            except TooManyError:
                high = middle
                continue
            low = found.value if found else middle
            self._prove(low, "ideals")
            if found:
                self._try(found)
                return

    def by_cpsat(self) -> None:
        """CP-SAT for what time is left."""
        assert self.best
        core, label = self._joined(self.limit)
        first = np.unique(label, return_index=True)[1]
        start = Stages(self.best.value, self.best.rank[first], self.best.kinds)
        found, bound = cpsat.stages_by_cpsat(core, self.ladder, start, self._time_left())
        if found:
            self._take(Stages(found.value, found.rank[label], found.kinds), "cpsat")
        self._prove(min(bound, self.limit), "cpsat")

    def by_program(self) -> None:
        """A mixed-integer program for what time is left."""
        core, label = self._joined(self.limit)
        found, bound = stage_program(core, self.ladder, self.limit, self._time_left())
        if found:
            self._take(Stages(found.value, found.rank[label], found.kinds), "highs")
        self._prove(min(bound, self.limit), "highs")

    def _over_ideals(self, limit: int, share: float = 0.0) -> Stages | None:
        joined, label = self._joined(limit, share)
        if self._time_left() <= 0:
            raise TooManyError
        found = ideals(joined, self.ladder, limit, self._order_of(joined, label), lambda: self._time_left() > 0)
        stages = best_stages(joined, self.ladder, limit, found, lambda: self._time_left() > 0)
        return Stages(stages.value, stages.rank[label], stages.kinds) if stages else None

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

    def _take(self, found: Stages, solver: str) -> None:
        if found.value < self.limit:
            self.best, self.found_by = found, solver
            self.plans.append(found)

    def _prove(self, bound: int, solver: str) -> None:
        if bound > self.bound:
            self.bound, self.proved_by = bound, solver

    def _time_left(self) -> float:
        return self._deadline - time.monotonic()
