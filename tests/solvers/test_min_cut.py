"""Minimum cuts against networkx, and every cut of small networks."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from allcuts import finite_cuts
from hypothesis import given, settings
from hypothesis import strategies as st

from splitkit.solvers.min_cut import INFINITE, ROOM, Network, NoCutError, min_cut


def network(size, edges):
    columns = np.array(edges, np.int64).reshape(-1, 3).T
    return Network(size, *columns)


def oracle(net):
    """networkx' value of the minimum cut, ``None`` if it is infinite"""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(net.size))
    for tail, head, capacity in zip(net.tails.tolist(), net.heads.tolist(), net.capacities.tolist(), strict=True):
        known = graph.get_edge_data(tail, head, {"capacity": 0})
        if tail == head or "capacity" not in known:  # a loop, or infinite already
            continue
        graph.remove_edges_from([(tail, head)])
        finite = {} if capacity == INFINITE else {"capacity": known["capacity"] + capacity}
        graph.add_edge(tail, head, **finite)
    try:
        return nx.minimum_cut_value(graph, 0, 1)
    except nx.NetworkXUnbounded:
        return None


@st.composite
def networks(draw, most=12):
    size = draw(st.integers(2, most))
    vertex = st.integers(0, size - 1)
    top = draw(st.sampled_from([1, 3, 2**31 - 1, 2**31 + 1, 2**40, ROOM // 64]))
    capacity = st.integers(0, top) | st.just(INFINITE)
    return network(size, draw(st.lists(st.tuples(vertex, vertex, capacity), max_size=40)))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(networks())
def test_the_value_of_networkx(net):
    expected = oracle(net)
    if expected is None:
        with pytest.raises(NoCutError):
            min_cut(net)
    else:
        assert min_cut(net).value == expected


@settings(max_examples=150, deadline=None, derandomize=True)
@given(networks(most=7))
def test_all_minimum_cuts_lie_between_smallest_and_largest_and_no_residual_edge_leaves_them(net):
    cuts = list(finite_cuts(net))
    if not cuts:
        return
    found = min_cut(net)
    best = [side for side, value in cuts if value == min(v for _, v in cuts)]
    assert (np.logical_and.reduce(best) == found.smallest).all()
    assert (np.logical_or.reduce(best) == found.largest).all()
    free = found.largest & ~found.smallest
    for side, value in cuts:
        if (side & ~free == found.smallest).all():
            leaves = (side[found.tails] & ~side[found.heads]).any()
            assert leaves != (value == found.value)


def test_capacities_that_differ_in_the_last_of_sixty_bits():
    big = 2**58
    net = network(4, [(0, 2, big + 1), (2, 1, big), (0, 3, big), (3, 1, big + 1)])
    cut = min_cut(net)
    assert cut.value == 2 * big
    assert cut.smallest.tolist() == cut.largest.tolist() == [True, False, True, False]


def test_parallel_edges_add_up_and_loops_do_not_count():
    assert min_cut(network(3, [(0, 2, 2), (0, 2, 3), (2, 2, 9), (2, 1, 7), (1, 0, 9)])).value == 5


def test_an_infinite_path_is_named():
    net = network(5, [(0, 2, INFINITE), (2, 3, INFINITE), (3, 4, 5), (3, 1, INFINITE)])
    with pytest.raises(NoCutError) as caught:
        min_cut(net)
    assert caught.value.path == (0, 2, 3, 1)


def test_no_edges_no_cost():
    cut = min_cut(network(3, []))
    assert (cut.value, cut.smallest.tolist(), cut.largest.tolist()) == (0, [True, False, False], [True, False, True])


def test_contracted_vertices_go_with_source_and_sink():
    net = network(5, [(0, 2, 3), (2, 3, 1), (3, 4, 2), (4, 1, 5), (2, 1, 4)])
    small, number = net.contract(np.array([0, 0, 1, 0, 0], bool), np.array([0, 0, 0, 0, 1], bool))
    assert (small.size, number.tolist()) == (3, [0, 1, 0, 2, 1])
    assert sorted(zip(small.tails.tolist(), small.heads.tolist(), small.capacities.tolist(), strict=True)) == [
        (0, 1, 4),
        (0, 2, 1),
        (2, 1, 2),
    ]
