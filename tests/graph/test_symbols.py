"""Symbolic sizes: what a node yielded, which symbols are in it, and who gives them a value."""

from __future__ import annotations

import torch
from torch import fx, nn

from splitkit.costs import unit
from splitkit.engine.split import split
from splitkit.graph.dataflow import analyze
from splitkit.graph.node_values import value_bytes
from splitkit.graph.storages import is_symbolic, symbol_nodes, symbols_of, value_of
from splitkit.plans.record import Plan
from splitkit.testing import assert_same


class Sized(nn.Module):
    def forward(self, x):
        return x.sin().view(x.size(0), -1).cos()


def exported():
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Sized(), (torch.ones(3, 2, 2),), dynamic_shapes=({0: batch},))
    gm = program.module(check_guards=False)
    gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)[0].name = "size"
    return gm


def renamed(gm):
    """The same as a Dynamo backend writes it."""
    for node in gm.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta.pop("val")
    return gm


def test_values_are_val_or_else_example_value():
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert value_of(node) is None and value_bytes(node) == 0
    node.meta["example_value"] = torch.ones(3)
    assert value_of(node) is node.meta["example_value"] and value_bytes(node) == 12
    node.meta["val"] = torch.ones(5)
    assert value_of(node) is node.meta["val"] and value_bytes(node) == 20
    node.meta["val"] = None  # known to be None
    assert value_of(node) is None


def test_what_is_symbolic():
    gm = exported()
    values = {n.name: value_of(n) for n in gm.graph.nodes}
    size = values["size"]
    for value in (values["x"], size, size * 2, size + 0.5, size > 5, (1, [values["x"]])):
        assert is_symbolic(value) and [str(s) for s in symbols_of(value)] == [str(size)]
    for value in (None, 1, 2.0, "s0", torch.ones(2), (1, [torch.ones(2)])):
        assert not is_symbolic(value) and not symbols_of(value)


def test_a_symbol_is_bound_by_the_first_node_that_is_it():
    for gm in (exported(), renamed(exported())):
        (binder,) = symbol_nodes(gm.graph).values()
        assert binder.name == "size"
        flow = analyze(gm)
        by_name = {n.name: n for n in flow.index}
        assert flow.symbols(by_name["sin"]) == (binder,)
    assert not symbol_nodes(fx.symbolic_trace(Sized()).graph)


def test_a_tensor_brings_the_symbol_that_its_part_has():
    for gm in (exported(), renamed(exported())):
        made = split(gm, {"size": 0, "sin": 0, "view": 1, "cos": 2}, costs=unit(gm))
        assert [n.name for n in made.subgraphs[1].inputs] == ["size", "sin"]
        # part 1 does not have the symbol at home: it does not hand it on, nor does part 2 wait for part 0
        assert [n.name for n in made.subgraphs[2].inputs] == ["view"]
        for batch in (3, 5):
            assert_same(gm, made, torch.ones(batch, 2, 2))


def test_a_tensor_brings_a_symbol_that_is_an_input():
    graph = fx.Graph()
    template = {n.name: value_of(n) for n in exported().graph.nodes}
    size, x = graph.placeholder("size"), graph.placeholder("x")
    size.meta["example_value"], x.meta["example_value"] = template["size"], template["x"]
    nodes = [graph.call_function(f, (x,)) for f in (torch.sin, torch.cos)]
    sin, cos = nodes
    cos.args = (sin,)
    for node in nodes:
        node.meta["example_value"] = template["sin"]
    graph.output(cos)
    gm = fx.GraphModule(nn.Module(), graph)
    made = split(gm, Plan.of({sin: 0, cos: 1}))
    assert [n.name for n in made.subgraphs[0].inputs] == ["size", "x"]
    assert [n.name for n in made.subgraphs[1].inputs] == ["size", "sin"]
    assert torch.equal(made(3, torch.ones(3, 2, 2)), torch.ones(3, 2, 2).sin().cos())


def test_a_symbol_that_no_node_gives_is_left_to_the_tensor():
    gm = exported()
    size = next(n for n in gm.graph.nodes if n.name == "size")
    size.replace_all_uses_with(-1)
    view = next(n for n in gm.graph.nodes if n.name == "view")
    view.args = (view.args[0], [-1, 4])
    gm.graph.erase_node(size)
    gm.recompile()
    flow = analyze(gm)
    assert not any(flow.symbols(n) for n in flow.nodes)
    made = split(gm, {"sin": 0, "view": 1, "cos": 2}, costs=unit(gm))
    assert [len(s.inputs) for s in made.subgraphs.values()] == [1, 1, 1]
