from __future__ import annotations

import pytest
import torch
from handgraphs import graph_of
from torch import fx, nn

import splitkit as sk
from splitkit.engine.complete import complete_plan
from splitkit.errors import CycleError
from splitkit.graph.dataflow import analyze
from splitkit.plans.part_order import part_order
from splitkit.plans.parts import PARENT
from splitkit.plans.record import Plan


def ordered(gm, labels):
    flow = analyze(gm)
    return part_order(flow, complete_plan(flow, Plan.of({n: labels[n.name] for n in flow.nodes})))


def test_the_one_that_came_first_in_the_graph_runs_first():
    class Model(nn.Module):
        def forward(self, x):
            return x + 1, x + 2, x + 3, x + 4

    units = ordered(fx.symbolic_trace(Model()), {"add": 3, "add_1": "b", "add_2": 0, "add_3": 1})
    assert [key for key, node in units if node is None] == [3, "b", 0, 1]
    assert [node.name for key, node in units if key is PARENT] == ["x", "output"]


def test_a_later_part_runs_first_where_data_demands_it():
    class Model(nn.Module):
        def forward(self, x, y):
            return (x + 1) - (y * 2)

    units = ordered(fx.symbolic_trace(Model()), {"add": 0, "mul": 1, "sub": 0})
    assert [key for key, node in units if node is None] == [1, 0]


def test_a_cycle_is_printed_with_its_nodes_and_the_remedy(chain):
    with pytest.raises(CycleError) as caught:
        ordered(chain, {"add": 0, "mul": 1, "sub": 0})
    error = caught.value
    assert error.code == "SK203"
    assert "part 0 waits for part 1: sub reads mul" in error.reason
    assert "part 1 waits for part 0: mul reads add" in error.reason
    assert "refine" in error.remedy
    assert set(error.nodes) == {"add", "mul", "sub"}


def test_a_cycle_through_an_effect_says_so():
    class Model(nn.Module):
        def forward(self, x):
            a = x + 1
            x.mul_(2)
            return a, x - 3

    with pytest.raises(CycleError, match="mul_ must run after the effect or read of add"):
        ordered(fx.symbolic_trace(Model()), {"add": 0, "mul_": 1, "sub": 0})


def test_the_shortest_cycle_is_printed():
    graph = fx.Graph()
    node = graph.placeholder("x")
    for _ in range(40):
        node = graph.call_function(torch.sin, (node,))
    graph.output(node)
    gm = fx.GraphModule(nn.Module(), graph)
    names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    labels = {name: i // 2 for i, name in enumerate(names)} | {names[-1]: 18}
    with pytest.raises(CycleError) as caught:
        ordered(gm, labels | {names[-2]: 19, names[-3]: 18})
    assert caught.value.reason.count("waits for") == 2


def test_an_effect_waits_for_every_copy(nodes):
    class Model(nn.Module):
        def forward(self, x):
            y = x.sin()
            z = y.cos()
            x.add_(1)
            return z + y

    gm = fx.symbolic_trace(Model())
    n = nodes(gm)
    flow = analyze(gm)
    plan = complete_plan(flow, Plan.of({n["sin"]: [0, 2], n["cos"]: 0, n["add_"]: 1, n["add"]: 2}))
    assert [key for key, node in part_order(flow, plan) if node is None] == [0, 2, 1]


def test_a_cycle_through_nodes_that_the_parent_and_a_part_share_is_found():
    """Nodes in (PARENT, 1) are no unit: in the parent each runs by itself, and waits for the others."""

    def write(g):
        x = g.placeholder("x")
        before = g.create_node("call_function", torch.sin, (x,), name="before")
        shared = g.create_node("call_function", torch.cos, (before,), name="shared")
        other = g.create_node("call_function", torch.tan, (shared,), name="other")
        after = g.create_node("call_function", torch.exp, (other,), name="after")
        g.output((after, g.create_node("call_function", torch.neg, (other,), name="last")))

    places = {"before": 0, "shared": [None, 1], "other": [None, 1], "after": 0, "last": 1}
    with pytest.raises(CycleError):
        sk.split(graph_of(write), places)
