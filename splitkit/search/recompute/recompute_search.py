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

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice

import numpy as np
from scipy.sparse import coo_array, csr_array

from splitkit.search.recompute.memory_limits import MemoryFloors, MomentLimits, furthest, saved_storages
from splitkit.search.recompute.pareto_cuts import CutNetwork, Hull, cheapest
from splitkit.search.recompute.plan_pool import Descent, Pool, Seen
from splitkit.solvers.min_cut import INFINITE, Network, min_cut
from splitkit.solvers.recompute import GAP, Limit, Program, RecomputeProblem, RecomputeSolution, Snapshot
from splitkit.training.choices import Bools, Ints, Savings, required_by_forward
from splitkit.training.flow import STATIC, output_nodes
from splitkit.training.peaks import PeakTrace

# A lower bound on the peak of every plan: bytes alive at one node, whatever is saved and in whatever order.


_PEAK_FLOOR_CUTS = 64  # nodes that are looked at


class Bounds:
    """Lower bounds of the peak of every plan of one joint graph, and of every order of its halves.

    While a node runs, what the caller holds is there, what the node reads and makes, and what it takes meanwhile;
    besides, storages from which all can be computed that comes after: at least those of a minimum cut::

        source --inf or 0--> op --nbytes--> storage --inf--> sink     a gradient that backward returns
                             op --inf--> sink                         what waits for the node comes after it
                             op <--inf--- storage                     read by the op

    An op on the sink's side runs after the node. What the node waits for ran before, and of it only what may be
    computed again may run after it too. All else may come after, even any number of times. Views are their storage.

    Attributes:
        moments: who makes and reads what.
    """

    def __init__(self, moments: MomentLimits) -> None:
        peaks, savings = moments.peaks, moments.savings
        flow, self._peaks, self._own = savings.flow, peaks, moments.own
        computed, required = {flow.index[n] for n in peaks.computed}, required_by_forward(flow)
        self._required = {i for i in computed if flow.producer(peaks.nodes[i]) in required} - moments.own
        again = {flow.index[n] for n, fixed in zip(savings.ops, savings.fixed, strict=True) if not fixed}
        self._again = {i for i in computed if flow.index[flow.producer(peaks.nodes[i])] in again}
        self._once = computed - moments.own - self._again
        self._touched, self._made = ([self._roots(s) for s in slots] for slots in (peaks.touched, peaks.storages.made))
        self._reads = [[flow.index[r] for r in node.all_input_nodes] for node in peaks.nodes]
        self._users: list[list[int]] = [[] for _ in peaks.nodes]
        for i, reads in enumerate(self._reads):
            for read in reads:
                self._users[read].append(i)
        self._outputs, self._gradients = (
            {s for value in output_nodes(values) for s in self._made[flow.index[value]]}
            for values in (flow.outputs, flow.gradients)
        )

    def peak(self, trace: PeakTrace) -> int:
        """Return a lower bound on the peak of every plan.

        Args:
            trace: the run of a plan, preferably one with a low peak: nodes with the most bytes alive are asked first.
        """
        found = self._bytes_with(self._outputs | self._gradients)  # when backward ends
        asked = 0
        for step in np.argsort(-trace.timeline, kind="stable").tolist():
            node = int(trace.steps[step])
            if trace.timeline[step] <= found or asked == _PEAK_FLOOR_CUTS:
                break
            if node in self._own or (step < trace.forward and node in self._required):
                found, asked = max(found, self.at(node)), asked + 1
        return found

    def at(self, node: int) -> int:
        """Return a lower bound on the bytes alive while a node runs that only backward can run, or that forward needs.

        Args:
            node: by position in the joint graph.
        """
        late = node in self._own
        half = self._own if late else self._required
        before = _reached(node, self._reads.__getitem__, half)
        after = _reached(node, self._users.__getitem__, half)
        there = self._touched[node] | self._made[node]
        if late:
            there |= self._outputs
            more = self._cut(before | self._once, after - {node}, there)
        else:
            made = {s for i in before for s in self._made[i] if int(self._peaks.storages.maker[s]) in before}
            there |= made & (self._outputs | {s for i in after for s in self._touched[i]})
            more = self._cut(before - self._again, set(), there)
        return self._bytes_with(there) + int(self._peaks.transient[node]) + more

    def _cut(self, before: set[int], after: set[int], there: set[int]) -> int:
        """Return the fewest bytes, besides the storages ``there``, that are alive between ``before`` and ``after``."""
        peaks = self._peaks
        place = len(peaks.nodes) + 2
        roots = [s for s, source in enumerate(peaks.storages.source) if source == s]
        edges = [(0, 2 + i, INFINITE) for i in before]
        edges += [(2 + i, 1, INFINITE) for i in after]
        edges += [(2 + int(peaks.storages.maker[s]), place + s, 0 if s in there else peaks.nbytes[s]) for s in roots]
        edges += [(place + s, 2 + i, INFINITE) for i, slots in enumerate(self._touched) for s in slots]
        edges += [(place + s, 1, INFINITE) for s in self._gradients]
        tails, heads, capacities = np.array(edges, np.int64).T
        return min_cut(Network(place + len(peaks.storages.source), tails, heads, capacities)).value

    def _bytes_with(self, storages: Iterable[int]) -> int:
        """Return the bytes of the inputs and of these storages."""
        return self._peaks.baseline(()) + sum(self._peaks.nbytes[s] for s in storages)

    def _roots(self, slots: Iterable[int]) -> set[int]:
        """Return the storages in which slots lie, as their makers yield them, without the caller's."""
        return {self._peaks.storages.root[s] for s in slots} - {STATIC}


