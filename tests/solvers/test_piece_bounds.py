"""Hulls of two costs against all cuts of small networks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from allcuts import finite_cuts
from hulls import lower_hull
from hypothesis import given, settings
from hypothesis import strategies as st

from splitkit.solvers.min_cut import INFINITE, Network, NoCutError, TwoCosts


@st.composite
def two_costs(draw, most=8):
    size = draw(st.integers(3, most))
    cost = st.integers(0, 6) | st.just(INFINITE)
    edges = draw(st.lists(st.tuples(st.integers(2, size - 1), st.integers(1, size - 1), cost), max_size=16))
    prices = draw(st.lists(cost, min_size=size - 2, max_size=size - 2))
    rows = [(tail, head, first, 0) for tail, head, first in edges]
    rows += [(0, vertex, 0, price) for vertex, price in enumerate(prices, 2)]
    return TwoCosts(size, *np.array(rows, np.int64).T)


def all_costs(net):
    """(first, second) of every finite cut"""
    endless = np.maximum(net.first, net.second) == INFINITE
    cuts = finite_cuts(Network(net.size, net.tails, net.heads, np.where(endless, INFINITE, 0)))
    crossing = [side[net.tails] & ~side[net.heads] for side, _ in cuts]
    return {(int(net.first[edges].sum()), int(net.second[edges].sum())) for edges in crossing}


def corners_of_all_cuts(net):
    """The corners of a network, which are those of all its cuts; none where no cut is finite."""
    points = all_costs(net)
    try:
        corners = net.corners()
    except NoCutError:
        assert not points
        return []
    assert [(c.first, c.second) for c in corners] == lower_hull(points)
    return corners


@settings(max_examples=100, deadline=None, derandomize=True)
@given(two_costs())
def test_the_corners_are_those_of_all_cuts(net):
    corners = corners_of_all_cuts(net)
    for start, end in pairwise(corners):
        assert not (start.side & ~end.side).any()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(two_costs())
def test_cuts_between_corners_lie_on_the_hull(net):
    points = all_costs(net)
    corners = net.corners() if points else []
    for start, end in pairwise(corners):
        assert net.corner_between(start, end) is None
        found = [start, *net.between(start, end, np.arange(net.size)), end]
        for before, after in pairwise(found):
            assert (before.side <= after.side).all() and before.first < after.first
        for cut in found:
            assert (cut.first, cut.second) in points
            assert (cut.first - start.first) * (end.second - start.second) == (cut.second - start.second) * (
                end.first - start.first
            )


def test_equal_blocks_go_over_one_by_one_the_highest_first():
    """Two blocks that share nothing: save 3 or run 2, each."""
    edges = [(0, 2, 0, 2), (2, 1, 3, 0), (0, 3, 0, 2), (3, 1, 3, 0)]
    net = TwoCosts(4, *np.array(edges, np.int64).T)
    start, end = net.corners()
    assert [(start.first, start.second), (end.first, end.second)] == [(0, 4), (6, 0)]
    (halfway,) = net.between(start, end, np.arange(4))
    assert halfway.first == 3 and (halfway.side & ~start.side).nonzero()[0].tolist() == [3]
