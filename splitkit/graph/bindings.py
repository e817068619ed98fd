"""Attributes that opaque code may bind anew: when they are read, and in which modules.

A node that splitkit does not know may do ``self.state = self.state + x``. What ``get_attr`` yields then depends on when
it runs, so the engine keeps its place among opaque nodes, and lets the parts hold the module that both use, whole::

    a = get_attr[leaf.state]      before `leaf`: the old tensor
    y = leaf(x)                   binds leaf.state anew
    b = get_attr[leaf.state]      after it: the new one

Opaque code reaches what `splitkit.graph.reach` finds; inputs of the graph are taken to hold none of its modules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from splitkit.graph.ops import Effects
from splitkit.graph.reach import Reach, reach_of
from splitkit.graph.storages import attribute


@dataclass(frozen=True)
class Bindings:
    """What of a module opaque code may bind anew.

    Attributes:
        reads: ``get_attr`` nodes that may yield something else later -> the opaque nodes before and after them.
        calls: ``call_module`` nodes that may call something else later.
        opaque: the opaque nodes, in graph order.
        whole: the names of the modules that parts hold as they are, so that they see what is bound anew.
        of_root: an opaque node that may bind attributes of the graph module itself, of which each part has its own.
    """

    reads: Mapping[Node, tuple[Node | None, Node | None]] = field(default_factory=dict)
    calls: frozenset[Node] = frozenset()
    opaque: tuple[Node, ...] = ()
    whole: frozenset[str] = frozenset()
    of_root: Node | None = None

    def reads_one(self, node: Node) -> bool:
        """Does what ``node`` gets depend on which opaque nodes have run?"""
        return node in self.calls or any(read in self.reads for read in node.all_input_nodes)


NO_BINDINGS = Bindings()


def bindings_of(effects: Mapping[Node, Effects], root: nn.Module) -> tuple[Mapping[Node, Effects], Bindings]:
    """What opaque nodes may bind anew; and the effects, in which those that cannot set the ambient state say so."""
    opaque = [n for n, e in effects.items() if not e.known]
    if not opaque:
        return effects, NO_BINDINGS
    reaches = _reaches(opaque, root)
    settled = {n: replace(effects[n], ambient=False) for n in opaque if not reaches[n].sets_state}
    return {**effects, **settled}, _bindings(effects, root, opaque, reaches)


def _reaches(opaque: Iterable[Node], root: nn.Module) -> dict[Node, Reach]:
    known: dict[tuple[int, ...], Reach] = {}
    read: dict[Any, Any] = {}
    found: dict[Node, Reach] = {}
    for node in opaque:
        given = _code_of(node, root)
        key = tuple(map(id, given))
        if key not in known:
            known[key] = reach_of(list(given), read)
        found[node] = known[key]
        if node.op == "call_method":  # whose code is not there to be read
            found[node] = Reach(known[key].modules, known[key].everything, sets_state=True)
    return found


def _code_of(node: Node, root: nn.Module) -> list[object]:
    """What a node runs, and what it is given besides tensors and values of other nodes."""
    target = node.target if callable(node.target) else None
    given: list[object] = [attribute(root, str(node.target)) if node.op == "call_module" else target]
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, Node) and argument.op == "get_attr":
            given.append(attribute(root, str(argument.target)))
        elif isinstance(argument, Node) and argument.op == "placeholder":
            given.append(argument.type)
        elif not isinstance(argument, Node):
            given.append(argument)
    return [value for value in given if not isinstance(value, (torch.Tensor, str, int, float, type(None)))]


def _bindings(
    effects: Mapping[Node, Effects], root: nn.Module, opaque: list[Node], reaches: Mapping[Node, Reach]
) -> Bindings:
    called: dict[Node, Any] = {}
    for node in effects:
        if node.op == "call_module":
            called[node] = attribute(root, str(node.target))
    reached = {i for found in reaches.values() for i in found.modules}
    shared = [n for n, found in reaches.items() if found.everything]
    if shared:  # what the graph calls is the user's own, and anybody's
        reached.update(id(m) for module in called.values() for m in module.modules())
    whole: set[str] = set()
    reads: list[Node] = []
    calls: set[Node] = set()
    for node in effects:
        if node.op not in ("get_attr", "call_module"):
            continue
        value: Any = called[node] if node.op == "call_module" else attribute(root, str(node.target))
        path = _reached_owner(root, str(node.target), reached)
        if path:
            whole.add(path)
        if node.op == "call_module":
            if path is not None or any(id(m) in reached for m in value.modules()):
                calls.add(node)
        elif path is not None and not isinstance(value, nn.Module):
            reads.append(node)
    by_root = next((n for n in opaque if id(root) in reaches[n].modules), None)
    order = {node: i for i, node in enumerate(effects)}
    moments = [order[n] for n in opaque]
    return Bindings(
        {n: _around(opaque, bisect_left(moments, order[n])) for n in reads},
        frozenset(calls),
        tuple(opaque),
        frozenset(whole),
        by_root,
    )


def _around(opaque: list[Node], after: int) -> tuple[Node | None, Node | None]:
    return opaque[after - 1] if after else None, opaque[after] if after < len(opaque) else None


def _reached_owner(root: nn.Module, target: str, reached: set[int]) -> str | None:
    """The outermost module on the way to an attribute that opaque code reaches: its name, ``""`` for the root."""
    owner: Any = root
    if id(owner) in reached:
        return ""
    path: list[str] = []
    for atom in target.split(".")[:-1]:
        owner = getattr(owner, atom)
        path.append(atom)
        if id(owner) in reached:
            return ".".join(path)
    return None
