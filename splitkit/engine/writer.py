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
from torch.fx import graph as _fx_graph

from splitkit.engine.sourcecode import python_code

_NodeBase: Any = torch._C._NodeBase  # 2.11, 2.13, 2.15
_map_arg: Callable[[Any, Callable[[Node], Any]], Any] = torch._C._fx_map_arg  # 2.11, 2.13, 2.15


class LeanGraph(fx.Graph):
    """A graph that makes its code an eighth faster.

    ``fx.Graph.python_code`` gives each node another ``__repr__`` for a while, and takes it away again, by
    ``Node.__setattr__``, which each time looks the node up in the graph's index, takes it out and puts it back.
    """

    def python_code(self, root_module: str, **options: Any) -> Any:
        """The code of the graph; see ``fx.Graph.python_code``."""
        if not any(options.values()) and (code := python_code(self, root_module)) is not None:
            return code
        return _lean_code(self, root_module, **options) if _is_lean() else super().python_code(root_module, **options)


def _lean_code(graph: fx.Graph, root_module: str, **options: Any) -> Any:  # 2.11, 2.13, 2.15
    namespace = _fx_graph._Namespace()

    def name_of(node: Node) -> str:
        return namespace.create_name(node.name, node)

    before = {node: node._repr_fn for node in graph.nodes}
    for node in before:
        object.__setattr__(node, "_repr_fn", name_of)
    try:
        return graph._python_code(root_module, namespace, **options)
    finally:
        for node, function in before.items():
            object.__setattr__(node, "_repr_fn", function)


@cache
def _is_lean() -> bool:
    """Whether `LeanGraph` makes the code that ``fx.Graph`` makes."""
    codes = []
    for write in (_lean_code, fx.Graph.python_code):
        graph = fx.Graph()
        try:
            _write_sample(graph, _append_publicly)
            code = write(graph, "self")
        except Exception:
            return False
        codes.append((code.src, code.globals.keys(), [node._repr_fn for node in graph.nodes]))
    return codes[0] == codes[1]


class Writer:
    """Writes at the end of a graph, which may be written to by public calls in between.

    Args:
        graph: the graph.
        keep_names: copies are called like the originals; else by what they call, as fx names new nodes.
        bases: what several writers have found out about names.
    """

    def __init__(self, graph: fx.Graph, keep_names: bool = True, bases: dict[int, str] | None = None) -> None:
        self.graph = graph
        self._append = _append if is_fast() else _append_publicly
        self._name = _kept if keep_names else _created
        self._keep_names = keep_names
        # id of a target -> the name that fx gives; targets live as long as the graph that is copied
        self._bases: dict[int, str] = {} if bases is None else bases
        self._rows: Rows = {}

    def copy(self, node: Node, value: Callable[[Node], Any], target: Any = None, name: str | None = None) -> Node:
        """Append a copy of ``node`` that reads ``value(n)`` where ``node`` reads ``n``."""
        target = node.target if target is None else target
        args, kwargs = _map_arg(node.args, value), node.kwargs
        if kwargs:
            kwargs = _map_arg(kwargs, value)
        op = node.op
        if self._keep_names:
            copied = self._append(self.graph, op, target, args, kwargs, name or node.name, node.type, _kept, self._rows)
        else:
            base = name or self._bases.get(id(target)) or self._base_of(target)
            naming = _numbered if op == "call_function" or op == "call_method" else _numbered_once
            copied = self._append(self.graph, op, target, args, kwargs, base, node.type, naming, self._rows)
        copied.meta.update(node.meta)
        return copied

    def append(self, op: str, target: Any, args: tuple[Any, ...], name: str, type_expr: Any = None) -> Node:
        """Append a node; its name gets a number if another has it."""
        return self._append(self.graph, op, target, args, {}, name, type_expr, self._name, self._rows)

    def node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Node:
        """Append a node under its name in another graph."""
        return self._append(self.graph, op, target, args, kwargs, name, None, _kept, self._rows)

    def call(self, target: Any, args: tuple[Any, ...]) -> Node:
        """Append a call of a function, called like it."""
        name = self._bases.get(id(target)) or self._base_of(target)
        return self._append(self.graph, "call_function", target, args, {}, name, None, _numbered, self._rows)

    def placeholder(self, name: str, type_expr: Any = None) -> Node:
        """Append an input; the parameter of ``forward`` is called like the node, or two could be mixed up."""
        space: Any = self.graph._graph_namespace
        if self._keep_names:
            name = _kept(space, name)
        elif name.islower() and name[:2] != "__":
            name = _given(space, name)
        else:
            name = _created(space, self.graph._target_to_str(name))  # in snake case
        return self._append(self.graph, "placeholder", name, (), {}, name, type_expr, _final, self._rows)

    def _base_of(self, target: Any) -> str:
        name = _ILLEGAL.sub("_", str(self.graph._target_to_str(target)))  # 2.11, 2.13, 2.15
        self._bases[id(target)] = name
        return name


_ILLEGAL = re.compile("[^0-9a-zA-Z_]+")  # what fx replaces in names
Rows = dict[int | str, dict[Node, None]]  # by the id of a function that is called, else by op
Naming = Callable[[Any, str], str]
"""Given a graph's namespace and a wish, a name that is new to the graph."""


