"""Graphs and labels that the tests beside torch's split_module share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node
from torch.fx.passes.split_module import split_module as torch_split_module

import splitkit as sk

Label = Callable[[Node], Any]

TUPLE_RETURN = "tuple_return" in inspect.signature(torch_split_module).parameters
"""Whether torch's has this flag: since 2.13."""


def label(node: Node) -> int:
    """The part of a node that was named after it: ``p1``, ``p1_enter`` -> 1."""
    return int(node.name[1])


def by_name(**parts: Any) -> Label:
    """A callback from node names; what is not named is in part 0."""
    return lambda node: parts.get(node.name, 0)


def graph_of(write: Callable[..., Any], **attributes: Any) -> fx.GraphModule:
    """A GraphModule around ``write(call, graph)``; ``call(name, target, *args)`` adds a node of that name.

    The module has a buffer ``state`` besides ``attributes``.
    """
    graph, root = fx.Graph(), nn.Module()
    root.register_buffer("state", torch.zeros(4, 2))
    for name, value in attributes.items():
        setattr(root, name, value)

    def call(name, target, *args, **kwargs):
        op = "call_method" if isinstance(target, str) else "call_function"
        return graph.create_node(op, target, args, kwargs, name=name)

    graph.output(write(call, graph))
    return fx.GraphModule(root, graph)


def traced(function: Callable[..., Any], **attributes: Any) -> fx.GraphModule:
    """Symbolically trace ``function(self, *inputs)`` as the forward of a module with ``attributes``."""
    root = type("Model", (nn.Module,), {"forward": function})()
    for name, value in attributes.items():
        setattr(root, name, value)
    return fx.symbolic_trace(root)


def dynamo(model: Any, *inputs: Any, **options: Any) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """The graph that ``torch.compile`` hands to a backend, and the inputs that it then calls it with."""
    caught = []

    def backend(gm, example):
        def run(*args):
            caught.append((gm, args))
            return gm(*args)

        return run

    torch.compiler.reset()
    torch.compile(model, backend=backend, **options)(*inputs)
    return caught[0]


def both(gm: fx.GraphModule, callback: Label, **flags: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What torch makes of a graph, and what splitkit makes of it."""
    return torch_split_module(gm, None, callback, **flags), sk.split_module(gm, None, callback, **flags)


def called(split: fx.GraphModule) -> list[str]:
    """The parts in the order in which the parent calls them."""
    return [str(n.target) for n in split.graph.nodes if n.op == "call_module"]


def inputs_of(part: fx.GraphModule) -> list[str]:
    """The names of a part's inputs."""
    return [n.name for n in part.graph.nodes if n.op == "placeholder"]


def named(gm: fx.GraphModule) -> dict[str, Node]:
    """Name -> node."""
    return {n.name: n for n in gm.graph.nodes}


def written(gm: fx.GraphModule) -> list[str]:
    """What stands in a graph: inputs first, without the names that callers use."""
    nodes = sorted(gm.graph.nodes, key=lambda n: n.op != "placeholder")
    return [str((n.op, n.name, n.op == "placeholder" or n.target, n.args, n.kwargs, n.type)) for n in nodes]
