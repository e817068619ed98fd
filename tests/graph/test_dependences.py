"""All dependences of a graph, also of state ops and rebound attributes, and sorting by them."""

from __future__ import annotations

import itertools
import operator
import random

import torch
from torch import fx, nn

from splitkit._torch import ENTER_AUTOCAST, EXIT_AUTOCAST
from splitkit.graph.dataflow import analyze
from splitkit.graph.dependences import all_dependences, lowest_first


def before_of(graph, root=None):
    """Name -> the names of the nodes that must run before it."""
    found = all_dependences(analyze(fx.GraphModule(nn.Module() if root is None else root, graph)))
    return {node.name: {n.name for n in earlier} for node, earlier in found.items()}


def test_state_ops_stay_between_the_nodes_around_them():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.sin, (x,))
    enter = graph.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, False))
    pair = graph.call_function(torch.chunk, (a, 2))
    half = graph.call_function(operator.getitem, (pair, 0))
    leave = graph.call_function(EXIT_AUTOCAST, (enter,))
    y = graph.placeholder("y")
    graph.output((graph.call_function(torch.cos, (half,)), y))
    found = before_of(graph)
    assert found[enter.name] == {a.name} and found[pair.name] == {a.name, enter.name}
    assert found[half.name] == {pair.name} and found[leave.name] == {enter.name, pair.name}
    assert found["cos"] == {half.name, leave.name} and found["y"] == set() and found["output"] == {"cos", "y"}


def test_writes_keep_their_order():
    graph = fx.Graph()
    value = graph.call_function(torch.clone, (graph.placeholder("x"),))
    graph.call_function(torch.sin, (value,))
    graph.call_method("add_", (value, 1))
    graph.output(graph.call_function(torch.cos, (value,)))
    found = before_of(graph)
    assert "sin" in found["add_"] and "add_" in found["cos"]


def test_an_attribute_is_read_between_the_opaque_nodes_that_may_bind_it():
    root = nn.Module()
    root.child = nn.Module()
    root.child.register_buffer("state", torch.zeros(2))

    def rebind(module):
        module.state = module.state + 1

    graph = fx.Graph()
    child = graph.get_attr("child")
    first = graph.get_attr("child.state")
    graph.call_function(rebind, (child,))
    second = graph.get_attr("child.state")
    graph.output((first, second))
    found = before_of(graph, root)
    assert first.name in found["rebind"] and "rebind" in found[second.name] and "rebind" not in found[first.name]


def test_the_lowest_key_that_waits_for_nothing_is_first():
    for seed in range(50):
        dice = random.Random(seed)
        waits = {key: {other for other in range(6) if other != key and dice.random() < 0.2} for key in range(6)}
        orders = [
            order
            for order in itertools.permutations(waits)
            if all(waits[key] <= {*order[:at]} for at, key in enumerate(order))
        ]
        found = lowest_first(waits)
        if orders:
            assert tuple(found) == min(orders)
        else:
            free = {key for key in waits if waits[key] <= {*found}}
            assert free == {*found} and len(found) < len(waits)
