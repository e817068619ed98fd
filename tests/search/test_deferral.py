"""What waits between the two parts of a backward: against every legal division of small graphs, and in real runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from campaigns import few_of_many, these_first
from choices import Prices
from dividedbackward import legal_divisions, run_parts, small_backwards
from hypothesis import strategies as st
from jointgraphs import Hand
from jointmodels import assert_steps_alike, captured
from waitingvalues import waiting_bytes, waiting_values

from splitkit import costs
from splitkit.search.deferral_problem import DeferralNetwork, deferrals, divided, plan_in_stages
from splitkit.training.flow import BACKWARD, recompute, save_all_plan

KIB = 1024
DIVIDED = ("backward", 0)


def problem_of(flow, plan, prices):
    return deferrals(flow, plan_in_stages(flow, plan), DIVIDED, prices)


@few_of_many(25, 1500, small_backwards(), st.booleans(), st.sampled_from([0.0, 0.3, 1.0, 700.0, 3000.0, 1e9]))
def test_the_cut_is_the_least_of_all_divisions(made, again, price):
    """At each price; and each division costs what the definition says, in a plan of the same bytes."""
    (flow, seconds), plan = made, save_all_plan(made[0])
    plan = recompute(flow, plan, ()) if again else plan
    prices = Prices(**seconds)
    problem = problem_of(flow, plan, prices)
    choice, bound = DeferralNetwork.of(problem, products=False).cheapest(price)
    found = choice.nbytes + price * choice.moved
    least = min(nbytes + price * spent for nbytes, spent, _ in legal_divisions(flow, plan, prices.seconds))
    assert found == pytest.approx(least) and bound <= found + 1e-6 * abs(found) and bound == pytest.approx(found, abs=1)
    whole = divided(plan_in_stages(flow, plan), {0: choice})
    assert waiting_bytes(flow, whole, 0) == choice.nbytes


@few_of_many(20, 1000, small_backwards(), st.booleans(), st.integers(0, 31))
def test_products_wait_and_the_rest_is_where_the_fewest_bytes_do(made, again, mask):
    (flow, seconds), plan = made, save_all_plan(made[0])
    plan = recompute(flow, plan, ()) if again else plan
    prices = Prices(**seconds)
    problem = problem_of(flow, plan, prices)
    chosen = np.array([bool(mask >> i % 5 & 1) for i in range(len(problem.ops))], np.bool_) & ~problem.pinned
    problem = replace(problem, products=chosen)
    choice, bound = DeferralNetwork.of(problem, products=True).cheapest(0.0)
    fixed = {op for op, is_product in zip(problem.ops, chosen, strict=True) if is_product}
    every = list(legal_divisions(flow, plan, prices.seconds, fixed, once=True))
    least = min(nbytes for nbytes, _, _ in every)
    assert choice.nbytes == least == bound
    assert choice.moved == pytest.approx(min(spent for nbytes, spent, _ in every if nbytes == least))
    assert not (choice.early & chosen).any() and choice.late[chosen].all()


def linear():
    """``y = w x`` and a norm's weight: x waits for a product of 4 KiB or is read by a reduction to 1 KiB."""
    h = Hand().inputs(w=2, u=2).gradients(g=3).op("x", 4, "u").op("y", 3, "x", "w").op("loss", 1, "y")
    h.back("dy", 3, "g", "y").view("dv", "dy", "is_backward").back("gu", 4, "dv", "w").back("gw", 2, "dv", "x")
    h.back("wide", 9, "dy", "x").back("gn", 1, "wide")
    flow = h.flow("loss", "gu gw gn")
    return type(flow).of(flow, flow.backward_inputs, 1, (), [h["gu"]]), h


def names(flow, plan):
    return {n.name: tuple(key[0] for key in plan[n]) for n in flow.nodes}