def _append(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: Any,
    kwargs: Any,
    name: str,
    type_expr: Any,
    naming: Naming,
    rows: Rows | None = None,
) -> Node:
    """``graph.create_node`` without its search for symbols."""
    space: Any = graph._graph_namespace
    name = naming(space, name)
    # The steps of `create_node`, in its order. The table that `find_nodes` reads tells nodes apart by target only if
    # they call functions.
    node = Node.__new__(Node)
    _NodeBase.__init__(node, graph, name, op, target, type_expr)
    node._update_args_kwargs(args, kwargs)
    space._obj_to_name[node] = name
    graph._root._prepend(node)
    _row(graph, op, target, rows)[node] = None
    graph._len += 1
    return node


def _row(graph: fx.Graph, op: str, target: Any, rows: Rows | None) -> dict[Node, None]:
    """The nodes that ``find_nodes(op=op, target=target)`` gives; to hash an operator takes a microsecond."""
    table: Any = graph._find_nodes_lookup_table.table
    key = id(target) if op == "call_function" else op
    if rows is None or key not in rows:
        row: dict[Node, None] = table[op, target if op == "call_function" else None]
        if rows is None:
            return row
        rows[key] = row
    return rows[key]


def _append_publicly(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: Any,
    kwargs: Any,
    name: str,
    type_expr: Any,
    naming: Naming,
    rows: Rows | None = None,
) -> Node:
    # `create_node` asks for a name again: one that was given by `_final` must be free for it, or it would get a number.
    if naming is _final:
        graph._graph_namespace._used_names.discard(name)
    return graph.create_node(op, target, args, kwargs, name, type_expr)


def _final(space: Any, name: str) -> str:
    """A name that the namespace has given already."""
    return name


def _created(space: Any, name: str) -> str:
    return str(space.create_name(name, None))


def _kept(space: Any, name: str) -> str:
    """A name that another graph has given."""
    used = space._used_names
    if name in used or name == "self":
        return _another(space, name)
    used.add(name)
    return name


def _another(space: Any, name: str) -> str:
    """A name instead of one that is taken, or of ``self``, which is the module in the code of a parent."""
    return _created(space, "self_" if name == "self" else name)


def _given(space: Any, name: str) -> str:
    """``space.create_name(name)`` for a name that another graph has given, with or without a number."""
    used, counts = space._used_names, space._base_count
    if name in used or name == "self":
        return _another(space, name)
    # fx remembers the last number of each base, and goes on from there: without the count, the next node of that base
    # would have another name than fx gives it, and a split another code than torch's.
    base, _, number = name.rpartition("_")
    if base and number.isdigit():
        counts[base] = int(number)
    else:
        counts.setdefault(name, 0)
    used.add(name)
    return name


def _numbered(space: Any, base: str) -> str:
    """``space.create_name(base)`` of what a function or method is called."""
    # fx takes a number off the end of a wish, replaces what no name may have, and avoids keywords and builtins, by
    # regular expressions. A base that comes out of that as it went in needs them once a process, not once a node.
    return _count(space, base) if _is_plain(base) else _created(space, base)


def _numbered_once(space: Any, base: str) -> str:
    """The same for names that are many, such as those of attributes: nothing is remembered of them."""
    plain = base.isidentifier() and base.isascii() and base not in _fx_graph._illegal_names
    return _count(space, base) if plain and not base[-1].isdigit() else _created(space, base)


def _count(space: Any, base: str) -> str:
    number, name, used = space._base_count.get(base, 0), base, space._used_names
    while name in used:
        number += 1
        name = f"{base}_{number}"
    space._base_count[base] = number
    used.add(name)
    return name


@cache
def _is_plain(name: str) -> bool:
    """Legal, and without a number at its end."""
    return fx.Graph()._graph_namespace.create_name(name, None) == name and not re.search(r"_\d+$", name)


@cache
def is_fast() -> bool:
    """Whether the private way writes the same graphs as the public one."""
    # Nothing private is trusted for what it is called: a sample with all kinds of names, nested arguments, an erased
    # node and a lookup by target has to come out the same, and any error counts as a difference.
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
    x = append(graph, "placeholder", "x", (), {}, "x", torch.Tensor, _kept)
    items = [
        append(graph, "call_function", operator.getitem, (x, (i, x)), {"k": [x]}, "item", None, _kept) for i in range(3)
    ]
    last = append(graph, "call_method", "sum", (items[2],), {}, "sum_1", None, _created)
    for name in ("item_7", "sum_1", "y", "x_2_3"):
        last = append(graph, "call_method", "sum", (last,), {}, name, None, _given)
    for name in ("sum", "item", "item_9", "x", "item", "y", "x_2", "x_2_3"):
        last = append(graph, "call_method", "view", (last, [items[0], slice(None, last)]), {}, name, None, _numbered)
    graph.output(graph.call_function(torch.relu, (last,)))
    graph.erase_node(graph.call_function(torch.relu, (x,)))
    graph.lint()


def _picture(graph: fx.Graph) -> list[Any]:
    found = [n.name for n in graph.find_nodes(op="call_function", target=operator.getitem)]
    nodes = [(n.name, n.op, str(n.target), str(n.args), str(n.kwargs), n.type, str([*n.users])) for n in graph.nodes]
    return [found, nodes, len(graph.nodes), graph.python_code("self").src, [n.next.name for n in graph.nodes]]
