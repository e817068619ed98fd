from __future__ import annotations

import operator

import pytest
import torch
from handgraphs import graph_of
from torch import fx, nn

from splitkit.engine.split import split
from splitkit.errors import CycleError, PlanError, PolicyError
from splitkit.graph.dataflow import analyze
from splitkit.plans.parts import PARENT, Part
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import condense, merge, prune, refine, relay, rematerialize
from splitkit.policies import RoundRobin
from splitkit.testing import assert_legal, assert_same


def drawn(**edges):
    """A graph from a drawing: `c="a b"` reads a and b; `x` is the input. Returns flow and name -> node."""
    graph = fx.Graph()
    made = {"x": graph.placeholder("x")}
    for name, reads in edges.items():
        args = [made[r] for r in reads.split()]
        made[name] = graph.call_function(torch.cat, (args,), name=name)
    graph.output(list(made.values())[-1])
    flow = analyze(fx.GraphModule(nn.Module(), graph))
    return flow, {n.name: n for n in flow.index}


def places(plan):
    return {n.name: keys for n, keys in plan.items()}


def test_the_drawing_of_rematerialize():
    flow, n = drawn(a="x", b="a", c="b", d="c")
    plan = Plan.of({n["a"]: 0, n["b"]: 0, n["c"]: 0, n["d"]: 1})
    copied = rematerialize(flow, plan, into=1, keep=[n["a"]])
    assert places(copied) == {"a": (0,), "b": (0, 1), "c": (0, 1), "d": (1,)}
    assert places(prune(flow, copied)) == {"a": (0,), "b": (1,), "c": (1,), "d": (1,)}
    assert places(rematerialize(flow, plan, into=1)) == {"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (1,)}


def test_rematerialize_stops_at_the_parent_and_at_what_runs_once():
    class Model(nn.Module):
        def forward(self, x):
            return torch.dropout(x.sin(), 0.5, True).cos().tan()

    flow = analyze(fx.symbolic_trace(Model()))
    sin, dropout, cos, tan = flow.nodes
    plan = Plan.of({sin: 0, dropout: 0, cos: 0, tan: 1})
    assert rematerialize(flow, plan, into=1)[dropout] == (0,)
    assert rematerialize(flow, plan, into=1)[cos] == (0, 1)
    hosted = Plan.of({sin: 0, dropout: 0, tan: 1})
    assert rematerialize(flow, hosted, into=1) == hosted


def test_rematerialize_copies_through_members_of_tuples():
    class Model(nn.Module):
        def forward(self, x):
            a, b = x.chunk(2)
            return (a + b).sin()

    flow = analyze(fx.symbolic_trace(Model()))
    chunk, add, sin = flow.nodes
    plan = rematerialize(flow, Plan.of({chunk: 0, add: 0, sin: 1}), into=1)
    assert places(plan) == {"chunk": (0, 1), "add": (0, 1), "sin": (1,)}
    member = next(iter(flow.followers))
    kept = rematerialize(flow, Plan.of({chunk: 0, add: 0, sin: 1}), into=1, keep=[member])
    assert places(kept)["chunk"] == (0,)


def test_prune_keeps_effects_and_what_the_parent_reads():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(1))

        def forward(self, x):
            self.n.add_(x)
            dead = x.tan()  # noqa: F841
            return x.sin()

    flow = analyze(fx.symbolic_trace(Model()))
    plan = Plan.of({n: [0, 1] if n not in flow.once else [0] for n in flow.nodes})
    assert places(prune(flow, plan)) == {"add_": (0,), "tan": (), "sin": (0,)}


def test_the_drawing_of_refine():
    flow, n = drawn(a0="x", b0="a0", a1="b0", b1="x")
    plan = refine(flow, Plan.of({node: name[0] for name, node in n.items() if name[0] in "ab"}))
    assert places(plan) == {"a0": (("a", 0),), "b0": (("b", 1),), "b1": (("b", 1),), "a1": (("a", 2),)}


def test_refine_keeps_what_it_knows_of_a_part_and_the_parent():
    flow, n = drawn(a="x", h="a", c="h")
    part = Part("p", torch.device("cpu"))
    plan = refine(flow, Plan({n["a"]: ("p",), n["c"]: ("p",)}, {"p": part}, "note"))
    assert plan.note == "note"
    assert list(plan.parts) == [("p", 0), ("p", 1)]
    assert {p.device for p in plan.parts.values()} == {torch.device("cpu")}
    assert plan.home(n["h"]) is PARENT
    assert_legal(flow, plan)


