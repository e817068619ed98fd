"""The least recompute within memory limits: a mixed-integer program over what is saved and what is recomputed.

One binary for each op (it runs again) and each storage (it is saved), and one row for each edge::

    minimise    sum(price[o] * runs[o])
    subject to  runs[o]  <=  runs[maker(v)] + saved[storage(v)]     for each value v that op o reads
                1        <=  runs[maker(v)] + saved[storage(v)]     for each value v that backward needs
                a @ runs + b @ saved  <=  limit                     for each limit on memory

This is the keep-or-recompute choice of Checkmate (Jain et al., MLSys 2020) without its time index: in one order of
steps, each value is computed again at most once. HiGHS (Huangfu and Hall 2018) solves it, through scipy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array, csr_array

from splitkit.solvers.placement.problem import Bools, Floats, Ints

GAP = 1e-4
"""The relative gap between value and bound at which the search ends."""
NODES = 10
"""The default number of nodes in a search tree of HiGHS; a count makes every run end at the same place."""
_SCALE = 1e6  # the sum of the prices as HiGHS sees it: its absolute tolerances are 1e-6
_WHOLE = 1e-6  # values of a relaxation nearer than this to 0 or 1 are rounded
_TIE = 1e-5  # the weight of saved bytes: among equal recompute times, little is saved


@dataclass(frozen=True, eq=False)
class RecomputeProblem:
    """What may be saved and recomputed, over *ops* (n), *values* (m) and *storages* (k).

    Attributes:
        price: (n,) float; the price of recomputing each op, infinite where that is not allowed.
        maker: (m,) int; value -> op.
        storage: (m,) int; value -> storage.
        savable: (m,) bool; whether a value is available when its storage is saved.
        needed: (m,) bool.
        nbytes: (k,) int.
        reads: (e, 2) int; pairs (op, value that it reads).
    """

    price: Floats
    maker: Ints
    storage: Ints
    savable: Bools
    needed: Bools
    nbytes: Ints
    reads: Ints


@dataclass(frozen=True, eq=False)
class Limit:
    """``runs @ op runs + saved @ storage is saved <= most``: a limit on the bytes alive at one moment.

    Attributes:
        runs: (n,) bytes for each op that runs again.
        saved: (k,) bytes for each storage that is saved.
        most: the limit in bytes.
    """

    runs: Ints
    saved: Ints
    most: int

    def holds(self, runs: Bools, saved: Bools) -> bool:
        """Return whether a choice keeps to the limit, exactly."""
        return int(self.runs[runs].sum() + self.saved[saved].sum()) <= self.most


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Rows with variables of their own between 0 and 1: ``matrix @ (runs, saved, own) >= least``.

    Attributes:
        matrix: (r, n + k + own).
        least: (r,).
        own: the number of variables that it adds.
    """

    matrix: csr_array
    least: Floats
    own: int


@dataclass(frozen=True, eq=False)
class RecomputeSolution:
    """The best choice that the search found.

    Attributes:
        runs: (n,) bool, ``None`` if no choice was found.
        saved: (k,) bool; all false if no choice was found.
        price: the sum of the prices of what runs; infinite if no choice was found.
        bound: a lower bound on the price of every choice within the limits; infinite if there is none.
    """

    runs: Bools | None
    saved: Bools
    price: float
    bound: float

    @property
    def gap(self) -> float:
        """How much the price exceeds the bound, as a fraction of the price; 0 if proven optimal or infeasible."""
        if self.price <= self.bound or not self.price:
            return 0.0
        return 1 - self.bound / self.price if np.isfinite(self.price) else 1.0


