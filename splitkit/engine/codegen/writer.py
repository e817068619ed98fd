"""Append nodes and copies of nodes to a graph, under their names or under names as fx gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx import Node
from torch.fx.node import map_arg


class Writer:
    """Appends nodes to a graph.

    Args:
        graph: the graph.
        keep_names: copies have the names of the originals; otherwise they are named after their targets, as fx does.
    """

    def __init__(self, graph: fx.Graph, keep_names: bool = True) -> None:
        self.graph, self._keep_names = graph, keep_names

    def copy(self, node: Node, value: Callable[[Node], Any], target: Any = None, name: str | None = None) -> Node:
        """Append a copy of ``node`` that reads ``value(n)`` where ``node`` reads ``n``."""
        target = node.target if target is None else target
        args: Any = map_arg(node.args, value)
        kwargs: Any = map_arg(node.kwargs, value) if node.kwargs else {}
        if name is None and self._keep_names:
            name = node.name
        copied = self.graph.create_node(node.op, target, args, kwargs, _but_self(name), node.type)
        copied.meta.update(node.meta)
        return copied

    def append(self, op: str, target: Any, args: tuple[Any, ...], name: str) -> Node:
        """Append a node; its name gets a number if another has it."""
        return self.graph.create_node(op, target, args, {}, _but_self(name))

    def placeholder(self, name: str, type_expr: Any = None) -> Node:
        """Append an input. The parameter of ``forward`` has the node's name, or two inputs could be confused."""
        wanted = _but_self(name) if self._keep_names else None
        made = self.graph.create_node("placeholder", name, (), {}, wanted, type_expr)
        made.target = made.name
        return made


def _but_self(name: str | None) -> str | None:
    """Return another name for ``self``, which is the module in generated code."""
    return "self_" if name == "self" else name
