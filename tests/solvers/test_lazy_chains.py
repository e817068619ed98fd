"""`LazyChains`: the best chain, as by brute force, and few prices asked for."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from splitkit.solvers.line.border_chains import LazyChains


def case(seed, borders, steps):
    rng = np.random.default_rng(seed)
    first, last = (index.astype(np.int64) for index in np.triu_indices(borders, 1))
    true = rng.integers(1, 40, (steps, len(first))).astype(float)
    true[rng.random(true.shape) < 0.2] = np.inf
    least = np.where(np.isinf(true), 1.0, true) - rng.integers(0, 5, true.shape)
    return first, last, true, least


def chains(first, last, borders, steps):
    pair = {ends: i for i, ends in enumerate(zip(first.tolist(), last.tolist(), strict=True))}
    for inner in combinations(range(1, borders - 1), steps - 1):
        yield [pair[ends] for ends in pairwise((0, *inner, borders - 1))]


def costs_of(true, pairs):
    return [float(true[step, pair]) for step, pair in enumerate(pairs)]


@pytest.mark.parametrize("seed", range(40))
def test_the_best_chain_is_that_of_brute_force(seed):
    borders, steps = 7, 1 + seed % 4
    first, last, true, least = case(seed, borders, steps)
    asked = []

    def price(pair):
        asked.append(pair)
        return true[:, pair]

    found = LazyChains(first, last, least.copy(), price, lambda: False).best()
    every = [costs_of(true, pairs) for pairs in chains(first, last, borders, steps)]
    best = min(map(max, every))
    assert len(asked) == len(set(asked)) <= len(first)
    if np.isinf(best):
        assert found is None
        return
    assert found.cost == found.bound == best
    limit = best * 1.2
    even = LazyChains(first, last, least.copy(), price, lambda: False).best(limit)
    squares = min(sum(c**2 for c in one) for one in every if max(one) <= limit)
    pairs = {ends: i for i, ends in enumerate(zip(first.tolist(), last.tolist(), strict=True))}
    taken = costs_of(true, [pairs[ends] for ends in pairwise((0, *even.borders))])
    assert sum(c**2 for c in taken) == pytest.approx(squares) and even.cost == max(taken) <= limit


@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_search_that_is_stopped_has_true_costs_and_a_bound(after):
    first, last, true, least = case(3, 12, 3)
    true[np.isinf(true)] = 50.0
    left = [after]

    def stop():
        left[0] -= 1
        return left[0] < 0

    found = LazyChains(first, last, least.copy(), lambda pair: true[:, pair], stop).best()
    best = min(max(costs_of(true, pairs)) for pairs in chains(first, last, 12, 3))
    if found is not None:
        pairs = {ends: i for i, ends in enumerate(zip(first.tolist(), last.tolist(), strict=True))}
        taken = costs_of(true, [pairs[ends] for ends in pairwise((0, *found.borders))])
        assert found.bound <= best <= found.cost == max(taken)