def _reached(start: int, leads_to: Callable[[int], Iterable[int]], inside: set[int]) -> set[int]:
    """Return the nodes reachable from ``start`` inside a set, including ``start``."""
    found, stack = {start}, [start]
    while stack:
        new = {i for i in leads_to(stack.pop()) if i in inside} - found
        found |= new
        stack += new
    return found


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

    Counts end every search: of programs, nodes of their trees, and tries.

    Attributes:
        pool: the plans seen.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool, self.savings = pool, pool.savings
        self._problem = recompute_problem(self.savings)
        self._program = Program(self._problem)

    def anew(self) -> RecomputeSearch:
        """Return a search that knows nothing of what this one saw."""
        return RecomputeSearch(self.pool.fresh())

    @cached_property
    def _moments(self) -> MomentLimits:
        return MomentLimits(self.savings, self.pool.peaks)

    @cached_property
    def _descent(self) -> Descent:
        return Descent(self.pool)

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
        found = self._program.beside([limit], _WINDOW, GAP)
        if found.runs is not None:
            self.pool.see(found.runs)
        bound = found.bound
        if found.gap > 2 * GAP:  # only a large graph's
            hull = Hull(problem)
            near, bound = hull.within(budget), max(bound, hull.bound(budget))
            if near is not None:
                self.pool.see(near.runs)
        return bound

    def _cut(self) -> None:
        """Try the cheapest plans at a few prices of a second."""
        problem = self.savings
        if not (total := float(problem.seconds[~problem.fixed].sum())):
            return
        cutting = CutNetwork.of(problem, problem.nbytes.astype(np.float64), problem.fixed)
        for price in np.geomspace(1e-2, 1e3, _CUTS) * (float(problem.nbytes.sum()) / total):
            self.pool.see(cheapest(cutting, float(price), problem.why).runs)

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
                self._cut()
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
            if best.peak - low <= _CLOSE * best.peak:
                break
            budget = (low + best.peak) // 2
            floors, bound = self._above_floors(budget)
            if bound < np.inf:
                self._below(budget, floors)
            low = budget if self.pool.lowest().peak > budget else low
        for others in (True, False):
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
            saved, bound = self._program.relaxed(limits)
            broken = [] if bound == np.inf else list(self._floors.over(saved, budget))
            limits += broken
            if not broken:
                return limits, bound

    def _closer(self, budget: int, floors: list[Limit], bound: float) -> float:
        """Add snapshots at the moments where plans exceed the budget, until a plan is within it; return a lower bound
        on the seconds of every plan.
        """
        limits, program, whole = list(floors), self._program, False
        snapshots: dict[int, Snapshot] = {}
        for _ in range(_ROUNDS):
            found = program.search(limits, _GAP) if whole else program.beside(limits, 0, _GAP)
            bound = max(bound, found.bound)
            if bound == np.inf:
                break
            runs = self._rounded(program, limits) if found.runs is None else found.runs
            seen, trace = self.pool.trace(runs)
            broken = list(self._floors.over(saved_storages(seen.choice).astype(np.float64), budget))
            fresh = list(self._snapshots.over(trace, budget, snapshots))
            settled = seen.peak <= budget or not (broken or fresh)
            if self._is_proven(budget, bound) or (settled and (whole or program.width > _COLUMNS)):
                break
            whole = whole or settled
            limits += broken
            snapshots |= {moment: self._snapshots.at(moment, budget) for moment in fresh}
            program = Program(self._problem, list(snapshots.values())) if fresh else program
        return bound

    def _rounded(self, program: Program, limits: list[Limit]) -> Bools:
        """Return the choice that recomputes what the relaxation recomputes rather than saves."""
        saved = program.relaxed(limits)[0] > 0.5
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
        found = self._program.search(limits, _GAP, _NODES)
        if found.runs is not None:
            self.pool.see(found.runs)

    def _solve(self, limits: list[Limit]) -> RecomputeSolution:
        found = self._program.beside(limits, 0, _GAP)
        return self._program.search(limits, _GAP) if found.runs is None and found.bound < np.inf else found


