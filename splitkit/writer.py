"""Appends nodes to a graph in 1 us each, by the private fields of ``fx.Graph`` where they are as they are known here.

``Graph.node_copy`` costs 6 us a node: it searches the arguments for symbols, and for a free name with a regular
expression. Copies of nodes need neither. `is_fast` checks once a process that the private way (2.11, 2.13, 2.15) and
the public way give the same graph; if torch has changed, every node is written by public calls.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx import Node

_map_arg: Callable[[Any, Callable[[Node], Any]], Any] = torch._C._fx_map_arg  # 2.11, 2.13, 2.15


class Writer:
    """Writes at the end of a graph, which may be written to by public calls in between.

    Args:
        graph: the graph.
        keep_names: copies are called like the originals; else by what they call, as fx names new nodes.
    """

    def __init__(self, graph: fx.Graph, keep_names: bool = True) -> None:
        self.graph = graph
        self._append = _append if is_fast() else _append_publicly
        self._keep_names = keep_names
        self._bases: dict[int, str] = {}  # id of a target -> the name that fx gives; targets live as long as the graph

    def copy(self, node: Node, value: Callable[[Node], Any], target: Any = None, name: str | None = None) -> Node:
        """Append a copy of ``node`` that reads ``value(n)`` where ``node`` reads ``n``."""
        target = node.target if target is None else target
        args, kwargs = _map_arg(node.args, value), node.kwargs
        if kwargs:
            kwargs = _map_arg(kwargs, value)
        if self._keep_names:
            copied = self._append(self.graph, node.op, target, args, kwargs, name or node.name, node.type)
        else:
            name = self._bases.get(id(target)) or self._base_of(target)
            copied = self._append(self.graph, node.op, target, args, kwargs, name, node.type, True)
        copied.meta.update(node.meta)
        return copied

    def append(self, op: str, target: Any, args: tuple[Any, ...], name: str, type_expr: Any = None) -> Node:
        """Append a node; its name gets a number if another has it."""
        return self._append(self.graph, op, target, args, {}, name, type_expr, not self._keep_names)

    def placeholder(self, name: str, type_expr: Any = None) -> Node:
        """Append an input."""
        if self._keep_names and name.islower():
            return self._append(self.graph, "placeholder", name, (), {}, name, type_expr)
        return self.graph.placeholder(name, type_expr)  # numbers the names that follow, and writes snake case

    def _base_of(self, target: Any) -> str:
        name = self._bases[id(target)] = str(self.graph._target_to_str(target))  # 2.11, 2.13, 2.15
        return name


def _append(
    graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str, type_expr: Any, number: bool = False
) -> Node:
    """``graph.create_node`` without its search for symbols."""
    space: Any = graph._graph_namespace
    used = space._used_names
    if number:
        name = _numbered(space, name)
    elif name in used:
        name = space.create_name(name, None)
    used.add(name)
    node = Node(graph, name, op, target, args, kwargs, type_expr)
    space._obj_to_name[node] = name
    graph._root._prepend(node)
    graph._find_nodes_lookup_table.table[op, target if op == "call_function" else None][node] = None
    graph._len += 1
    return node


def _append_publicly(
    graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str, type_expr: Any, number: bool = False
) -> Node:
    return graph.create_node(op, target, args, kwargs, name, type_expr)


def _numbered(space: Any, base: str) -> str:
    """``space.create_name(base)`` for a name that is legal and ends in no number."""
    if not _is_plain(base):
        return str(space.create_name(base, None))
    number, name, used = space._base_count.get(base, 0), base, space._used_names
    while name in used:
        number += 1
        name = f"{base}_{number}"
    space._base_count[base] = number
    return name


@cache
def _is_plain(name: str) -> bool:
    return fx.Graph()._graph_namespace.create_name(name, None) == name and not re.search(r"_\d+$", name)


@cache
def is_fast() -> bool:
    """Whether the private way writes the same graphs as the public one."""
    graphs = []
    for append in (_append, _append_publicly):
        graph = fx.Graph()
        try:
            _write_sample(graph, append)
            graphs.append(_picture(graph))
        except Exception:
            return False
    return graphs[0] == graphs[1]


def _write_sample(graph: fx.Graph, append: Callable[..., Node]) -> None:
    x = append(graph, "placeholder", "x", (), {}, "x", torch.Tensor)
    items = [append(graph, "call_function", operator.getitem, (x, (i, x)), {"k": [x]}, "item", None) for i in range(3)]
    last = append(graph, "call_method", "sum", (items[2],), {}, "sum_1", None, True)
    for name in ("sum", "item", "item_9", "x", "item"):
        last = append(graph, "call_method", "view", (last, [items[0], slice(None, last)]), {}, name, None, True)
    graph.output(graph.call_function(torch.relu, (last,)))
    graph.erase_node(graph.call_function(torch.relu, (x,)))
    graph.lint()


def _picture(graph: fx.Graph) -> list[Any]:
    found = [n.name for n in graph.find_nodes(op="call_function", target=operator.getitem)]
    nodes = [(n.name, n.op, str(n.target), str(n.args), str(n.kwargs), n.type, str([*n.users])) for n in graph.nodes]
    return [found, nodes, len(graph.nodes), graph.python_code("self").src, [n.next.name for n in graph.nodes]]
