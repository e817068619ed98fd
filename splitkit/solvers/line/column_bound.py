"""A lower bound on the longest path of a pipeline over all ways to cut a line, within limits: column generation.

Each of p stages takes an interval of the line and has times and loads that depend on the interval. A step takes as long
as its longest path through actions; a path is a number of times for each kind of time of each stage. Loads are limited
row by row. The problem, over all cuts y,

    min over y of  max over paths of (path * times of y)     with  loads of y <= limits

is not smaller than its dual for any weights x >= 0 of paths, of sum 1, and any prices l >= 0 of rows (Lagrange):

    min over y of  (sum of x * path) * times of y  +  l * (loads of y - limits)

since a mean of paths is not above the longest one, and the second term is at most 0 within limits. For given weights
the minimum is a sum over stages, which a dynamic program finds exactly. `CutMaster` is the linear program over
mixtures of the intervals (columns) and paths (rows) seen so far; its dual solution proposes weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from splitkit.solvers.placement.problem import Floats

_PENALTY = 10.0
"""What a mixture pays for each load of a limit above the limit, in units of the first path."""
_IDLE = 12  # solutions that a path may not bound; a column twice as many


@dataclass(frozen=True, eq=False)
class StageColumn:
    """An interval of a stage.

    Attributes:
        stage: the number of the stage.
        start: the cut at which it begins.
        end: the cut at which it ends.
        times: (t,) its times.
        loads: (r,) its load in each row.
    """

    stage: int
    start: int
    end: int
    times: Floats
    loads: Floats


@dataclass(frozen=True, eq=False)
class DualWeights:
    """Weights of times and prices of loads.

    Attributes:
        value: the value of the mixture, with the penalty for loads above the limits.
        longest: its longest path among the added paths.
        times: (p, t) a mean of paths.
        loads: (r,) prices, not negative.
        mean: (p, t) the times of the mixture.
    """

    value: float
    longest: float
    times: Floats
    loads: Floats
    mean: Floats

    def towards(self, other: DualWeights, share: float) -> DualWeights:
        """Return weights so far on the way to others: a mean of paths and prices, too."""
        times, loads = (
            (1 - share) * mine + share * its for mine, its in ((self.times, other.times), (self.loads, other.loads))
        )
        return replace(other, times=times, loads=loads)


class CutMaster:
    """The linear program over the columns and paths so far; there must be a column for each stage that fit together.

    What a number of solutions in a row did not use is left out, and can be added again.

    Attributes:
        limits: (r,) the limits of the rows, all positive.
    """

    def __init__(self, limits: Floats) -> None:
        self.limits = limits
        self._columns: dict[bytes, StageColumn] = {}
        self._paths: dict[bytes, Floats] = {}
        self._idle: dict[bytes, int] = {}

    @property
    def has_paths(self) -> bool:
        """Whether a path was added."""
        return bool(self._paths)

    def add_column(self, column: StageColumn) -> bool:
        """Add a column; return whether it is new."""
        key = np.array([column.stage, column.start, column.end, *column.times]).tobytes() + column.loads.tobytes()
        is_new = key not in self._columns
        self._columns[key] = column
        return is_new

    def add_path(self, path: Floats) -> bool:
        """Add a path of shape (p, t); return whether it is new."""
        is_new = path.tobytes() not in self._paths
        self._paths[path.tobytes()] = path
        return is_new

    def _leave_out(self, known: dict[bytes, Any], used: Floats, most: int) -> None:
        """Forget what was not used for some time."""
        for key, share in zip(list(known), used.tolist(), strict=True):
            self._idle[key] = 0 if share > 0 else self._idle.get(key, 0) + 1
            if self._idle[key] > most:
                del known[key], self._idle[key]

    def solve(self) -> DualWeights | None:
        """Return the best mixture and its dual solution; ``None`` if the solver finds none."""
        columns, paths = list(self._columns.values()), np.array(list(self._paths.values()))
        stage, times = np.array([c.stage for c in columns]), np.array([c.times for c in columns])
        lengths = np.einsum("pkt,kt->pk", paths[:, stage], times)
        unit = float(lengths[0].sum()) or 1.0
        lengths /= unit
        rows = len(self.limits)
        loads = np.array([c.loads for c in columns]).reshape(len(stage), rows).T / self.limits[:, None]
        above = np.block(
            [
                [lengths, np.zeros((len(lengths), rows)), -np.ones((len(lengths), 1))],
                [loads, -np.eye(rows), np.zeros((rows, 1))],
            ]
        )
        flow = _flow(columns, rows + 1)
        objective = np.concatenate([np.zeros(len(stage)), np.full(rows, _PENALTY), [1.0]])
        found = linprog(
            objective,
            A_ub=csr_array(above),
            b_ub=np.concatenate([np.zeros(len(lengths)), np.ones(rows)]),
            A_eq=flow,
            b_eq=np.eye(1, flow.shape[0])[0],
            method="highs",
        )
        if found.x is None or found.status != 0:
            return None
        dual = np.maximum(0.0, -found.ineqlin.marginals)
        share = dual[: len(lengths)] / (float(dual[: len(lengths)].sum()) or 1.0)
        weights = np.tensordot(share, paths, 1)
        mean = np.zeros_like(paths[0])
        np.add.at(mean, stage, found.x[: len(stage), None] * times)
        self._leave_out(self._paths, share, _IDLE)
        self._leave_out(self._columns, found.x[: len(stage)], 2 * _IDLE)
        prices = dual[len(lengths) :] * unit / self.limits
        return DualWeights(found.fun * unit, found.x[-1] * unit, weights, prices, mean)


def _flow(columns: Sequence[StageColumn], others: int) -> csr_array:
    """Return the rows that make stages of a mixture follow one another; the first is the start of the line."""
    number: dict[tuple[int, int], int] = {(0, 0): 0}
    last = max(c.stage for c in columns)
    entries = []
    for k, c in enumerate(columns):
        entries.append((number.setdefault((c.stage, c.start), len(number)), k, 1.0))
        if c.stage < last:
            entries.append((number.setdefault((c.stage + 1, c.end), len(number)), k, -1.0))
    at, column, value = zip(*entries, strict=True)
    return csr_array((value, (at, column)), shape=(len(number), len(columns) + others))
