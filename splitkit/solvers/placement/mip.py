"""The rows of a mixed-integer program, gathered block by block, and HiGHS to solve it."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.problem import GRACE, Bools, Floats, Ints

_NODES = 125_000  # of a search tree in a second, times the columns: what a slow machine manages
_ROOT = 10  # nodes that the first of a tree counts for
FAR = 2.0
"""Times as long may a program take as its nodes are counted for, by default."""
_NEARLY = 0.1  # of its time may be left to a thread that counts as having had it
_BUSIEST = 30  # times as slow as alone may a machine be
_LIMIT = "Solution limit reached"  # of HiGHS: at the node limit
_OUT_OF_TIME, _STOPPED = 1, 4  # of scipy: at the time limit; at the node limit, or by an error in a reduction


class Rows:
    """``low <= matrix @ x <= high``, over columns that are numbered block by block.

    Attributes:
        columns: how many there are.
        spent: seconds that HiGHS had, as its nodes count.
    """

    def __init__(self) -> None:
        self.columns = 0
        self.spent = 0.0
        self._count = 0
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self._low: list[Floats] = []
        self._high: list[Floats] = []

    def block(self, *shape: int) -> Ints:
        """The numbers of new columns."""
        size = int(np.prod(shape))
        self.columns += size
        return np.arange(self.columns - size, self.columns).reshape(shape)

    def add(self, terms: list[tuple[Ints, float]], low: float = -np.inf, high: float = np.inf) -> None:
        """One row for each element: the sum of columns times a factor each, all of one shape."""
        self.add_scaled([(columns, np.full(columns.shape, factor)) for columns, factor in terms], low, high)

    def add_scaled(self, terms: list[tuple[Ints, Floats]], low: float = -np.inf, high: float = np.inf) -> None:
        """One row for each element: the sum of columns times factors of the same shape."""
        count = terms[0][0].size
        rows = np.arange(self._count, self._count + count)
        for columns, factors in terms:
            self._entries.append((rows, columns.ravel(), factors.ravel()))
        self._bound(count, low, high)

    def add_sum(self, columns: Ints, factors: Floats, low: float = -np.inf, high: float = np.inf) -> None:
        """One row: the sum of all columns times their factors."""
        rows = np.full(columns.size, self._count)
        self._entries.append((rows, columns.ravel(), np.broadcast_to(factors, columns.shape).ravel().astype(float)))
        self._bound(1, low, high)

    def solve(
        self,
        price: Floats,
        whole: Bools,
        low: Floats,
        high: Floats,
        seconds: float,
        clock: Clock,
        *,
        any_will_do: bool = False,
        once: bool = False,
        far: float = FAR,
        nodes: int | None = None,
    ) -> OptimizeResult:
        """Minimise ``price @ x`` with the ``whole`` columns whole: presolved first, then as it stands.

        Nodes of the search trees are counted, so that it comes out the same on a machine that is slow or busy. Should
        time end it all the same, ``clock`` is told, and what was found by then is no result (its bound is), unless
        ``any_will_do``. With ``once`` it is not solved as it stands where nodes ended it, only where presolve failed.
        Time ends it after ``far`` times the ``seconds`` that are counted. A tree has no more than so many ``nodes``; by
        default those that the seconds are enough for where a relaxation leaves little to settle.
        """
        own = Clock(far * seconds + GRACE, clock)
        if nodes is None:
            nodes = max(1, int(seconds * _NODES / self.columns))
        best = self._solve(price, whole, low, high, own, nodes, presolve=True)
        results = [best]
        ended = once and ((best.mip_node_count or 0) >= nodes or _LIMIT in best.message)  # no count without a solution
        if best.status == _STOPPED and own.left > 0 and not ended:
            results.append(self._solve(price, whole, low, high, own, nodes, presolve=False))
        late = [result for result in results if result.status == _OUT_OF_TIME]
        clock.cut |= bool(late)
        for result in late if not any_will_do else ():
            result.x = None
        return _better(*results) if results[1:] else best

    def _solve(
        self, price: Floats, whole: Bools, low: Floats, high: Floats, clock: Clock, nodes: int, *, presolve: bool
    ) -> OptimizeResult:
        """One run of HiGHS, which works in this thread but knows the clock on the wall alone: where that ends it before
        the thread has had its time, others had the processor, and it is run again, for twice as long. What the thread
        did until then does not count, neither for the clock nor for ``spent``, as on a quiet machine it is not done.
        """
        rows, columns, factors = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = coo_array((factors, (rows, columns)), shape=(self._count, self.columns)).tocsr()
        due = wall = max(clock.left, 0.1)
        while True:
            run = Clock(due)
            result = milp(
                price,
                integrality=whole.astype(np.int64),
                bounds=Bounds(low, high),
                constraints=LinearConstraint(matrix, np.concatenate(self._low), np.concatenate(self._high)),
                options={"time_limit": wall, "node_limit": nodes, "mip_rel_gap": 1e-6, "presolve": presolve},
            )
            if result.status != _OUT_OF_TIME or run.left < _NEARLY * due or wall > _BUSIEST * due:
                self.spent += (_ROOT + (result.mip_node_count or 0)) * self.columns / _NODES
                return result
            clock.forgive(due - run.left)
            wall *= 2

    def _bound(self, count: int, low: float, high: float) -> None:
        self._low.append(np.full(count, low))
        self._high.append(np.full(count, high))
        self._count += count


def _better(one: OptimizeResult, other: OptimizeResult) -> OptimizeResult:
    """The result that is final, or else the one that found the lesser value, with the greater bound of both."""
    if other.status not in (_STOPPED, _OUT_OF_TIME):
        return other
    best = min((one, other), key=lambda result: np.inf if result.x is None else result.fun)
    known = [result.mip_dual_bound for result in (one, other) if result.mip_dual_bound is not None]
    best.mip_dual_bound = max(known, default=None)
    return best
