"""A graph takes the order and the names that it has on another rank, or says where it differs."""

from __future__ import annotations

import pickle

import pytest
import setorder
import torch
from launch import launch
from zoographs import specimens

import splitkit as sk
from splitkit.plans.plan_file import fingerprint
from splitkit.runtime.ranks.rank_agreement import difference, listing, put_in_order


def captured(order, rows=4, op=torch.relu):
    return sk.capture(setorder.model(order, op), setorder.inputs(rows))


def test_a_graph_takes_the_order_and_names_of_another():
    first, own = captured(0), captured(1)
    sent, nodes, before = pickle.loads(pickle.dumps(listing(first))), set(own.graph.nodes), own(setorder.inputs())
    assert fingerprint(first.graph) != fingerprint(own.graph) and not difference(own, sent)
    put_in_order(own, sent)
    assert fingerprint(first.graph) == fingerprint(own.graph) and first.code == own.code
    assert set(own.graph.nodes) == nodes
    x = setorder.inputs()
    assert torch.equal(own(x), before) and torch.equal(own(x), first(x))
    for name in ("full", "sliding"):
        assert own.get_buffer(name) is not first.get_buffer(name)
    sk.compare(first, sk.split(own, sk.policies.Stages(2)), x).raise_if_different()


@pytest.mark.parametrize("name", specimens())
def test_a_graph_that_is_in_order_stays_what_it_is(name):
    gm = specimens()[name].graph
    before = fingerprint(gm.graph), gm.code
    sent = listing(gm)
    assert not difference(gm, sent)
    put_in_order(gm, sent)
    assert (fingerprint(gm.graph), gm.code) == before


def test_the_first_node_that_differs_is_named():
    first = listing(captured(0))
    other = difference(captured(1, op=torch.tanh), first)
    assert other == "tanh (aten.tanh.default), which is relu (aten.relu.default) on rank 0"
    assert difference(captured(1, rows=2), first) == "x, which is float32[2, 8], and float32[4, 8] on rank 0"


def test_ranks_that_capture_in_other_orders_train_one_plan():
    told = launch("runtime/orders.py", 2, "once")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):  # the tables cross the border without a gradient
        assert [line["said"][:5] for line in told] == ["SK806"] * 2
        return
    assert len(told) == 2 and len({line["graph"] for line in told}) == 1
    (last,) = [line for line in told if line["loss"] is not None]
    assert last["loss"] == pytest.approx(last["whole"], rel=1e-6)
    assert all(line["apart"] < 1e-5 for line in told)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("apart", "SK804: the ranks captured the same nodes in different orders"),
        (
            "op",
            "SK804: rank 1 captured a different graph than rank 0: they first differ at tanh (aten.tanh.default)",
        ),
    ],
)
def test_graphs_that_differ_are_refused_on_every_rank(what, says):
    told = launch("runtime/orders.py", 2, what)
    assert len(told) == 2 and all(line["said"].startswith(says) for line in told), told
