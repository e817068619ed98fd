"""Divisions of a line whose cuts have prices, against all that there are."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from splitkit.solvers.line.priced_cuts import best_borders


def loads_of(work: np.ndarray, prices: np.ndarray, starts: tuple[int, ...]) -> np.ndarray:
    ends = (*starts[1:], len(work))
    loads = [work[i:j].sum() for i, j in zip(starts, ends, strict=True)]
    for stage, cut in enumerate(starts[1:]):
        loads[stage] += prices[stage][cut]
        loads[stage + 1] += prices[stage][cut]
    return np.array(loads)


@pytest.mark.parametrize("seed", range(40))
def test_no_division_is_better(seed):
    random = np.random.default_rng(seed)
    size, count = int(random.integers(4, 12)), int(random.integers(1, 5))
    work = random.integers(0, 9, size).astype(float)
    prices = random.integers(0, 6, (count - 1, size + 1)).astype(float)
    held = np.tile(random.integers(1, 5, size), (count, 1))
    capacity = np.full(count, np.inf if seed % 2 else float(held[0].sum() * 2 // (count + 1)))
    every = [
        (0, *cuts)
        for cuts in combinations(range(1, size), count - 1)
        if all(h.sum() <= c for h, c in zip(np.split(held[0], cuts), capacity, strict=True))
    ]
    found = best_borders(work, prices, held, capacity, (0.0, 0.25))
    if not every:
        assert not found
        return
    least = min(loads_of(work, prices, starts).max() for starts in every)
    for near, starts in zip((0.0, 0.25), found, strict=True):
        loads = loads_of(work, prices, tuple(starts))
        assert tuple(starts) in every and loads.max() <= least * (1 + near) * (1 + 1e-9)
        fine = [s for s in every if loads_of(work, prices, s).max() <= least * (1 + near) * (1 + 1e-9)]
        squares = min((loads_of(work, prices, s) ** 2).sum() for s in fine)
        assert (loads**2).sum() == pytest.approx(squares)