def test_refine_visits_a_label_as_seldom_as_two_labels_allow():
    """A zigzag of two labels and a free chain of each: the free ones join the visits that are there."""
    flow, n = drawn(a0="x", b0="a0", a1="b0", b1="a1", a2="x", b2="x", out="b1 a2 b2")
    labels = {node: name[0] for name, node in n.items() if name[0] in "ab"} | {n["out"]: "b"}
    assert list(refine(flow, Plan.of(labels)).parts) == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]


def test_refine_makes_any_labels_legal_also_with_copies():
    flow, n = drawn(a="x", b="a", c="b", d="c", e="d a", f="e b")
    plan = Plan.of({n["a"]: [0, 1], n["b"]: [1, 0], n["c"]: 0, n["d"]: 1, n["e"]: 0, n["f"]: [1, 0]})
    assert_legal(flow, refine(flow, plan))


def test_merge_joins_and_refuses_a_cycle():
    flow, n = drawn(a="x", b="a", c="b", d="c")
    plan = Plan.of({n["a"]: 0, n["b"]: 1, n["c"]: 2, n["d"]: 3})
    joined = merge(flow, plan, 1, 2)
    assert places(joined)["c"] == (1,) and list(joined.parts) == [0, 1, 3]
    with pytest.raises(CycleError, match="part 0 waits for part 1"):
        merge(flow, plan, 0, 2)
    with pytest.raises(PlanError, match="SK206: the plan has no part 9"):
        merge(flow, plan, 0, 9)


def test_a_merge_of_copies_leaves_one(chain):
    flow = analyze(chain)
    plan = Plan.of({n: [0, 1] for n in flow.nodes})
    assert set(merge(flow, plan, 0, 1).places.values()) == {(0,)}
    assert len(split(chain, merge(flow, plan, 0, 1)).parts) == 1


def borders(made):
    return {key: ([n.name for n in s.inputs], [n.name for n in s.outputs]) for key, s in made.subgraphs.items()}


def test_the_drawing_of_relay():
    flow, n = drawn(a="x", b="a", c="b a", d="c x")
    plan = Plan.of({n["a"]: 0, n["b"]: 1, n["c"]: 2, n["d"]: 3})
    made = split(flow.root, relay(flow, plan))
    assert borders(made) == {
        0: (["x"], ["x", "a"]),
        1: (["x", "a"], ["x", "a", "b"]),
        2: (["x", "a", "b"], ["x", "c"]),
        3: (["x", "c"], ["d"]),
    }
    assert_same(flow.root, made, torch.ones(2))
    direct = split(flow.root, plan)
    assert borders(direct)[3] == (["x", "c"], ["d"]) and borders(direct)[1] == (["a"], ["b"])


def test_relay_takes_early_results_to_the_end():
    class Model(nn.Module):
        def forward(self, x, y):
            a = x.sin()
            b = a.cos()
            return a, y, b.tan()

    gm = fx.symbolic_trace(Model())
    flow = analyze(gm)
    made = split(gm, relay(flow, Plan.of({node: i for i, node in enumerate(flow.nodes)})))
    assert borders(made) == {0: (["x"], ["sin"]), 1: (["sin"], ["sin", "cos"]), 2: (["sin", "cos"], ["sin", "tan"])}
    assert_same(gm, made, torch.ones(2), torch.ones(2))


def test_relay_of_copies_sends_what_is_read_only():
    flow, n = drawn(a="x", b="a", c="a b")
    made = split(flow.root, relay(flow, Plan.of({n["a"]: [0, 2], n["b"]: [1], n["c"]: [2]})))
    assert borders(made) == {0: (["x"], ["x", "a"]), 1: (["x", "a"], ["x", "b"]), 2: (["x", "b"], ["c"])}
    assert_same(flow.root, made, torch.ones(2))


