"""Stages along one order where each border has its own price: first the least greatest load, then balanced loads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splitkit.solvers.placement.problem import Floats, Ints

_ROWS = 128  # last items of a stage that are processed at once
_ROUNDING, _MARGIN = 1e-12, 1e-9  # relative; both above the rounding errors of sums, and the second above the first


def best_borders(
    work: Floats, prices: Floats, held: Ints, capacity: Floats, tolerances: Sequence[float] = (0.0,)
) -> list[list[int]]:
    """Return the borders that balance loads best among divisions of nearly the least bottleneck, as the first item of
    each stage.

    A stage's load is its work, and the prices of the cuts at both of its ends::

        load(p, i, j) = work[i:j].sum() + prices[p - 1][i] + prices[p][j]
        f[p][j] = min over i < j of max(f[p - 1][i], load(p, i, j))          then the same with sums of squares

    Exact, in O(k n^2) for k stages of n items.

    Args:
        work: (n,) seconds of each item.
        prices: (k - 1, n + 1); ``prices[p][i]`` is paid by stages p and p + 1 for a border between them before item
            ``i``.
        held: (k, n) bytes of each item in each stage.
        capacity: (k,) bytes that each stage has.
        tolerances: relative; how far the greatest load may exceed the least.

    Returns:
        For each tolerance k increasing positions, the first of them 0; nothing if no division fits.
    """
    line = _Line(work, prices, held, capacity)
    least, _ = line.divided(line.by_work(), squares=False)
    if not np.isfinite(least):  # what is divided by work does not fit
        least, _ = line.divided(np.inf, squares=False)
    if not np.isfinite(least):
        return []
    return [line.divided(least * (1 + near + _ROUNDING), squares=True)[1] for near in tolerances]


class _Line:
    """The items of one order."""

    def __init__(self, work: Floats, prices: Floats, held: Ints, capacity: Floats) -> None:
        nothing = np.zeros((1, len(work) + 1))
        self._before = np.concatenate([[0.0], np.cumsum(work)])
        self._entering = np.concatenate([nothing, prices])
        self._leaving = np.concatenate([prices, nothing])
        self._sums = np.concatenate([np.zeros((len(capacity), 1), np.int64), np.cumsum(held, axis=1)], axis=1)
        self._capacity = capacity

    def by_work(self) -> float:
        """Return the greatest load of stages of about equal work, whether they fit or not."""
        count = len(self._capacity)
        shares = self._before[-1] * np.arange(count + 1) / count
        cuts = np.searchsorted(self._before, shares)
        cuts[0], cuts[-1] = 0, len(self._before) - 1
        if (np.diff(cuts) < 1).any():
            return float(np.inf)
        stages = np.arange(count)
        loads = np.diff(self._before[cuts]) + self._entering[stages, cuts[:-1]] + self._leaving[stages, cuts[1:]]
        return float(loads.max()) * (1 + _ROUNDING)

    def divided(self, limit: float, *, squares: bool) -> tuple[float, list[int]]:
        """Return the least greatest load, or sum of squares, of a division with no load above the limit."""
        size = len(self._before)
        least = np.full(size, np.inf)
        least[0] = 0.0
        choices: list[Ints] = []
        for stage in range(len(self._capacity)):
            least, choice = self._stage(stage, least, limit, squares)
            choices.append(choice)
        starts, end = [], size - 1
        for choice in reversed(choices):
            end = int(choice[end])
            starts.append(end)
        return float(least[-1]), starts[::-1]

    def _stage(self, stage: int, least: Floats, limit: float, squares: bool) -> tuple[Floats, Ints]:
        """Return for each end the least value up to there, and where this stage begins."""
        size = len(least)
        found, choice = np.full(size, np.inf), np.zeros(size, np.int64)
        sums, entering = self._sums[stage], self._entering[stage] - self._before
        for low in range(1, size, _ROWS):
            ends = np.arange(low, min(size, low + _ROWS))
            near = int(np.searchsorted(self._before, self._before[low] - limit * (1 + _MARGIN)))  # work alone is less
            first = np.arange(near, int(ends[-1]))
            top = self._before[ends] + self._leaving[stage][ends]
            loads = top[:, None] + entering[None, first]
            barred = (first[None, :] >= ends[:, None]) | (loads > limit)
            barred |= sums[ends, None] - sums[None, first] > self._capacity[stage]
            total = least[None, first] + loads**2 if squares else np.maximum(least[None, first], loads)
            total[barred] = np.inf
            at = total.argmin(axis=1)
            choice[ends], found[ends] = first[at], total[np.arange(len(ends)), at]
        return found, choice
