"""A builder for mixed-integer programs, block by block, solved by HiGHS."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.problem import GRACE, Bools, Floats, Ints

_NODES = 125_000  # nodes of a search tree times columns in a second, on a slow machine
FAR = 2.0
"""By default the clock ends a program after this many times the seconds that its nodes count for."""
_NEARLY = 0.1  # share of its time that a thread may have left and still count as having had it
_BUSIEST = 30  # how many times slower than alone a program may run
_LIMIT = "Solution limit reached"  # the message of HiGHS at the node limit
_OUT_OF_TIME, _STOPPED = 1, 4  # statuses of scipy: at the time limit; at the node limit, or after an error in presolve


class Rows:
    """The constraints ``low <= matrix @ x <= high``, over columns that are numbered block by block.

    Attributes:
        columns: the number of columns.
    """

    def __init__(self) -> None:
        self.columns = 0
        self._count = 0
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self._low: list[Floats] = []
        self._high: list[Floats] = []

    def block(self, *shape: int) -> Ints:
        """Return the numbers of new columns."""
        size = int(np.prod(shape))
        self.columns += size
        return np.arange(self.columns - size, self.columns).reshape(shape)

    def add(self, terms: list[tuple[Ints, float]], low: float = -np.inf, high: float = np.inf) -> None:
        """Add one row for each element: a sum of columns times one factor each, all of the same shape."""
        count = terms[0][0].size
        rows = np.arange(self._count, self._count + count)
        for columns, factor in terms:
            self._entries.append((rows, columns.ravel(), np.full(count, factor)))
        self._bound(count, low, high)

    def add_sum(self, columns: Ints, factors: Floats, low: float = -np.inf, high: float = np.inf) -> None:
        """Add one row: the sum of all columns times their factors."""
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

        The nodes of the search trees are counted, so the result is the same on a slow or busy machine. If the clock
        ends the search nevertheless, ``clock`` records it, and the solution found by then is dropped (but not its
        bound), unless ``any_will_do``. With ``once``, the program is solved again without presolve only if presolve
        failed, not if the nodes ran out. The clock ends it after ``far`` times the counted ``seconds``. A tree has at
        most ``nodes`` nodes; by default, as many as the seconds are enough for where a relaxation leaves little to
        settle.
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
        clock.timed_out |= bool(late)
        for result in late if not any_will_do else ():
            result.x = None
        return _better(*results) if results[1:] else best

    def _solve(
        self, price: Floats, whole: Bools, low: Floats, high: Floats, clock: Clock, nodes: int, *, presolve: bool
    ) -> OptimizeResult:
        """One run of HiGHS, which works in this thread but knows the clock on the wall alone: where that ends it before
        the thread has had its time, others had the processor, and it is run again, for twice as long. What the thread
        did until then does not count for the clock, as on a quiet machine it is not done.
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
                return result
            clock.forgive(due - run.left)
            wall *= 2

    def _bound(self, count: int, low: float, high: float) -> None:
        self._low.append(np.full(count, low))
        self._high.append(np.full(count, high))
        self._count += count


def _better(one: OptimizeResult, other: OptimizeResult) -> OptimizeResult:
    """Return the final result of the two, or else the lesser value found with the greater of both bounds."""
    if other.status not in (_STOPPED, _OUT_OF_TIME):
        return other
    best = min((one, other), key=lambda result: np.inf if result.x is None else result.fun)
    known = [result.mip_dual_bound for result in (one, other) if result.mip_dual_bound is not None]
    best.mip_dual_bound = max(known, default=None)
    return best