def recompute_problem(savings: Savings) -> RecomputeProblem:
    """Return the choices as the solver has them."""
    # what is not computed again is saved, views and tuples too
    savable = savings.savable | savings.fixed[savings.maker]
    return RecomputeProblem(
        savings.price, savings.maker, savings.storage, savable, savings.needed, savings.nbytes, savings.reads
    )


# What backward holds at one moment, as rows of the recompute program that hold for every plan.
#
# `MemoryFloors` charges what is saved until backward's own nodes read it. Two things escape it: a value that is
# recomputed early waits for its readers, and a value that is saved only to compute others from it stays until they are
# computed. A snapshot charges both. For one node that only backward can run, it adds three kinds of variables::
#
#     there[k]     storage k is in memory while the node runs
#     ago[o]       op o has run again by then
#     yet[o]       op o runs again later
#
#     ago[o] + yet[o]  <=  runs[o]                       an op runs again once
#     1                <=  there[k] + yet[maker(k)]      a later node of backward's own reads k
#     yet[o]           <=  there[k] + yet[maker(k)]      op o reads k
#     1                <=  saved[k] + ago[maker(k)]      this node, or an earlier one of backward's own, reads k
#     ago[o]           <=  saved[k] + ago[maker(k)]      op o reads k
#     there[k]         <=  saved[k] + ago[maker(k)]      it has to come from somewhere
#     saved[k]         <=  there[k]                      a later node of backward's own reads k
#     nbytes @ there   <=  budget - least                `MemoryFloors.least`: bytes that are there in every plan
#
# This is Checkmate's time index (Jain et al., MLSys 2020) at a few moments only, where plans exceed the budget. Every
# plan whose own nodes run in graph order and that recomputes nothing twice satisfies these rows.


_AT_ONCE = 4  # snapshots that one run suggests
_APART = 60  # of as many parts of the run, each suggests one at most


class Snapshots:
    """Builds the snapshots of one joint graph.

    Attributes:
        floors: the bytes that are there in every plan at each moment.
        maker: storage -> the op that makes it.
        reads: op -> the storages that it reads, including those of its views.
        own: storage -> the moments at which backward's own nodes read it.
    """

    def __init__(self, moments: MomentLimits, floors: MemoryFloors) -> None:
        savings = moments.savings
        self.floors, self.savings = floors, savings
        self._moment = {node: floors.early + i for i, node in enumerate(floors.own)}
        self.maker = moments.base.copy()
        storage = savings.storage.tolist()
        for k, op in zip(storage, savings.maker.tolist(), strict=True):
            if self.maker[k] == STATIC:
                self.maker[k] = op
        self.reads = [tuple(dict.fromkeys(storage[v] for v in values)) for values in savings.read_by]
        self._savable = np.zeros(len(savings.nbytes), np.bool_)
        self._savable[savings.storage[savings.savable | savings.fixed[savings.maker]]] = True

    def over(self, trace: PeakTrace, budget: int, known: Collection[int]) -> Iterator[int]:
        """Return the moments, except ``known``, at which a run is furthest over the budget: a few, far apart.

        Recompute between two of backward's own nodes counts as a moment of the later one.
        """
        moment = self.moment_of_steps(trace)
        over = np.where(moment == STATIC, 0, trace.timeline - budget)
        found = dict.fromkeys(int(moment[step]) for step in furthest(over, _APART))
        yield from islice((one for one in found if one not in known), _AT_ONCE)

    def moment_of_steps(self, trace: PeakTrace) -> Ints:
        """Return (s,) the moment of each step of a run; `STATIC` in forward, and after backward's own nodes."""
        found = np.full(len(trace.steps), STATIC, np.int64)
        moment = STATIC
        for step in range(len(trace.steps) - 1, trace.forward - 1, -1):
            moment = self._moment.get(int(trace.steps[step]), moment)
            found[step] = moment
        return found

    def at(self, moment: int, budget: int) -> Snapshot:
        """Return the rows of one moment of `MemoryFloors`."""
        return _Rows(self, moment).snapshot(budget)