def test_relay_refuses_the_parent_in_between():
    flow, n = drawn(a="x", b="a", h="b", c="h")
    plan = Plan.of({n["a"]: 0, n["c"]: 1})
    with pytest.raises(PlanError, match=r"(?s)SK209: the parent computes b and 1 more, between.*Stages") as caught:
        relay(flow, plan)
    assert caught.value.nodes == ("b", "h")
    with pytest.raises(PlanError, match="SK209"):  # also where the plan says so itself
        split(flow.root, Plan(plan.places, routing="relay"))
    with pytest.raises(PlanError, match="SK206: the plan has routing='pigeon'"):
        Plan(plan.places, routing="pigeon")


def test_routing_survives_every_rewrite():
    flow, n = drawn(a0="x", b0="a0", a1="b0", b1="x")
    plan = relay(flow, Plan.of({node: name[0] for name, node in n.items() if name[0] in "ab"}))
    rewrites = [
        refine(flow, plan),
        condense(flow, plan),
        prune(flow, plan),
        rematerialize(flow, plan, into="b"),
        merge(flow, plan, "a", "b"),
    ]
    assert [p.routing for p in rewrites] == ["relay"] * 5
    assert split(flow.root, plan, on_cycle="refine").plan.routing == "relay"


def test_condense_joins_cycles_and_nothing_else():
    """Two cycles, and a part before, between and behind them."""
    flow, n = drawn(s="x", a0="s", b0="a0", a1="b0", m="a1", c0="m", d0="c0", c1="d0", t="c1", b1="x")
    plan = Plan.of({node: name[0] for name, node in n.items() if name[0] in "sabmcdt"})
    joined = condense(flow, plan)
    assert {name: key for name, (key,) in places(joined).items()} == {
        "s": "s", "a0": "a", "b0": "a", "a1": "a", "m": "m", "c0": "c", "d0": "c", "c1": "c", "t": "t", "b1": "a",
    }  # fmt: skip
    assert list(joined.parts) == ["s", "a", "m", "c", "t"]
    assert_legal(flow, joined)
    assert condense(flow, joined) == joined


def test_condense_takes_nodes_of_the_parent_on_the_way_too():
    flow, n = drawn(a="x", h="a", c="h", k="c")
    part = Part("p", torch.device("cpu"))
    joined = condense(flow, Plan({n["a"]: ("p",), n["c"]: ("p",)}, {"p": part}, "note"))
    assert places(joined) == {"a": ("p",), "h": ("p",), "c": ("p",), "k": (PARENT,)}
    assert joined.parts == {"p": part} and joined.note == "note"


def test_condense_makes_one_of_copies():
    flow, n = drawn(a="x", b="a", c="b", d="c", e="d a")
    plan = Plan.of({n["a"]: [0, 1], n["b"]: 0, n["c"]: 1, n["d"]: 0, n["e"]: [0, 1, 2]})
    assert places(condense(flow, plan)) == {"a": (0,), "b": (0,), "c": (0,), "d": (0,), "e": (0, 2)}


def test_a_cycle_through_an_effect_is_joined():
    class Model(nn.Module):
        def forward(self, x):
            y = x.clone()
            a = y.sin()
            y.add_(1)
            return a.cos() + y.tan()

    gm = fx.symbolic_trace(Model())
    labels = {"clone": 0, "sin": 1, "add_": 0, "cos": 0, "tan": 1, "add": 1}
    with pytest.raises(CycleError):
        split(gm, labels)
    made = split(gm, labels, on_cycle="merge")
    assert list(made.parts) == [0]
    assert_same(gm, made, torch.ones(2))


def test_cycles_are_refined_or_joined_if_so_asked():
    flow, n = drawn(a0="x", b0="a0", a1="b0", b1="x", e="a1 b1")
    labels = {name: name[0] for name in n if name[0] in "ab"} | {"e": "e"}
    with pytest.raises(CycleError):
        split(flow.root, labels)
    refined = split(flow.root, labels, on_cycle="refine")
    assert list(refined.parts) == [("a", 0), ("b", 1), ("a", 2), ("e", 3)]
    joined = split(flow.root, labels, on_cycle="merge")
    assert list(joined.parts) == ["a", "e"]
    for made in (refined, joined):
        assert_same(flow.root, made, torch.ones(2))
    with pytest.raises(PolicyError, match=r"SK302: on_cycle='wait'.*\n.*'error', 'refine' or 'merge'"):
        split(flow.root, labels, on_cycle="wait")


