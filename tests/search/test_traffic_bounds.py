"""What no plan is below where nodes may be copied: no bound is above the best of all plans, copies included."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from campaigns import few_of_many
from capturedmodels import captured_example
from copiedgraphs import cases, joined
from hypothesis import strategies as st
from placedgraphs import Prices

import splitkit as sk
from splitkit.costs import Link, Links, roofline
from splitkit.policies import Devices, Stages
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.traffic_bounds import least_load

ONE = Links(Link(1e9, 1.0))


def two_links():
    """Between two places: both ways alike, or one each way."""
    link = st.builds(Link, st.sampled_from([1e9, 4.0, 16.0]), st.sampled_from([0.0, 0.1, 0.5, 3.0]))
    return st.builds(Links, link) | st.builds(lambda a, b: Links(pairs={(0, 1): a, (1, 0): b}), link, link)


def shared_of(flow, costs):
    return PlacementModel(flow, costs, [{n: costs.seconds(n) for n in flow.nodes}], repeat=True).shared


def loads(flow, costs, links, places, home):
    """Of two parts by the definition: work, copies included, and each value that a part sends or receives."""
    load = [sum(costs.seconds(n) for n in flow.nodes if part in places[n]) for part in (0, 1)]
    for n in flow.nodes:
        other = 1 - home[n]
        if other not in places[n] and any(other in places[u] for u in n.users if u in places):
            load = [seconds + links.seconds(home[n], other, costs.nbytes(n)) for seconds in load]
    return load


def needed(node, places, home, outputs):
    """Whether each copy of a node is read where it is, or is the one that is sent."""
    readers = {part for user in node.users if user in places for part in places[user]}
    return all(
        p in readers or (p == home[node] and (node in outputs or readers - {*places[node]})) for p in places[node]
    )


def best_of_all(flow, costs, links, copied, *, stages):
    """The least greatest load of all plans of two parts; stages are not empty, and send only on."""
    outputs = {n for node in flow.graph.nodes if node.op == "output" for n in node.all_input_nodes}
    single = [((0,), 0), ((1,), 1)]
    both = [((0, 1), 0)] if stages else [((0, 1), 0), ((0, 1), 1)]
    best = np.inf
    for choice in product(*(single + both if n in copied else single for n in flow.nodes)):
        places = {n: held for n, (held, _) in zip(flow.nodes, choice, strict=True)}
        home = {n: first for n, (_, first) in zip(flow.nodes, choice, strict=True)}
        if not all(needed(n, places, home, outputs) for n in flow.nodes if len(places[n]) > 1):
            continue
        if stages and ({*sum(places.values(), ())} != {0, 1} or goes_back(flow, places)):
            continue
        best = min(best, *[max(loads(flow, costs, links, places, home))])
    return best


def goes_back(flow, places):
    return any(places[n] == (0,) and places[read] == (1,) for n in flow.nodes for read in flow.inputs(n))


@few_of_many(10, 300, cases(), two_links())
def test_no_stages_are_below_the_bound(case, links):
    gm, costs = case
    flow = sk.analyze(gm)
    shared = shared_of(flow, costs)
    claim = sk.plan(gm, Stages(2, links=links), costs).claim
    copied = shared if len(flow.nodes) - len(shared) >= 2 else ()  # else they are not copied
    assert claim.bound <= best_of_all(flow, costs, links, copied, stages=True) * (1 + 1e-9)


@few_of_many(10, 300, cases(), two_links())
def test_no_parts_of_devices_are_below_the_bound(case, links):
    gm, costs = case
    flow = sk.analyze(gm)
    best = best_of_all(flow, costs, links, shared_of(flow, costs), stages=False)
    claim = sk.plan(gm, Devices({0: "a100", 1: "a100"}, links=links, pieces=None, seconds=1), costs).claim
    assert claim.bound <= best * (1 + 1e-9)


PAIR = [(0, 0), (1, 2), (1, 2)]
"""x + x, which may be copied, and two sums that read it and nothing of each other."""


def placing_of(reads, outputs, seconds, nbytes=4):
    gm, nodes = joined(reads, outputs)
    costs = Prices({n.name: price for n, price in zip(nodes, seconds, strict=True)}, nbytes)
    flow = sk.analyze(gm)
    return PlacementModel(flow, costs, [{n: costs.seconds(n) for n in flow.nodes}], repeat=True)


@pytest.mark.parametrize(
    ("latency", "least"),
    [
        (9.0, 2.5),  # nothing is sent: the longer sum, and what it reads
        (2.2, 2.2),  # or the limit, from which on something may be
        (0.1, 3.5 / 2),  # as much as that is sent for little: all work, shared out
    ],
)
def test_what_is_not_sent_is_copied(latency, least):
    placing = placing_of(PAIR, [3, 4], [0.5, 1.0, 2.0], nbytes=0)
    travel = TransferTimes.over(Links(Link(1e9, latency)), (0, 1), training=False)
    assert least_load(placing, travel, 2) == pytest.approx(least)


def test_values_that_cost_more_than_all_work_keep_a_chain_together():
    placing = placing_of([(1, 0), (2, 0), (3, 0)], [4], [1.0, 2.0, 3.0])
    assert least_load(placing, TransferTimes.over(ONE, (0, 1), training=True), 2) == pytest.approx(3.0), (
        "2 s are 1 s both ways"
    )
    assert least_load(placing, TransferTimes.over(Links(Link(1e9, 9.0)), (0, 1), training=False), 2) == pytest.approx(
        6.0
    )


def test_the_bound_of_a_gpt2_leaves_out_nothing_that_must_cross():
    gm = captured_example("gpt2", layers=2, width=32, heads=2, batch=1, seq=8, vocab=31).graph
    costs = roofline(gm, "a100")
    claim = sk.plan(gm, Stages(4, links=ONE), costs).claim
    assert claim.value > 1.0 and claim.gap < 1e-3
    claim = sk.plan(gm, Devices(["a100"] * 4, links=ONE), costs).claim
    assert claim.value < 1e-2 and claim.gap < 1e-6, "one device does all, copied nodes included"
