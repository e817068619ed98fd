"""The code of a graph is what fx writes, byte for byte, or it is left to fx."""

from __future__ import annotations

import operator
from collections import namedtuple
from typing import Any

import pytest
import torch
from longgraphs import SHAPES
from torch import fx
from zoographs import specimens

from splitkit.engine.codegen import source_code
from splitkit.engine.codegen.writer import LeanGraph
from splitkit.engine.split import split, split_module
from splitkit.policies import RoundRobin

ZOO = specimens()
Pair = namedtuple("Pair", "a b")


def parts_of(gm: fx.GraphModule) -> list[fx.Graph]:
    """The graphs of two splits: of torch's style, and of splitkit's own."""
    torchs, own = split_module(gm, None, RoundRobin(3)), split(gm, RoundRobin(3)).module
    made = [m for whole in (torchs, own) for m in (whole, *whole.children()) if isinstance(m, fx.GraphModule)]
    return [m.graph for m in made if isinstance(m.graph, LeanGraph)]


def picture(code: Any) -> tuple[Any, ...]:
    return code.src, list(code.globals.items()), code._lineno_map, code._prologue_start


def assert_as_fx(graph: fx.Graph) -> bool:
    """Whether the code was not left to fx; if not, it must be the same."""
    code = source_code.python_code(graph, "self")
    if code is not None:
        assert picture(code) == picture(fx.Graph.python_code(graph, "self"))
    return code is not None


def test_the_fast_way_is_taken_on_the_torch_that_is_tested():
    assert source_code.is_exact()


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_the_code_of_parts_and_parents_is_that_of_fx(specimen):
    for graph in (specimen.graph.graph, *parts_of(specimen.graph)):
        assert_as_fx(graph)


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_the_code_of_long_graphs_is_that_of_fx(make):
    for graph in parts_of(make(12)):
        assert_as_fx(graph)


def test_most_of_the_zoo_is_not_left_to_fx():
    graphs = [graph for specimen in ZOO.values() for graph in parts_of(specimen.graph)]
    taken = [assert_as_fx(graph) for graph in graphs if graph._codegen._body_transformer is None]
    assert sum(taken) > 0.9 * len(taken) > 0.6 * len(graphs)  # the code of others restores modes after an error


def _graph() -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    return graph, graph.placeholder("x")


def named_tuple(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(torch.stack, (Pair(x, x),))


def complex_number(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(torch.add, (x, complex(0.0, float("inf"))))


def operator_as_argument(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(map, (torch.ops.aten.relu.default, [x]))


def a_node_called_like_a_global(graph: fx.Graph, x: fx.Node) -> fx.Node:
    other = graph.create_node("call_function", torch.relu, (x,), name="operator_matmul_of_mine")
    other = graph.create_node("call_function", namedtuple, ("P", other), name="collections_namedtuple")
    return graph.call_function(namedtuple, ("Q", other))


def a_name_of_python(graph: fx.Graph, x: fx.Node) -> fx.Node:
    made = graph.call_function(torch.relu, (x,))
    made.name = "len"
    return made


def two_nodes_of_one_name(graph: fx.Graph, x: fx.Node) -> fx.Node:
    first, second = graph.call_function(torch.relu, (x,)), graph.call_function(torch.sin, (x,))
    second.name = first.name
    return graph.call_function(operator.add, (first, second))


@pytest.mark.parametrize(
    "build",
    [
        named_tuple,
        complex_number,
        operator_as_argument,
        a_node_called_like_a_global,
        a_name_of_python,
        two_nodes_of_one_name,
    ],
)
def test_what_is_rare_is_left_to_fx(build):
    graph, x = _graph()
    graph.output(build(graph, x))
    assert not assert_as_fx(graph)


def test_a_graph_with_a_generator_of_its_own_is_left_to_fx():
    graph, x = _graph()
    graph.output(x)
    graph.on_generate_code(lambda current: current or (lambda body: [*body, "# mine\n"]))
    assert not assert_as_fx(graph)


def test_options_are_left_to_fx(monkeypatch):
    graph = LeanGraph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    graph.output(x)
    assert "f32[2]" in graph.python_code("self", verbose=True).src
    monkeypatch.setenv("FX_GRAPH_SHOW_META", "1")
    assert "val:" in graph.python_code("self").src


def test_what_dies_is_freed_on_its_line():
    graph, x = _graph()
    unread = graph.call_function(torch.sin, (x,))
    graph.output(graph.call_function(operator.add, (graph.call_function(torch.relu, (x,)), x)))
    assert f"{unread.name} = torch.sin(x);  {unread.name} = None" in source_code.python_code(graph, "self").src
    assert assert_as_fx(graph)