class Program:
    """The mixed-integer program of a problem; limits come with each search.

    Columns are ops, storages, and the variables of the ``snapshots``, which may be fractions in every answer.
    """

    def __init__(self, problem: RecomputeProblem, snapshots: Sequence[Snapshot] = ()) -> None:
        self.problem = problem
        self.ops, self.storages = len(problem.price), len(problem.nbytes)
        self._own = sum(snapshot.own for snapshot in snapshots)
        self.width = self.ops + self.storages + self._own
        self._edges, self._least = self._with(snapshots, *self._rows())
        may_run = np.isfinite(problem.price)
        savable = np.zeros(self.storages, np.bool_)
        savable[problem.storage[problem.savable]] = True
        self._most = np.concatenate([may_run, savable, np.ones(self._own)]).astype(np.float64)
        self._any = Bounds(np.zeros(len(self._most)), self._most)
        price = np.where(may_run, problem.price, 0.0)
        self._unit = float(price.sum()) / _SCALE or 1.0
        ties = problem.nbytes * (_TIE * _SCALE / max(1, int(problem.nbytes.sum())))
        self._price = np.concatenate([price / self._unit, ties, np.zeros(self._own)])
        self._ties = float(ties.sum())

    def _rows(self) -> tuple[csr_array, Floats]:
        """Return ``matrix @ x >= least``: one row for each read and each needed value."""
        problem = self.problem
        needed = np.flatnonzero(problem.needed)
        values = np.concatenate([problem.reads[:, 1], needed])
        savable = np.flatnonzero(problem.savable[values])
        rows = np.concatenate([np.arange(len(values)), savable, np.arange(len(problem.reads))])
        columns = np.concatenate(
            [problem.maker[values], self.ops + problem.storage[values[savable]], problem.reads[:, 0]]
        )
        signs = np.ones(len(rows))
        signs[len(values) + len(savable) :] = -1.0
        matrix = coo_array((signs, (rows, columns)), shape=(len(values), self.ops + self.storages))
        return csr_array(matrix), np.repeat([0.0, 1.0], [len(problem.reads), len(needed)])

    def _with(self, snapshots: Sequence[Snapshot], edges: csr_array, least: Floats) -> tuple[csr_array, Floats]:
        """Return the rows with the rows of the snapshots below; each snapshot has columns of its own."""
        shared = self.ops + self.storages
        height, width = 0, shared
        rows, columns, values = list[Ints](), list[Ints](), list[Floats]()
        for part in (edges.tocoo(), *(snapshot.matrix.tocoo() for snapshot in snapshots)):
            rows.append(part.row + height)
            columns.append(np.where(part.col < shared, part.col, part.col + width - shared))
            values.append(part.data)
            height, width = height + part.shape[0], width + part.shape[1] - shared
        entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
        leasts = np.concatenate([least, *(snapshot.least for snapshot in snapshots)])
        return csr_array(coo_array(entries, shape=(height, width))), leasts

    def search(self, limits: Sequence[Limit], gap: float = GAP, nodes: int = NODES) -> RecomputeSolution:
        """Return the cheapest choice within the limits that a limited search tree finds, and the bound.

        The nodes end the search at the same place in every run. HiGHS keeps to limits within a relative 1e-6, so a
        choice that exceeds one is searched again below it.
        """
        return self._whole(limits, gap, self._any, nodes)

    def beside(self, limits: Sequence[Limit], ops: int, gap: float = GAP) -> RecomputeSolution:
        """Return a whole choice near the best fractional one, whose value is the bound, in a time that hardly grows
        with the problem; problems of no more than ``ops`` ops go to `search`. No choice may exist near it.

        Values that are whole in the relaxation are fixed, and the best choice of the few others is searched (relaxation
        enforced neighbourhood search: Berthold 2014). A vertex of the relaxation has about as many fractional values as
        there are limits, because without limits all vertices are whole. ``ops`` ops next to them are open too: with one
        limit, what is left unused without them is less than a layer of a network takes, so a few layers are enough to
        use it up.
        """
        if self.ops <= ops:
            return self.search(limits, gap)
        result = self._solve(limits, np.zeros(len(limits)), gap, self._any, whole=False)
        if result.x is None:
            return RecomputeSolution(None, np.zeros(self.storages, np.bool_), np.inf, self._bound(result))
        free = self._next_to((result.x > _WHOLE) & (result.x < 1 - _WHOLE), ops)
        free[self.ops + self.storages :] = True
        low = np.where(free | (result.x < 0.5), 0.0, self._most)
        high = np.where(free | (result.x > 0.5), self._most, 0.0)
        found = self._whole(limits, gap, Bounds(low, high))
        return replace(found, bound=min(self._bound(result), found.price))

    def _next_to(self, fractions: Bools, count: int) -> Bools:
        """Return the ops nearest to fractional ones by position, with their storages, as marks of ``(ops,
        storages)``.
        """
        problem, some = self.problem, fractions[: self.ops].copy()
        some[problem.maker[fractions[self.ops + problem.storage]]] = True
        at = np.flatnonzero(some) if some.any() else np.array([self.ops - 1])
        right = np.searchsorted(at, np.arange(self.ops))
        sides = (at[np.minimum(right, len(at) - 1)], at[np.maximum(right - 1, 0)])
        far = np.minimum(*(abs(side - np.arange(self.ops)) for side in sides))
        free = np.zeros(len(fractions), np.bool_)
        free[np.argsort(far, kind="stable")[:count]] = True
        free[self.ops + problem.storage[free[problem.maker]]] = True
        return free | fractions

    def _whole(self, limits: Sequence[Limit], gap: float, bounds: Bounds, nodes: int = NODES) -> RecomputeSolution:
        margins = np.zeros(len(limits))
        bound = 0.0
        for attempt in range(3):
            result = self._solve(limits, margins, gap, bounds, nodes=nodes)
            if not attempt:
                bound = self._bound(result)
            if result.x is None:
                break
            runs, saved, _ = np.split(result.x > 0.5, [self.ops, self.ops + self.storages])
            over = np.array([not limit.holds(runs, saved) for limit in limits], np.bool_)
            if not over.any():
                price = float(self.problem.price[runs].sum())
                return RecomputeSolution(runs, saved, price, min(bound, price))
            margins[over] += 1e-5
        return RecomputeSolution(None, np.zeros(self.storages, np.bool_), np.inf, bound)

    def relaxed(self, limits: Sequence[Limit]) -> tuple[Floats, float]:
        """Return how much of each storage the linear relaxation saves, shape (k,), and the bound that it gives.

        The bound is infinite, and nothing saved, if there is no choice within the limits.
        """
        result = self._solve(limits, np.zeros(len(limits)), GAP, self._any, whole=False)
        nothing = np.zeros(self.storages)
        bound = self._bound(result)
        return (nothing if result.x is None else result.x[self.ops : self.ops + self.storages]), bound

    def _solve(
        self,
        limits: Sequence[Limit],
        margins: Floats,
        gap: float,
        bounds: Bounds,
        *,
        whole: bool = True,
        nodes: int | None = None,
    ) -> OptimizeResult:
        if not len(self._price):  # nothing to choose, which HiGHS refuses
            fits = all(limit.most >= 0 for limit in limits)
            nothing = np.zeros(0) if fits else None
            return OptimizeResult(x=nothing, fun=0.0, mip_dual_bound=0.0, status=0 if fits else 2)
        constraints = [LinearConstraint(self._edges, self._least, np.inf)]
        if limits:
            own = np.zeros(self._own)
            dense = np.array([np.concatenate([limit.runs, limit.saved, own]) for limit in limits], np.float64)
            most = np.array([limit.most for limit in limits], np.float64)
            scale = np.maximum(1.0, np.maximum(dense.max(axis=1), 0))
            matrix = csr_array(dense / scale[:, None])
            constraints.append(LinearConstraint(matrix, -np.inf, most / scale * (1 - margins)))
        return milp(
            self._price,
            integrality=np.repeat([int(whole), 0], [self.ops + self.storages, self._own]),
            bounds=bounds,
            constraints=constraints,
            options={"mip_rel_gap": gap, "node_limit": nodes},
        )

    def _bound(self, result: OptimizeResult) -> float:
        """What HiGHS proved, less the weight of the saved bytes."""
        if result.status == 2:  # infeasible
            return float("inf")
        proven = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
        return 0.0 if proven is None else max(0.0, float(proven) - self._ties) * self._unit
