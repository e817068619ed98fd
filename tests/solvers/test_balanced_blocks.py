"""Even blocks of a sequence, against every division."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from campaigns import few_of_many, these_first
from hypothesis import strategies as st

from splitkit.solvers.line.balanced_blocks import even_blocks


def divisions(weights, blocks):
    for cuts in combinations(range(1, len(weights)), blocks - 1):
        yield [0, *cuts]


def squares(weights, starts):
    return float(np.square(np.add.reduceat(weights, starts)).sum())


WEIGHTS = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 5.0, 30.0]), st.floats(0, 10))


@few_of_many(
    80,
    200,
    st.lists(st.tuples(WEIGHTS, st.sampled_from([0.0, 1.0, 3.0, 7.0])), min_size=1, max_size=9),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.01, 0.2]),
)
def test_as_even_as_any_division_and_of_these_a_cheap_one(items, blocks, tolerance):
    weights, prices = np.array(items).T
    blocks = min(blocks, len(weights))
    slowest = min(np.add.reduceat(weights, starts).max() for starts in divisions(weights, blocks))
    limit = slowest * (1 + tolerance)
    allowed = [s for s in divisions(weights, blocks) if np.add.reduceat(weights, s).max() <= limit * (1 + 1e-9)]
    least = min(squares(weights, starts) for starts in allowed)
    found = even_blocks(weights, blocks, limit, prices, tolerance)
    assert len(found) == blocks and found[0] == 0 and sorted(set(found)) == found
    assert np.add.reduceat(weights, found).max() <= limit * (1 + 1e-9)
    assert squares(weights, found) <= least * (1 + tolerance) * (1 + 1e-8) + 1e-12
    even = even_blocks(weights, blocks, limit, np.zeros(len(weights)), tolerance)
    assert squares(weights, even) == pytest.approx(least, rel=1e-8, abs=1e-12)
    assert prices[found[1:]].sum() <= prices[even[1:]].sum()


def test_of_blocks_that_are_nearly_as_even_the_cheapest_cuts_are_taken():
    weights, prices = np.full(100, 1.0), np.full(100, 9.0)
    prices[51] = 0.0  # 51 and 49 are 0.04 % less even than 50 and 50
    assert even_blocks(weights, 2, 51.0, prices, 0.0) == [0, 50]
    assert even_blocks(weights, 2, 51.0, prices, 0.01) == [0, 51]


def test_a_heavy_item_leaves_even_blocks_before_it():
    weights = np.array([1.0] * 14 + [20.0])
    found = even_blocks(weights, 8, 20.0, np.zeros(15), 0.01)
    assert found == [0, 2, 4, 6, 8, 10, 12, 14]


@pytest.mark.parametrize("tolerance", [0.0, 0.01])
def test_items_that_weigh_nothing(tolerance):
    assert even_blocks(np.zeros(5), 3, 0.0, np.ones(5), tolerance)[0] == 0
    assert even_blocks(np.array([0.0, 0.0, 1.0, 0.0, 1.0]), 2, 1.0, np.array([9.0, 9.0, 9.0, 1.0, 2.0]), tolerance) == [
        0,
        3,
    ]


def test_a_limit_that_no_division_keeps():
    assert even_blocks(np.array([1.0, 5.0, 1.0]), 3, 4.9, np.zeros(3), 0.0) is None
    assert even_blocks(np.array([2.0, 2.0, 2.0]), 2, 3.9, np.zeros(3), 0.0) is None
    assert even_blocks(np.array([2.0, 2.0, 2.0]), 2, 4.0, np.zeros(3), 0.0) in ([0, 1], [0, 2])


@pytest.mark.parametrize("blocks", these_first([1, 7], [60]))
def test_a_long_sequence_at_the_very_limit(blocks):
    """Sums of so many floats are rounded by more than one part in 10**12."""
    weights = np.random.default_rng(blocks).random(40_000)
    starts = even_blocks(weights, blocks, float(weights.max() + weights.sum() / blocks), np.zeros(40_000), 0.0)
    limit = float(np.add.reduceat(weights, starts).max())
    again = even_blocks(weights, blocks, limit, np.random.default_rng(1).random(40_000), 0.0)
    assert again is not None and np.add.reduceat(weights, again).max() <= limit * (1 + 1e-9)