def test_by_hand():
    flow, _ = linear()
    prices = Prices(gw=2.0, wide=1.0, gn=1.0, dy=5.0, gu=7.0)
    plan = plan_in_stages(flow, save_all_plan(flow))
    problem = deferrals(flow, plan, DIVIDED, prices)
    assert [op.name for op in problem.ops] == ["dy", "dv", "gu", "gw", "wide", "gn"]
    pinned = {op.name for op, there in zip(problem.ops, problem.pinned, strict=True) if there}
    assert pinned == {"dy", "dv", "gu"}
    network = DeferralNetwork.of(problem, products=False)
    found = [(c.nbytes // KIB, c.moved, c.seconds) for c in (network.cheapest(0.0)[0], network.cheapest(1e9)[0])]
    # 7 KiB wait for both: x and the storage of dy and its view
    assert found == [(0, 4.0, (16.0, 0.0)), (7, 0.0, (12.0, 4.0))]
    for price, waiting in ((0.0, 0), (7 * KIB / 4 - 1, 0), (7 * KIB / 4 + 1, 7)):
        assert network.cheapest(price)[0].nbytes == waiting * KIB
    late = divided(plan, {0: network.cheapest(1e9)[0]})
    assert names(flow, late) == {
        "x": ("forward",), "y": ("forward",), "loss": ("forward",), "dy": ("input",), "dv": ("input", "weight"),
        "gu": ("input",), "gw": ("weight",), "wide": ("weight",), "gn": ("weight",),
    }  # fmt: skip
    assert [n.name for n in waiting_values(flow, late, 0)] == ["x", "dy"]
    first = divided(plan, {0: network.cheapest(0.0)[0]})
    assert set(first.parts) == {("forward", 0), ("input", 0), ("weight", 0)} and not first.members(("weight", 0))


def test_what_is_recomputed_waits_or_is_computed_again():
    """x is recomputed from u, which the caller holds: 4 KiB that wait, or 3 seconds."""
    flow, h = linear()
    plan = plan_in_stages(flow, recompute(flow, save_all_plan(flow), ()))
    assert plan[h["x"]] == (("forward", 0), DIVIDED)
    prices = Prices(x=3.0, y=1.0, gw=1e6, wide=1.0, gn=1.0)
    network = DeferralNetwork.of(deferrals(flow, plan, DIVIDED, prices), products=False)
    again = divided(plan, {0: network.cheapest(KIB)[0]})
    assert names(flow, again)["x"] == ("forward", "input", "weight") and waiting_bytes(flow, again, 0) == 3 * KIB
    waits = divided(plan, {0: network.cheapest(2 * KIB)[0]})
    assert names(flow, waits)["x"] == ("forward", "input") and waiting_bytes(flow, waits, 0) == 7 * KIB


def test_what_reads_memory_before_it_is_written_is_in_the_input_part():
    h = Hand().inputs(u=2).gradients(g=3).op("x", 3, "u").op("loss", 1, "x")
    h.back("read", 4, "x").back("write", 3, "x", "g", target=torch.ops.aten.add_.Tensor).back("gw", 2, "read", "g")
    h["write"].meta["val"] = h["x"].meta["val"]
    flow = h.flow("loss", "gw")
    problem = problem_of(flow, save_all_plan(flow), Prices(read=1.0, gw=1.0))
    there = dict(zip((op.name for op in problem.ops), zip(problem.pinned, problem.single, strict=True), strict=True))
    assert there == {"read": (True, True), "write": (True, True), "gw": (False, False)}
    choice, _ = DeferralNetwork.of(problem, products=False).cheapest(1e9)
    assert choice.early.tolist() == [True, True, False] and choice.nbytes == (4 + 3) * KIB


@pytest.mark.parametrize(
    "name", these_first(["conv", "branches"], ["gpt2", "mixtral", "checkpointed", "narrow writing"])
)
def test_any_division_waits_with_the_bytes_it_says_and_runs_like_eager(name):
    joint, args, kwargs, expected = captured(name)
    flow, prices = joint.flow, costs.roofline(joint.graph_module, "a100")
    random = np.random.default_rng(0)
    for number, inner in enumerate((save_all_plan(flow), recompute(flow, save_all_plan(flow), ()))):
        plan = plan_in_stages(flow, inner)
        problem = deferrals(flow, plan, DIVIDED, prices)
        for share in (0.0, 0.2, 0.6, 1.0):
            early = problem.closed(np.flatnonzero(problem.pinned | (random.random(len(problem.ops)) < share)).tolist())
            late = ~early | (~problem.single & (random.random(len(problem.ops)) < 0.5))
            views = np.unique(problem.along[:, 1])
            late[views] = True
            choice = problem.choose(early, late)
            whole = divided(plan, {0: choice})
            assert waiting_bytes(flow, whole, 0) == choice.nbytes
            times = [sum(prices.seconds(n) for n in whole.members((half, 0))) for half in ("input", "weight")]
            assert choice.seconds == pytest.approx(times)
            if share in (0.2, 0.6) or (number and share):
                assert_steps_alike(run_parts(joint, whole, args, kwargs), expected)


def test_nothing_waits_if_backward_is_not_there():
    h = Hand().inputs(x=1).gradients(g=1).op("loss", 1, "x")
    flow = h.flow("loss", "g")
    choice, bound = DeferralNetwork.of(problem_of(flow, save_all_plan(flow), Prices()), products=True).cheapest(0.0)
    assert choice.nbytes == bound == 0 and BACKWARD
