from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from splitkit.dataflow import analyze
from splitkit.errors import CycleError, PlanError
from splitkit.plan import HOST, Part, Plan
from splitkit.rewrite import merge, prune, refine, rematerialize
from splitkit.split import split
from splitkit.testing import assert_legal


def drawn(**edges):
    """A graph from a drawing: `c="a b"` reads a and b; `x` is the input. Returns flow and name -> node."""
    graph = fx.Graph()
    made = {"x": graph.placeholder("x")}
    for name, reads in edges.items():
        args = [made[r] for r in reads.split()]
        made[name] = graph.call_function(torch.stack, (args,), name=name)
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


def test_rematerialize_stops_at_the_host_and_at_what_runs_once():
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


def test_prune_keeps_effects_and_what_the_host_reads():
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


def test_refine_keeps_what_it_knows_of_a_part_and_the_host():
    flow, n = drawn(a="x", h="a", c="h")
    part = Part("p", torch.device("cpu"))
    plan = refine(flow, Plan({n["a"]: ("p",), n["c"]: ("p",)}, {"p": part}, "note"))
    assert plan.note == "note"
    assert list(plan.parts) == [("p", 0), ("p", 1)]
    assert {p.device for p in plan.parts.values()} == {torch.device("cpu")}
    assert plan.home(n["h"]) is HOST
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


def test_merge_joins_and_refuses_a_circle():
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
