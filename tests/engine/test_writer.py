"""Nodes are written in a fast, private way that gives what the public calls give; else by the public calls."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn
from zoographs import specimens

from splitkit.costs import unit
from splitkit.engine.codegen import writer
from splitkit.engine.codegen.writer import Writer, is_fast
from splitkit.engine.split import split, split_module
from splitkit.policies import RoundRobin
from splitkit.testing import assert_same

ZOO = specimens()


def picture(graph):
    nodes = [(n.name, n.op, n.target, str(n.args), str(n.kwargs), n.type, str(list(n.users))) for n in graph.nodes]
    return nodes, graph.python_code("self").src, [str(n.prev) for n in graph.nodes], len(graph.nodes)


@pytest.fixture
def publicly(monkeypatch):
    """A context in which the private way is not taken."""

    def run(make):
        with monkeypatch.context() as patch:
            patch.setattr(writer, "is_fast", lambda: False)
            return make()

    return run


def test_the_private_way_is_taken_on_the_torch_that_is_tested():
    assert is_fast()


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_both_ways_give_the_same_splits(specimen, publicly):
    def split_both():
        made = split(specimen.graph, RoundRobin(3), costs=unit(specimen.graph))
        torchs = split_module(specimen.graph, None, RoundRobin(3))
        return [made.module, *made.parts.values(), torchs, *torchs.children()]

    fast, public = split_both(), publicly(split_both)
    for one, other in zip(fast, public, strict=True):
        if isinstance(one, fx.GraphModule):
            assert picture(one.graph) == picture(other.graph)


def test_public_splits_run(publicly):
    specimen = ZOO["mutation"]
    made = publicly(lambda: split(specimen.graph, RoundRobin(2), costs=unit(specimen.graph)))
    assert_same(specimen.graph, made, *specimen.inputs)


@pytest.mark.parametrize(
    "missing", ["_graph_namespace", "_find_nodes_lookup_table", "_root", "_len"], ids=lambda name: name
)
def test_without_a_private_field_the_public_way_is_taken(monkeypatch, missing, chain):
    """As if a later torch had dropped it: reading or writing it fails in splitkit only."""

    class Without:
        def __init__(self, graph):
            object.__setattr__(self, "graph", graph)

        def __getattr__(self, name):
            if name == missing:
                raise AttributeError(name)
            return getattr(self.graph, name)

        def __setattr__(self, name, value):
            if name == missing:
                raise AttributeError(name)
            setattr(self.graph, name, value)

    private = writer._append
    monkeypatch.setattr(writer, "_append", lambda graph, *rest: private(Without(graph), *rest))
    is_fast.cache_clear()
    try:
        assert not is_fast()
        assert_same(chain, split(chain, RoundRobin(2)), torch.ones(2))
    finally:
        monkeypatch.undo()
        is_fast.cache_clear()
    assert is_fast()


def test_another_order_of_nodes_or_names_is_noticed(monkeypatch):
    """As if private fields were still there, but meant something else."""
    private = writer._append
    changes = {
        "name": lambda graph, op, target, args, kwargs, name, *rest: private(
            graph, op, target, args, kwargs, name + "_", *rest
        ),
        "kwargs": lambda graph, op, target, args, kwargs, *rest: private(graph, op, target, args, {}, *rest),
        "type": lambda graph, op, target, args, kwargs, name, type_expr, *rest: private(
            graph, op, target, args, kwargs, name, None, *rest
        ),
    }
    for name, change in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(writer, "_append", change)
            assert not is_fast.__wrapped__(), name


def test_copies_keep_all_there_is_to_a_node():
    graph = fx.Graph()
    x = graph.placeholder("x", torch.Tensor)
    y = graph.call_function(torch.add, (x, [x, slice(None, x)]), {"alpha": x}, name="sum_7", type_expr=int)
    y.meta["mark"] = "mine"
    to = fx.Graph()
    write = Writer(to)
    value = write.placeholder("x", x.type)
    copied = write.copy(y, lambda node: value)
    assert (copied.name, copied.op, copied.target, copied.type) == ("sum_7", "call_function", torch.add, int)
    assert str((copied.args, copied.kwargs)) == str((y.args, y.kwargs)) and copied.all_input_nodes == [value]
    assert copied.meta == y.meta and copied.meta is not y.meta
    assert write.copy(y, lambda node: value, torch.sub, "other").name == "other"
    assert write.copy(y, lambda node: value).name not in ("sum_7", "other")  # they are taken
    to.output(copied)
    to.lint()


def test_public_calls_in_between_see_what_was_written():
    graph = fx.Graph()
    write = Writer(graph)
    x = write.placeholder("x")
    first = write.append("call_function", torch.relu, (x,), "relu")
    second = graph.call_function(torch.relu, (first,))
    third = write.append("call_function", torch.relu, (second,), "relu")
    assert len({first.name, second.name, third.name}) == 3
    assert graph.find_nodes(op="call_function", target=torch.relu) == [first, second, third]
    graph.output(third)
    graph.erase_node(graph.create_node("call_function", operator.neg, (x,)))
    graph.lint()
    assert torch.equal(fx.GraphModule(nn.Module(), graph)(torch.ones(2)), torch.ones(2))
