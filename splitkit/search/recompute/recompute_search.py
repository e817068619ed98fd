"""The search for the least recompute within a budget: programs, each with the limits that earlier plans broke.

The peak of a plan depends on the order of its run, which no linear program can state. So the limits come from runs, as
in cutting planes (Kelley 1960)::

    1  solve: least recompute under the limits so far
    2  simulate the plan: which moments exceed the budget?           none: a candidate
    3  state what is alive there as limits on saved and recomputed   back to 1

Limits taken from one run are estimates for the next: they steer towards plans that fit, and prove nothing. The bound
comes from those that hold for every plan within the budget (`memory_limits.MemoryFloors`, `snapshots`, `peak_floor`).
`descent` improves the plans found; what it tries is simulated and needs no proof.
"""

from __future__ import annotations

from functools import cached_property
from math import inf
from time import monotonic

import numpy as np

from splitkit.search.recompute.descent import Descent
from splitkit.search.recompute.memory_limits import MemoryFloors, MomentLimits, saved_storages
from splitkit.search.recompute.network import CutNetwork, cheapest
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.search.recompute.peak_floor import Bounds
from splitkit.search.recompute.plan_pool import Pool, Seen
from splitkit.search.recompute.snapshots import Snapshots
from splitkit.solvers.recompute import GAP, Limit, Program, RecomputeProblem, RecomputeSolution, Snapshot
from splitkit.training.choices import Bools, Savings

_WINDOW = 1200  # ops that a program for saved bytes decides; about 24 layers of a transformer
_ROUNDS = 12  # programs with limits of one budget
_HALVINGS = 10  # of the range in which the lowest peak lies
_GAP = 1e-3  # of programs whose limits are estimates
_CLOSE = 0.005  # of the lowest peak, as far as it is looked for
_NODES = 1  # of the tree of the last program: a count, not seconds, so that every rank finds the same plan
_COLUMNS = 1000  # of the largest program with snapshots that is solved in whole numbers
_CUTS = 12  # prices at which candidates are cut