def test_plans_without_a_cycle_are_left_alone():
    flow, _ = drawn(a="x", b="a")
    for on_cycle in ("refine", "merge"):
        assert list(split(flow.root, {"a": 0, "b": 1}, on_cycle=on_cycle).parts) == [0, 1]


def test_prune_drops_a_part_that_nobody_needs():
    flow, n = drawn(a="x", dead="a", deader="dead", b="a")
    plan = prune(flow, Plan.of({n["a"]: 0, n["dead"]: 1, n["deader"]: 2, n["b"]: 3}))
    assert places(plan) == {"a": (0,), "dead": (), "deader": (), "b": (3,)}
    made = split(flow.root, plan)
    assert list(made.parts) == [0, 3]
    assert_same(flow.root, made, torch.ones(2))


def test_prune_keeps_what_acts():
    class Model(nn.Module):
        def forward(self, x):
            torch._assert(x.sum() > 0, "positive")
            noise = torch.rand_like(x).sin()  # noqa: F841
            return x.sin()

    flow = analyze(fx.symbolic_trace(Model()))
    kept = places(prune(flow, Plan.of(dict.fromkeys(flow.nodes, 0))))
    assert kept == {"sum_1": (0,), "gt": (0,), "_assert": (0,), "rand_like": (0,), "sin": (), "sin_1": (0,)}


def test_what_is_needed_cannot_be_dropped():
    class Model(nn.Module):
        def forward(self, x):
            print_like = x.add_(1)  # noqa: F841
            return x.sin().cos()

    flow = analyze(fx.symbolic_trace(Model()))
    add, sin, cos = flow.nodes
    for dropped, why in [(add, "it writes memory"), (sin, "cos reads it"), (cos, "output reads it")]:
        plan = Plan({add: (0,), sin: (0,), cos: (0,)}).place({dropped: ()})
        with pytest.raises(PlanError, match=f"(?s)SK208: {dropped.name} is in no part of the plan, but {why}.*prune"):
            split(flow.root, plan)
        with pytest.raises(PlanError, match="SK208"):
            assert_legal(flow, plan)


def test_refine_of_a_plan_that_drops_what_is_needed_says_so():
    flow, n = drawn(a="x", b="a", c="b")
    plan = Plan({n["a"]: (), n["b"]: (0,), n["c"]: (1,)})
    with pytest.raises(PlanError, match="SK208"):
        split(flow.root, refine(flow, plan))


def test_refine_lets_a_later_visit_read_a_home_that_has_run():
    """`a` has copies in 0 and 1; the second visit of 1 has no copy, so it reads the home's copy."""

    class Model(nn.Module):
        def forward(self, x):
            a = x.sin()
            b = a.cos()
            c = b.tan()
            return c + a

    gm = fx.symbolic_trace(Model())
    flow = analyze(gm)
    sin, cos, tan, add = flow.nodes
    plan = refine(flow, Plan.of({sin: [0, 1], cos: 1, tan: 2, add: 1}))
    assert_legal(flow, plan)
    assert_same(gm, split(gm, plan), torch.ones(2))


def test_refine_takes_the_plan_of_a_split(chain):
    made = split(chain, {"add": 0, "mul": 0, "sub": 1})
    assert list(refine(made.flow, made.plan).parts) == [(0, 0), (1, 1)]


def test_refine_makes_no_cycle_where_the_index_of_a_tuple_is_computed():
    def write(g):
        x = g.placeholder("x")
        parts = g.call_function(torch.chunk, (x, 2))
        first = g.call_method("sum", (g.call_function(operator.getitem, (parts, 0)),))
        index = g.call_function(int, (g.call_method("item", (first,)),))
        g.output(g.call_function(operator.getitem, (parts, index)))

    gm = graph_of(write)
    assert_same(gm, split(gm, RoundRobin(2)), torch.tensor([0.0, 1.0, 5.0, 6.0]))


def test_a_part_merged_with_itself_is_called_as_before(chain):
    flow = analyze(chain)
    plan = Plan(dict.fromkeys(flow.nodes, (0,)), {0: Part(0, call="checkpoint")})
    assert merge(flow, plan, 0, 0) == plan
    with pytest.raises(PlanError, match="SK206: the plan has no part 7"):
        rematerialize(flow, plan, into=7)
