"""Stages along one order where each cut has its own price, since the links between neighbours differ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_CELLS = 2**22  # pairs of a first and a last item that are weighed at once


def best_cuts(work: Floats, prices: Floats, held: Ints, capacity: Floats) -> list[int] | None:
    """The first item of each stage in the division whose greatest load is least, exactly.

    A stage's load is its work, and the prices of the cuts at both of its ends::

        f[p][j] = min over i < j of max(f[p - 1][i], work[i:j].sum() + prices[p - 1][i] + prices[p][j])

    O(k n^2) time in vectors, for k stages of n items.

    Args:
        work: (n,) seconds of the items.
        prices: (k - 1, n + 1); ``prices[p][i]`` is paid by stages p and p + 1 for a cut between them before item ``i``.
        held: (k, n) bytes of the items in each stage.
        capacity: (k,) bytes of each stage.

    Returns:
        k increasing positions, the first of them 0; None if no division fits.
    """
    items, stages = len(work), len(capacity)
    before = np.concatenate([[0.0], np.cumsum(work)])
    least = np.full(items + 1, np.inf)
    least[0] = 0.0
    choices: list[Ints] = []
    for stage in range(stages):
        entering = prices[stage - 1] if stage else np.zeros(items + 1)
        leaving = prices[stage] if stage < stages - 1 else np.zeros(items + 1)
        sums = np.concatenate([[0], np.cumsum(held[stage])])
        base = entering - before
        least, choice = _stage(least, base, before + leaving, sums, capacity[stage])
        choices.append(choice)
    if not np.isfinite(least[items]):
        return None
    starts, end = [], items
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return starts[::-1]


def _stage(least: Floats, base: Floats, top: Floats, sums: Ints, capacity: float) -> tuple[Floats, Ints]:
    """For each end the least greatest load, and where the last stage begins."""
    size = len(least)
    found, choice = np.full(size, np.inf), np.zeros(size, np.int64)
    rows = max(1, _CELLS // size)
    for low in range(1, size, rows):
        ends = np.arange(low, min(size, low + rows))
        loads = np.maximum(least[None, :], top[ends, None] + base[None, :])
        loads[np.arange(size)[None, :] >= ends[:, None]] = np.inf
        loads[sums[ends, None] - sums[None, :] > capacity] = np.inf
        choice[ends] = loads.argmin(axis=1)
        found[ends] = loads[np.arange(len(ends)), choice[ends]]
    return found, choice
