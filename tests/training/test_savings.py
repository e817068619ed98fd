"""The arrays of a joint graph: what they say of bytes and seconds is what the pair takes, and plans run like eager."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from campaigns import these_first
from choices import Prices, saved
from jointgraphs import Hand
from jointmodels import MODELS, assert_steps_alike, captured, ran
from smallnets import NETS
from torch.utils.checkpoint import CheckpointPolicy

from splitkit import costs
from splitkit.engine.pair import divide
from splitkit.training.choices import savings
from splitkit.training.flow import BACKWARD, FORWARD

aten = torch.ops.aten
KIB = 1024


@pytest.mark.parametrize(
    "name",
    these_first(["gpt2", "conv", *NETS], [name for name in MODELS if name not in ("gpt2", "conv")]),
)
def test_any_choice_takes_the_bytes_and_seconds_it_says_and_runs_like_eager(name):
    joint, args, kwargs, expected = captured(name)
    if name == "lstm":  # whose eager kernel is oneDNN's, with sums in another order
        torch.manual_seed(0)
        whole = joint.run(*args, **kwargs)
        expected = whole.loss, whole.gradients, whole.updates
    prices = costs.roofline(joint.graph_module, "a100")
    problem = savings(joint.flow, prices)
    random = np.random.default_rng(0)
    assert len(problem.ops) > 5
    for share in (0.0, 0.3, 0.7, 1.0):
        choice = problem.choose(random.random(len(problem.ops)) < share)
        pair = joint.split(choice.plan(), prices)
        assert saved(pair) == choice.nbytes
        halves = (pair.forward, pair.backward)
        ran_in = [{n.name for n in half.graph.nodes if n.op == "call_function"} for half in halves]
        again = [n for n in joint.flow.nodes if n.name in ran_in[0] & ran_in[1]]
        assert choice.seconds == pytest.approx(sum(prices.seconds(n) for n in again), abs=1e-12)
        if share in (0.3, 1.0):
            assert_steps_alike(ran(joint, pair, args, kwargs), expected)


def row(problem, name):
    """what the arrays say of an op, by name"""
    i = [n.name for n in problem.ops].index(name)
    return {
        "seconds": problem.seconds[i],
        "fixed": problem.fixed[i],
        "late": problem.late[i],
        "price": problem.price[i],
    }


def value(problem, name):
    i = [n.name for n in problem.values].index(name)
    return {"savable": problem.savable[i], "needed": problem.needed[i], "nbytes": problem.nbytes[problem.storage[i]]}


def test_by_hand():
    """x -> a -> v (view) -> p (tuple) -> loss; backward reads v, p_1 and late, which is made of a"""
    h = Hand().inputs(x=1).gradients(g=1).op("a", 3, "x").view("v", "a").pair("p", 1, 2, "v").op("loss", 1, "p_0")
    h.back("late", 4, "a").back("gx", 1, "g", "v", "p_1", "late", "x")
    problem = savings(h.flow("loss", "gx"), Prices(a=1.0, v=2.0, p=3.0, late=4.0, loss=9.0, gx=9.0))
    assert [n.name for n in problem.ops] == ["a", "v", "p", "late"]
    assert [n.name for n in problem.values] == ["a", "v", "p_1", "late"]
    names = [(problem.ops[op].name, problem.values[v].name) for op, v in problem.reads]
    assert names == [("v", "a"), ("p", "v"), ("late", "a")]
    assert row(problem, "a") == {"seconds": 1.0, "fixed": False, "late": False, "price": 1.0}
    assert row(problem, "v") == {"seconds": 0.0, "fixed": False, "late": False, "price": 0.0}
    assert row(problem, "late") == {"seconds": 4.0, "fixed": False, "late": True, "price": 0.0}
    assert value(problem, "a") == {"savable": True, "needed": False, "nbytes": 3 * KIB}
    assert value(problem, "v") == {"savable": False, "needed": True, "nbytes": 3 * KIB}
    assert value(problem, "p_1") == {"savable": True, "needed": True, "nbytes": 2 * KIB}
    nothing = problem.choose(np.zeros(4, bool))
    assert (nothing.nbytes, nothing.seconds) == (9 * KIB, 0.0)
    assert [n.name for n, s in zip(problem.values, nothing.saved, strict=True) if s] == ["a", "p_1", "late"]
    all_of_it = problem.choose(np.ones(4, bool))
    assert (all_of_it.nbytes, all_of_it.seconds) == (0, 4.0)


def test_random_ops_are_fixed_and_nothing_above_them_is_asked_for():
    h = Hand().inputs(x=1).gradients(g=1).op("a", 3, "x").op("r", 2, "a", target=aten.rand_like.default)
    problem = savings(h.op("loss", 1, "r").back("gx", 1, "g", "r").flow("loss", "gx"), Prices())
    assert [(n.name, why) for n, why in problem.why.items()] == [("r", "it draws random numbers")]
    assert [n.name for n in problem.ops] == ["r"]
    assert row(problem, "r")["price"] == np.inf
    assert problem.choose(np.ones(1, bool)).nbytes == 2 * KIB


@pytest.mark.parametrize(
    ("tag", "fixed", "forced", "seconds"),
    [
        (CheckpointPolicy.MUST_SAVE, True, False, 5.0),
        (CheckpointPolicy.PREFER_SAVE, False, False, 5.0),
        (CheckpointPolicy.MUST_RECOMPUTE, False, True, 5.0),
        (CheckpointPolicy.PREFER_RECOMPUTE, False, False, 0.0),
    ],
)
def test_tags_of_checkpoints(tag, fixed, forced, seconds):
    h = Hand().inputs(x=1).gradients(g=1).op("a", 3, "x").op("loss", 1, "a").back("gx", 1, "g", "a")
    h["a"].meta["recompute"] = tag
    problem = savings(h.flow("loss", "gx"), Prices(a=5.0))
    assert (problem.fixed[0], problem.forced[0], problem.seconds[0]) == (fixed, forced, seconds)
    assert problem.savable[0] != forced


def test_a_view_that_a_checkpoint_saves_keeps_its_base():
    h = Hand().inputs(x=1).gradients(g=1).op("a", 3, "x").view("v", "a").op("loss", 1, "v").back("gx", 1, "g", "v")
    h["v"].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    flow = h.flow("loss", "gx")
    choice = savings(flow, Prices()).choose(np.ones(2, bool))
    assert choice.nbytes == 3 * KIB
    assert divide(flow, choice.plan(), Prices()).saved == ("v",)


def test_a_late_op_that_a_saved_one_needs_runs_twice_and_is_paid():
    h = (
        Hand()
        .inputs(x=1)
        .gradients(g=1)
        .op("loss", 1, "x")
        .back("l", 8, "x")
        .back("m", 1, "l")
        .back("gx", 1, "g", "l", "m")
    )
    problem = savings(h.flow("loss", "gx"), Prices(l=5.0, m=7.0))
    choice = problem.choose(np.array([True, False]))
    assert (choice.nbytes, choice.seconds) == (KIB, 5.0)
    plan = choice.plan()
    assert set(plan[h["l"]]) == {FORWARD, BACKWARD}
    assert plan[h["m"]] == (FORWARD,)


def test_what_the_caller_holds_is_free():
    h = Hand().inputs(x=1, w=9).gradients(g=1).view("t", "w").op("a", 1, "x", "t").op("loss", 1, "a")
    problem = savings(h.back("gx", 1, "g", "t", "w", "x").flow("loss", "gx"), Prices(a=1.0))
    assert (problem.ops, problem.values, len(problem.nbytes)) == ((), (), 0)
    assert problem.choose(np.ones(0, bool)).nbytes == 0


def test_bytes_are_of_whole_storages_and_symbolic_sizes_count_as_seen():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.sin(self.linear(x).view(-1)[:4]).sum()

    seen = []

    class Policy:
        def assign(self, flow, prices):
            problem = savings(flow, prices)
            choice = problem.choose(np.array([n.target is not aten.addmm.default for n in problem.ops]))
            seen.append((choice.nbytes, [n.name for n, s in zip(problem.values, choice.saved, strict=True) if s]))
            return choice.plan()

    from splitkit import backend

    model = Model()
    compiled = torch.compile(model, backend=backend(Policy()), dynamic=True)
    compiled(torch.randn(6, 4)).backward()
    assert seen == [(6 * 4 * 4, ["addmm"])]