class _Rows:
    """The rows of one snapshot; its columns are those of the program, followed by its own."""

    def __init__(self, made: Snapshots, moment: int) -> None:
        self.made, self.moment, savings = made, moment, made.savings
        self.ops, self.before = len(savings.ops), len(savings.ops) + len(savings.nbytes)
        floors = made.floors
        self.pinned = (floors.first <= moment) & (moment <= floors.final)
        self.there: dict[int, int] = {}
        self.ago: dict[int, int] = {}
        self.yet: dict[int, int] = {}
        self.count = 0
        self.least: list[float] = []
        self.entries: list[tuple[int, int, float]] = []

    def snapshot(self, budget: int) -> Snapshot:
        """Return all rows, the one of the bytes last."""
        floors, savings = self.made.floors, self.made.savings
        later = np.flatnonzero((floors.final > self.moment) & ~self.pinned)
        earlier = np.flatnonzero(floors.first <= self.moment)
        self._after(later.tolist())
        for k in later.tolist():
            self._row({self.there[k]: 1.0, self.ops + k: -1.0}, 0.0)
        self._before(earlier.tolist())
        for op in dict.fromkeys((*self.ago, *self.yet)):
            self._row({op: 1.0} | {own[op]: -1.0 for own in (self.ago, self.yet) if op in own}, 0.0)
        nbytes = {x: float(savings.nbytes[k]) for k, x in self.there.items() if floors.handed[k]}
        unit = max(nbytes.values(), default=1.0) or 1.0
        self._row({x: -n / unit for x, n in nbytes.items()}, (int(floors.least[self.moment]) - budget) / unit)
        rows, columns, values = zip(*self.entries, strict=True) if self.entries else ((), (), ())
        shape = (len(self.least), self.before + self.count)
        return Snapshot(csr_array(coo_array((values, (rows, columns)), shape=shape)), np.array(self.least), self.count)

    def _after(self, wanted: list[int]) -> None:
        """Add the rows for what is made later from what is there."""
        needs: dict[int, float] = dict.fromkeys(wanted, 1.0)
        for k in wanted:
            self._row({self._column(self.there, k): 1.0} | self._by(self.yet, k), needs[k])
        for op in _growing(self.yet):
            for k in self.made.reads[op]:
                if not self.pinned[k]:
                    there = {self._column(self.there, k): 1.0}
                    self._row(there | self._by(self.yet, k) | {self.yet[op]: -1.0}, 0.0)

    def _before(self, wanted: list[int]) -> None:
        """Add the rows for what has been read or is there: it was saved, or recomputed from such values."""
        for k in wanted:
            self._row(self._origin(k), 1.0)
        for k, there in list(self.there.items()):
            self._row(self._origin(k) | {there: -1.0}, 0.0)
        for op in _growing(self.ago):
            for k in self.made.reads[op]:
                self._row(self._origin(k) | {self.ago[op]: -1.0}, 0.0)

    def _origin(self, k: int) -> dict[int, float]:
        saved = {self.ops + k: 1.0} if self.made._savable[k] else {}
        return saved | self._by(self.ago, k)

    def _by(self, when: dict[int, int], k: int) -> dict[int, float]:
        """Return the op that makes a storage, if it may run again."""
        op = int(self.made.maker[k])
        return {} if self.made.savings.fixed[op] else {self._column(when, op): 1.0}

    def _column(self, columns: dict[int, int], key: int) -> int:
        if key not in columns:
            columns[key] = self.before + self.count
            self.count += 1
        return columns[key]

    def _row(self, entries: Mapping[int, float], least: float) -> None:
        self.entries += [(len(self.least), column, value) for column, value in entries.items()]
        self.least.append(least)


def _growing(columns: Mapping[int, int]) -> Iterator[int]:
    """Yield the keys, including those added meanwhile."""
    done = 0
    while done < len(columns):
        keys = list(columns)[done:]
        done += len(keys)
        yield from keys