class RecomputeSearch:
    """Searches for plans of one joint graph; every plan that it meets goes into the pool.

    Counts end every search: of programs, nodes of their trees, and tries. Seconds end it only where they are given.

    Attributes:
        pool: the plans seen.
        until: a deadline, by ``time.monotonic``.
    """

    def __init__(self, pool: Pool, seconds: float = inf) -> None:
        self.pool, self.savings = pool, pool.savings
        self.until, self._share = monotonic() + seconds, seconds / 3
        self._problem = recompute_problem(self.savings)
        self._program = Program(self._problem)

    def anew(self) -> RecomputeSearch:
        """Return a search with the same deadline that knows nothing of what this one saw."""
        other = RecomputeSearch(self.pool.fresh())
        other.until, other._share = self.until, self._share
        return other

    @property
    def ending(self) -> str:
        """Return what a note says of a search that the clock ended."""
        return "; cut short by time_limit: another machine may find another plan" if monotonic() > self.until else ""

    @cached_property
    def _moments(self) -> MomentLimits:
        return MomentLimits(self.savings, self.pool.peaks)

    @cached_property
    def _descent(self) -> Descent:
        return Descent(self.pool, self.until)

    @cached_property
    def _floors(self) -> MemoryFloors:
        return MemoryFloors(self._moments)

    @cached_property
    def _snapshots(self) -> Snapshots:
        return Snapshots(self._moments, self._floors)

    def saved(self, budget: int) -> float:
        """Look for plans that save at most ``budget`` bytes; return a lower bound on their seconds."""
        problem = self.savings
        limit = Limit(np.zeros(len(problem.ops), np.int64), problem.nbytes, budget)
        found = self._program.beside([limit], self._left(), _WINDOW, GAP)
        if found.runs is not None:
            self.pool.see(found.runs)
        bound = found.bound
        if found.gap > 2 * GAP:  # without a limit of time, only a large graph's
            hull = Hull.of(problem)
            near, bound = hull.within(budget), max(bound, hull.bound(budget))
            if near is not None:
                self.pool.see(near.runs)
        return bound

    def _cut(self, budget: int) -> float:
        """Try the cheapest plans at a few prices of a second; by weak duality each is a bound for the budget."""
        problem, bound = self.savings, 0.0
        total = float(problem.seconds[~problem.fixed].sum())
        if not total:
            return bound
        cutting = CutNetwork.of(problem, problem.nbytes.astype(np.float64), problem.fixed)
        for price in np.geomspace(1e-2, 1e3, _CUTS) * (float(problem.nbytes.sum()) / total):
            choice = cheapest(cutting, float(price), problem.why)
            self.pool.see(choice.runs)
            spent = float(problem.price[choice.runs].sum())
            bound = max(bound, spent + (choice.nbytes - budget) / float(price))
        return bound

    def fewest_saved(self) -> Seen:
        """Return the plan that saves the fewest bytes."""
        problem = self.savings
        cutting = CutNetwork.of(problem, problem.nbytes.astype(np.float64), problem.fixed)
        return self.pool.see(cheapest(cutting, 0.0, problem.why).runs)

    def peak(self, budget: int) -> float:
        """Look for plans whose peak is at most ``budget`` bytes; return a lower bound on the seconds of all of them.

        It is infinite if no plan in graph order fits.
        """
        floors, bound = self._above_floors(budget)
        if bound < np.inf:
            bound = self._closer(budget, floors, bound)
        if bound < np.inf and not self._is_proven(budget, bound):
            if not self._below(budget, floors):
                self._cut(budget)
            if not self._is_proven(budget, bound):
                self._descent.under(budget)
                self._descent.cheaper(budget)
        return bound

    def bound(self, budget: int) -> float:
        """Return a lower bound on the seconds of plans in graph order whose peak is within the budget."""
        floors, bound = self._above_floors(budget)
        return self._closer(budget, floors, bound) if bound < np.inf else bound

    def low_peak(self) -> Seen:
        """Return a plan with a low peak, found with no more effort than a search for a budget."""
        self._descent.sow(effort=1)
        self._descent.lower(others=True, effort=1)
        return self.pool.lowest()

    def lowest_peak(self) -> Seen:
        """Return the plan with the lowest peak found.

        The search saves single groups of ops, bisects the range in which the peak lies, and descends from the best.
        """
        self._descent.sow()
        self._descent.lower(others=True)
        low = int(self._floors.least.max(initial=0))
        for _ in range(_HALVINGS):
            best = self.pool.lowest()
            if best.peak - low <= _CLOSE * best.peak or monotonic() > self.until:
                break
            budget = (low + best.peak) // 2
            floors, bound = self._above_floors(budget)
            if bound < np.inf:
                self._below(budget, floors)
            low = budget if self.pool.lowest().peak > budget else low
        for others in (True, False):
            if monotonic() < self.until:
                self._descent.lower(others=others)
        return self.pool.lowest()

    def cheapest_at(self, low: Seen) -> Seen:
        """Return the quickest plan found with that peak."""
        self._descent.cheaper(low.peak)
        return self.pool.best(lambda seen: seen.peak <= low.peak) or low

    def least_peak(self) -> int:
        """Return a lower bound on the peak of every plan, in whatever order its halves compute."""
        return Bounds(self._moments).peak(self.pool.trace(self.pool.lowest().runs)[1])

    def _above_floors(self, budget: int) -> tuple[list[Limit], float]:
        """Return the limits that matter to every plan within a budget, and the bound that follows."""
        limits: list[Limit] = []
        while True:
            saved, bound = self._program.relaxed(limits, self._left())
            broken = [] if bound == np.inf else list(self._floors.over(saved, budget))
            limits += broken
            if not broken or not self._left():
                return limits, bound

    def _closer(self, budget: int, floors: list[Limit], bound: float) -> float:
        """Add snapshots at the moments where plans exceed the budget, until a plan is within it; return a lower bound
        on the seconds of every plan.
        """
        limits, program, whole = list(floors), self._program, False
        snapshots: dict[int, Snapshot] = {}
        for _ in range(_ROUNDS):
            found = (program.search if whole else program.near)(limits, self._left(), _GAP)
            bound = max(bound, found.bound)
            if bound == np.inf:
                break
            runs = self._rounded(program, limits) if found.runs is None else found.runs
            seen, trace = self.pool.trace(runs)
            broken = list(self._floors.over(saved_storages(seen.choice).astype(np.float64), budget))
            fresh = list(self._snapshots.over(trace, budget, snapshots))
            settled = seen.peak <= budget or not (broken or fresh)
            if self._is_proven(budget, bound) or not self._left() or (settled and (whole or program.width > _COLUMNS)):
                break
            whole = whole or settled
            limits += broken
            snapshots |= {moment: self._snapshots.at(moment, budget) for moment in fresh}
            program = Program(self._problem, list(snapshots.values())) if fresh else program
        return bound

    def _rounded(self, program: Program, limits: list[Limit]) -> Bools:
        """Return the choice that recomputes what the relaxation recomputes rather than saves."""
        saved = program.relaxed(limits, self._left())[0] > 0.5
        runs = np.ones(len(self.savings.ops), np.bool_)
        runs[self.savings.maker[saved[self.savings.storage]]] = False
        return runs

    def _is_proven(self, budget: int, bound: float) -> bool:
        """Return whether the best plan seen spends no more than the bound, to the accuracy of the programs."""
        best = self.pool.best(lambda seen: seen.peak <= budget)
        return best is not None and best.seconds <= bound * (1 + 2 * GAP)

    def _below(self, budget: int, floors: list[Limit]) -> bool:
        """Add limits until a plan is within the budget; return whether it is found and proven cheapest."""
        limits = list(floors)
        found = self._solve(limits)
        for _ in range(_ROUNDS):
            if found.runs is None:
                break
            seen, trace = self.pool.trace(found.runs)
            best = self.pool.best(lambda seen: seen.peak <= budget)
            if seen.peak <= budget or (best is not None and best.seconds <= found.bound):
                self._refine(limits)
                return True
            broken = list(self._moments.limits(seen.choice, trace, budget))
            found = self._solve([*limits, *broken])
            if found.runs is None:  # what holds for one plan does not hold for another: begin anew from here
                limits = list(floors)
                found = self._solve([*limits, *broken])
            limits += broken
        return False

    def _refine(self, limits: list[Limit]) -> None:
        """Look a little longer for a better plan within the limits of one found near a relaxation."""
        found = self._program.search(limits, self._left(), _GAP, _NODES)
        if found.runs is not None:
            self.pool.see(found.runs)

    def _left(self) -> float:
        """Return the seconds that the next program may take."""
        return max(0.0, min(self._share, self.until - monotonic()))

    def _solve(self, limits: list[Limit]) -> RecomputeSolution:
        found = self._program.near(limits, self._left(), _GAP)
        return self._program.search(limits, self._left(), _GAP) if found.runs is None and found.bound < inf else found


def recompute_problem(savings: Savings) -> RecomputeProblem:
    """Return the choices as the solver has them."""
    # what is not computed again is saved, views and tuples too
    savable = savings.savable | savings.fixed[savings.maker]
    return RecomputeProblem(
        savings.price, savings.maker, savings.storage, savable, savings.needed, savings.nbytes, savings.reads
    )
