"""Opaque code keeps its place when it reaches a buffer that is not an argument; `declare` lets it move."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from campaigns import some_of_all
from torch import fx, nn

import splitkit as sk
from splitkit.extend import declare
from splitkit.policies import BySupport


class Held(nn.Module):
    """A leaf that splitkit does not know; it reaches a buffer in one of many ways."""

    def __init__(self, buffer, way, act):
        super().__init__()
        self.act = act
        if way == "list":
            self.reach = [buffer].__getitem__
        elif way == "dict":
            self.reach = {0: [buffer]}[0].__getitem__
        elif way == "closure":
            self.reach = lambda _: buffer
        else:
            GLOBALS["held"] = buffer
            self.reach = lambda _: GLOBALS["held"]

    def forward(self, x):
        return self.act(self.reach(0), x)


GLOBALS = {}


ACTS = {
    "writes": lambda held, x: (held.add_(1), x * 1)[1],
    "reads": lambda held, x: x + held,
    "resizes": lambda held, x: (held.data.mul_(3), x * 1)[1],
    "lends": lambda held, x: held,
}


def around_a_leaf(way, act, kind="buffer"):
    """An op that reads the buffer, the leaf, an op that writes it, an op that reads it again."""
    root = nn.Module()
    if kind == "buffer":
        root.register_buffer("held", torch.zeros(3))
    else:
        root.register_parameter("held", nn.Parameter(torch.zeros(3), requires_grad=False))
    root.leaf = Held(root.held, way, ACTS[act])
    graph = fx.Graph()
    x, y, held = graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("held")
    early = graph.call_function(torch.add, (x, held))
    leaf = graph.call_module("leaf", (y,))
    middle = graph.call_function(torch.mul, (held, 2))
    write = graph.call_method("add_", (leaf if act == "lends" else held, 5))
    late = graph.call_function(torch.sub, (early, held))
    graph.output((early, leaf, middle, write, late))
    return root, fx.GraphModule(root, graph)


WAYS = list(product(["list", "dict", "closure", "global"], ACTS))


@pytest.mark.parametrize(("way", "kind"), some_of_all(WAYS, ["buffer", "parameter"], always=()))
def test_opaque_code_that_reaches_a_buffer_on_its_own_keeps_its_place(way, kind):
    root, gm = around_a_leaf(*way, kind)

    def run(module):
        root.held.data.zero_()
        return [v.tolist() for v in module(torch.ones(3), torch.zeros(3))]

    whole, nodes, right = run(gm), [n for n in gm.graph.nodes if n.op.startswith("call")], 0
    for labels in range(2 ** len(nodes)):
        where = {n: labels // 2**i % 2 for i, n in enumerate(nodes)}
        for options in ({}, {"parameters": "hoist", "on_cycle": "refine"}):
            try:
                made = sk.split(gm, where, **options)
            except sk.SplitError as error:
                assert error.code == "SK203" and "on_cycle" not in options
            else:
                assert run(made.module) == whole
                right += 1
    assert right >= 2 ** len(nodes)


def test_by_support_does_not_move_ops_across_an_opaque_leaf_that_updates_a_buffer():
    root, gm = around_a_leaf("list", "writes")
    whole = gm(torch.ones(3), torch.zeros(3))[4].tolist()
    root.held.zero_()
    made = sk.split(gm, BySupport(lambda n: n.op != "call_module"))
    assert made(torch.ones(3), torch.zeros(3))[4].tolist() == whole


def test_a_refusal_for_opaque_code_names_declare_and_declaring_lifts_it():
    class Harmless(nn.Module):
        def forward(self, x):
            return x * 1

    root = nn.Module()
    root.register_buffer("held", torch.zeros(3))
    root.leaf = Harmless()
    graph = fx.Graph()
    x, held = graph.placeholder("x"), graph.get_attr("held")
    first = graph.call_function(torch.add, (x, held))
    leaf = graph.call_module("leaf", (x,))
    graph.output((graph.call_function(torch.sub, (first, held)), leaf))
    gm = fx.GraphModule(root, graph)
    where = {"add": 0, "leaf": 1, "sub": 0}
    with pytest.raises(sk.SplitError, match=r"SK203(.|\n)*leaf(.|\n)*declare"):
        sk.split(gm, where)
    declare(Harmless)
    assert sk.split(gm, where)(torch.ones(3))[0].tolist() == [1.0] * 3


def test_opaque_code_without_attributes_orders_nothing_that_it_was_not_given():
    def opaque(x):
        return x * 1

    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(torch.sin, (x,))
    leaf = graph.call_function(opaque, (y,))
    graph.output((graph.call_function(torch.add, (first, x)), leaf))
    made = sk.split(fx.GraphModule(nn.Module(), graph), {"sin": 0, "opaque": 1, "add": 0})
    assert len(made.parts) == 2
