from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitkit.solvers.contiguous import bottleneck, contiguous, scaled


def brute_force(weights, blocks, costs):
    """The least (heaviest block, cut cost) over all divisions."""
    items = len(weights)

    def price(cuts):
        starts = [0, *cuts]
        loads = [sum(weights[a:b]) for a, b in zip(starts, [*cuts, items], strict=True)]
        return max(loads), sum(costs[c] for c in cuts)

    return min(price(cuts) for cuts in combinations(range(1, items), blocks - 1))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_equals_brute_force(data):
    weights = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    blocks = data.draw(st.integers(1, len(weights)))
    costs = data.draw(st.lists(st.integers(0, 5), min_size=len(weights), max_size=len(weights)))
    starts = contiguous(np.array(weights, float), blocks, np.array(costs, float))
    assert len(starts) == blocks and starts[0] == 0 and sorted(set(starts)) == starts
    loads = [sum(weights[a:b]) for a, b in zip(starts, [*starts[1:], len(weights)], strict=True)]
    assert (max(loads), sum(costs[s] for s in starts[1:])) == brute_force(weights, blocks, costs)
    assert bottleneck(np.array(weights), blocks) == max(loads)


def test_no_rounding_where_sums_of_floats_round():
    weights = np.array([0.1] * 10)
    starts = contiguous(weights, 5)
    assert starts == [0, 2, 4, 6, 8]


def test_whole_numbers_are_kept_and_zeros_are_fine():
    assert scaled(np.array([3.0, 4.0])).tolist() == [3, 4]
    assert contiguous(np.zeros(4), 3) == [0, 1, 2]


@pytest.mark.parametrize("blocks", [1, 7, 500])
def test_a_long_sequence(blocks):
    weights = np.random.default_rng(0).random(20_000)
    starts = contiguous(weights, blocks, np.random.default_rng(1).random(20_000))
    loads = np.add.reduceat(weights, starts)
    assert len(starts) == blocks
    assert loads.max() < weights.sum() / blocks + weights.max()
