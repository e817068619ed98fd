from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitkit.solvers.line.blocks import bottleneck, contiguous, scaled


def brute_force(weights, blocks, costs):
    """The least (heaviest block, cut cost, squares) over all divisions."""
    items = len(weights)

    def price(cuts):
        starts = [0, *cuts]
        loads = [sum(weights[a:b]) for a, b in zip(starts, [*cuts, items], strict=True)]
        return max(loads), sum(costs[c] for c in cuts), sum(load**2 for load in loads)

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
    found = max(loads), sum(costs[s] for s in starts[1:]), sum(load**2 for load in loads)
    assert found == brute_force(weights, blocks, costs)
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


def test_many_ties_are_weighed_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("splitkit.solvers.line.blocks._PAIRS", 4)
    starts = contiguous(np.array([9.0, *[1.0] * 20]), 4)
    assert len(starts) == 4 and max(np.add.reduceat(np.array([9.0, *[1.0] * 20]), starts)) == 9


def test_the_other_blocks_are_even_too():
    weights = np.array([*[1.0] * 12, 9.0])
    assert contiguous(weights, 4) == [0, 4, 8, 12]
