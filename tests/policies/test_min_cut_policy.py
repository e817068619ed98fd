"""MinCut against every plan of small joint graphs, and against eager on real models."""

from __future__ import annotations

import math

import pytest
import torch
from campaigns import few_of_many
from capturedmodels import captured_example
from choices import Prices, every_plan, saved, spent, steps
from hypothesis import strategies as st
from jointgraphs import Hand
from torch.utils.checkpoint import CheckpointPolicy

from splitkit import costs
from splitkit.engine.pair import divide
from splitkit.errors import NoPlanError, PolicyError, SplitError
from splitkit.policies import MinCut, RecomputeAll, Remat, SaveAll
from splitkit.training.flow import BACKWARD, FORWARD

aten = torch.ops.aten
KIB = 1024


def cost(flow, policy, prices):
    pair = divide(flow, policy, prices)
    return saved(pair) + policy.price * spent(flow, pair, prices)


@few_of_many(20, 50, steps(), st.sampled_from([0.0, 100.0, 700.0, 1500.0, 1e9]))
def test_no_legal_plan_is_cheaper(step, price):
    flow, prices = step
    assert cost(flow, MinCut(price=price), prices) == min(b + price * s for b, s in every_plan(flow, prices))


def test_price_decides():
    """x -> a (4 KiB, 1 s) -> b (1 KiB, 1 s), both read by backward; x is free"""
    h = (
        Hand()
        .inputs(x=1)
        .gradients(g=1)
        .op("a", 4, "x")
        .op("b", 1, "a")
        .op("loss", 1, "b")
        .back("gx", 1, "g", "a", "b")
    )
    flow, prices = h.flow("loss", "gx"), Prices(a=1.0, b=1.0)
    kept = {p: divide(flow, MinCut(price=p * KIB), prices).saved for p in (0, 0.9, 1.1, 3.9, 4.1)}
    assert kept == {0: ("x",), 0.9: ("x",), 1.1: ("x", "b"), 3.9: ("x", "b"), 4.1: ("a", "b")}


def test_a_storage_is_paid_once_and_a_view_costs_its_base():
    """backward reads two views of a: saving a is enough, but costs more than saving the small b that a is made of"""
    h = Hand().inputs(x=1).gradients(g=1).op("b", 1, "x").op("a", 3, "b").view("v", "a").view("w", "a")
    h.op("loss", 1, "v", "w").back("gx", 1, "g", "v", "w", "b")
    flow = h.flow("loss", "gx")
    assert divide(flow, MinCut(price=KIB), Prices(a=4.0, b=9.0)).saved == ("b", "a")
    assert divide(flow, MinCut(price=KIB), Prices(a=2.0, b=9.0)).saved == ("b",)


def test_members_of_a_tuple_are_saved_singly_and_their_op_runs_once():
    h = Hand().inputs(x=1).gradients(g=1).pair("p", 2, 5, "x").op("loss", 1, "p_0").back("gx", 1, "g", "p_0", "p_1")
    flow = h.flow("loss", "gx")
    assert set(divide(flow, MinCut(price=KIB), Prices(p=8.0)).saved) == {"p_0", "p_1"}
    assert divide(flow, MinCut(price=KIB), Prices(p=6.0)).saved == ("x",)


def test_a_node_of_backward_moves_to_forward_where_that_saves_bytes():
    """a mask of a quarter of the bytes, which eager computes in backward"""
    h = (
        Hand()
        .inputs(x=1)
        .gradients(g=1)
        .op("a", 4, "x")
        .op("loss", 1, "a")
        .back("mask", 1, "a")
        .back("gx", 1, "g", "mask")
    )
    pair = divide(h.flow("loss", "gx"), MinCut(), Prices(a=1.0, mask=1.0))
    assert pair.saved == ("mask",)
    assert pair.plan[h["mask"]] == (FORWARD,)


def test_what_may_not_be_saved_is_named_with_the_way_to_backward():
    h = Hand().inputs(x=1).gradients(g=1).op("r", 1, "x", target=aten.rand_like.default).op("a", 1, "r")
    flow = h.op("loss", 1, "a").back("gx", 1, "g", "a").flow("loss", "gx")
    with pytest.raises(
        NoPlanError, match="SK303: r may be neither saved nor computed again .it draws random"
    ) as caught:
        divide(flow, MinCut(size=lambda node: math.inf), Prices())
    assert caught.value.nodes == ("r", "a")
    assert divide(flow, MinCut(size=lambda node: math.inf if node.name == "a" else 1), Prices()).saved == ("r",)


