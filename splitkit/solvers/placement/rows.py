"""The rows of a mixed-integer program, gathered block by block, and HiGHS to solve it."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from splitkit.solvers.placement.problem import Bools, Floats, Ints


class Rows:
    """``low <= matrix @ x <= high``, over columns that are numbered block by block."""

    def __init__(self) -> None:
        self.columns = 0
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

    def solve(self, price: Floats, whole: Bools, low: Floats, high: Floats, seconds: float) -> OptimizeResult:
        """Minimise ``price @ x`` with the ``whole`` columns whole."""
        rows, columns, factors = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = coo_array((factors, (rows, columns)), shape=(self._count, self.columns)).tocsr()
        limits = LinearConstraint(matrix, np.concatenate(self._low), np.concatenate(self._high))
        for presolve in (True, False):
            result = milp(
                price,
                integrality=whole.astype(np.int64),
                bounds=Bounds(low, high),
                constraints=limits,
                options={"time_limit": max(seconds, 0.1), "mip_rel_gap": 1e-6, "presolve": presolve},
            )
            if result.status != 4:  # an error in the solver, after a reduction that went wrong
                break
        return result

    def _bound(self, count: int, low: float, high: float) -> None:
        self._low.append(np.full(count, low))
        self._high.append(np.full(count, high))
        self._count += count
