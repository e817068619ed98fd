"""Nodes to ask about, and the answers in a form that tests can compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from splitkit.graph.ops import effects_of

ROOT = nn.Module()
X, Y = "$x", "$y"
FRESH: tuple[set[str], set[str], bool, bool] = (set(), set(), False, False)


def call(target: Any, *args: Any, root: nn.Module = ROOT, op: str = "call_function", **kwargs: Any) -> fx.Node:
    """A node that calls `target`; every string "$name" among the arguments becomes a placeholder."""
    graph = fx.Graph(root)
    made: dict[str, fx.Node] = {}

    def swap(x: Any) -> Any:
        if isinstance(x, str) and x.startswith("$"):
            return made.setdefault(x, graph.placeholder(x[1:]))
        return x

    args, kwargs = tree_map(swap, (args, kwargs))
    return graph.create_node(op, target, args, kwargs)


def method(name: str, *args: Any, **kwargs: Any) -> fx.Node:
    return call(name, *args, op="call_method", **kwargs)


def names(nodes: tuple[fx.Node, ...]) -> set[str]:
    return {n.name for n in nodes}


def seen(node: fx.Node, root: nn.Module = ROOT) -> tuple[set[str], set[str], bool, bool]:
    """(writes, aliases, random, impure) of a node that must be known."""
    e = effects_of(node, root)
    assert e.known, node.format_node()
    return names(e.writes), names(e.aliases), e.random, e.impure


def module(m: nn.Module, *args: Any) -> tuple[fx.Node, nn.Module]:
    root = nn.Module()
    root.m = m
    return call("m", *(args or (X,)), root=root, op="call_module"), root


def stranger(x: Any, y: Any) -> Any:
    return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Any, y: Any = None) -> Any:
        return x