@pytest.mark.parametrize("price", [-1, math.inf, math.nan, "1", True, None, [1]])
def test_a_bad_price_is_refused(price):
    with pytest.raises(PolicyError, match="SK302"):
        MinCut(price=price)


def one_op():
    h = Hand().inputs(x=1).gradients(g=1).op("a", 1, "x").op("loss", 1, "a").back("gx", 1, "g", "a")
    return h.flow("loss", "gx")


@pytest.mark.parametrize("weight", [-1, math.nan, None, [], "much"])
def test_a_bad_size_is_refused(weight):
    with pytest.raises(PolicyError, match=r"SK302.* a\b.*\n  It takes a node") as caught:
        divide(one_op(), MinCut(size=lambda node: weight), Prices())
    assert caught.value.nodes == ("a",)


def test_a_size_that_fails_is_refused_with_the_reason():
    with pytest.raises(PolicyError, match="SK302: MinCut's size fails on a: ZeroDivisionError"):
        divide(one_op(), MinCut(size=lambda node: 1 / 0), Prices())
    with pytest.raises(NoPlanError, match="SK303: mine"):
        divide(one_op(), MinCut(size=refusing), Prices())


def refusing(_):
    raise NoPlanError("SK303", "mine")


@pytest.mark.parametrize("value", [5, "bytes", []])
def test_what_is_no_function_is_refused(value):
    with pytest.raises(PolicyError, match="SK302: MinCut has size=.*, which is not a function\n"):
        MinCut(size=value)


def test_another_graph_is_refused():
    from splitkit import capture, plan

    gm = capture(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(SplitError, match="SK302"):
        plan(gm, MinCut())


@pytest.fixture(scope="module")
def gpt2():
    return captured_example("gpt2", "joint", layers=2, width=64, heads=2, batch=2, seq=64, vocab=101).graph


def test_extremes_are_recompute_all_and_save_all(gpt2):
    prices = costs.roofline(gpt2.graph_module, "a100")
    least, most = gpt2.split(MinCut(price=0.0), prices), gpt2.split(MinCut(price=1e30), prices)
    assert saved(least) <= saved(gpt2.split(RecomputeAll(), prices))
    assert saved(most) <= saved(gpt2.split(SaveAll(), prices))
    assert spent(gpt2.flow, most, prices) == 0


def test_the_defaults_repeat_cheap_ops_and_no_products(gpt2):
    pair = gpt2.split(MinCut())
    again = {n.target for n, keys in pair.plan.items() if keys == (FORWARD, BACKWARD)}
    assert aten.mul.Tensor in again
    assert again.isdisjoint({aten.mm.default, aten.addmm.default, aten.bmm.default})


def test_no_rule_of_ours_is_better_by_the_price(gpt2):
    prices, price = costs.roofline(gpt2.graph_module, "a100"), 1e11
    best = cost(gpt2.flow, MinCut(price=price), prices)
    for other in (SaveAll(), RecomputeAll(), Remat(["aten.mm", "aten.addmm"])):
        pair = gpt2.split(other, prices)
        assert best <= saved(pair) + price * spent(gpt2.flow, pair, prices)


def test_the_same_plan_twice(gpt2):
    first, second = gpt2.split(MinCut(1e10)), gpt2.split(MinCut(1e10))
    assert first.saved == second.saved
    assert first.backward.code == second.backward.code


def test_what_a_checkpoint_must_recompute_is_known_before_the_cut():
    """x -> a (4 KiB) -> b (1 KiB, not to be saved): with b out, to run a as well is cheaper than to save it"""
    h = Hand().inputs(x=1).gradients(g=1).op("a", 4, "x").op("b", 1, "a").op("loss", 1, "b").back("gx", 1, "g", "b")
    h["b"].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert divide(h.flow("loss", "gx"), MinCut(price=KIB), Prices(a=2.0, b=9.0)).saved == ("x",)


def test_what_backward_makes_of_a_checkpoint_is_not_saved_in_disguise():
    """x -> a (to be computed again) -> b, in backward alone: b is not saved in a's place"""
    h = Hand().inputs(x=1).op("a", 4, "x").op("loss", 1, "a").gradients(g=1)
    h.back("b", 1, "a").back("gx", 1, "g", "b")
    assert divide(h.flow("loss", "gx"), MinCut(price=KIB), Prices(a=9.0, b=9.0)).saved == ("b",)
    h["a"].meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert divide(h.flow("loss", "gx"), MinCut(price=KIB), Prices(a=9.0, b=9.0)).saved == ("x",)
