"""One flat graph of a split as it is now: its parts written in place of their calls, in the order in which they run.

State ops are left out: what they do to a node is its scope, in terms of the original's regions. Copies of one node
that are still alike become one again::

    parent: h, submod_0, submod_1, add          flat: h, a, b, c, add
    submod_0: a, b      submod_1: b', c
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from splitkit.engine.inlining.modules_now import FREE, Frame, Place, not_a_part
from splitkit.engine.split import Split
from splitkit.engine.writer import Writer
from splitkit.graph.checks import check_nodes
from splitkit.graph.scope import NEUTRAL, Scope
from splitkit.plans.parts import HOST, PartKey

Names = Callable[[fx.GraphModule, str], str]
"""(module, target) -> what that attribute is called in the flat graph."""


@dataclass(frozen=True)
class Flat:
    """What `flatten` makes.

    Attributes:
        graph: the flat graph.
        scope: the ambient state of its nodes.
        place: where they belong in the original graph.
        origin: copy -> the original node; added nodes have none.
        final: the state in which the split leaves its caller.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    scope: dict[Node, Scope] = field(default_factory=dict)
    place: dict[Node, Place] = field(default_factory=dict)
    origin: dict[Node, Node] = field(default_factory=dict)
    final: Scope = NEUTRAL


def flatten(
    split: Split, modules: Mapping[PartKey, fx.GraphModule], name: Callable[[fx.GraphModule, str], str]
) -> Flat:
    """Write the parts in place of their calls.

    Args:
        split: what was split.
        modules: its modules as they are now, see `modules_of`.
        name: names of attributes.

    Raises:
        GraphError: SK106 when a part is not called like a part, SK103 when an edit broke a region.
    """
    flattener = _Flattener(split, modules, name)
    flattener.parent()
    return flattener.flat


def _inside(outer: Scope, inner: Scope) -> Scope:
    if outer == NEUTRAL:
        return inner
    return Scope((*outer.regions, *inner.regions), outer.settings).having(dict(inner.settings))


class _Flattener:
    def __init__(self, split: Split, modules: Mapping[PartKey, fx.GraphModule], name: Names) -> None:
        self._frames = {key: Frame(split, key, module) for key, module in modules.items()}
        self._keys = {part: key for key, part in split.names.items()}
        self._name = name
        self.flat = Flat(final=self._frames[HOST].final)
        self._writer = Writer(self.flat.graph)
        self._made: dict[Node, list[Node]] = {}  # original node -> what was written for it

    def parent(self) -> None:
        """Write the parent; calls of parts and their getitems vanish."""
        frame = self._frames[HOST]
        env: dict[Node, Any] = {}

        def value(node: Node) -> Any:
            if isinstance(env[node], fx.GraphModule):
                raise not_a_part(str(node.target), "is passed to a function that is not checkpoint")
            return env[node]

        checks = check_nodes(frame.module.graph)  # of the order of parts, which end here
        for node in (n for n in frame.scope if n not in checks):
            args, kwargs = node.args, node.kwargs
            if node.op in ("get_attr", "call_module") and node.target in self._keys:
                key = self._keys[str(node.target)]
                if node.op == "get_attr":
                    env[node] = self._frames[key].module
                    continue
            elif node.target is checkpoint and isinstance(args[0], Node) and args[0].target in self._keys:
                key, args, kwargs = self._keys[str(args[0].target)], args[1:], {}
            elif node.target is operator.getitem and isinstance(members := env.get(_first(node)), Sequence):
                env[node] = _member(_first(node), members, args[1])
                continue
            else:
                env[node] = self._write(frame, node, value, NEUTRAL)
                continue
            inputs: Any = fx.node.map_arg((args, kwargs), value)
            env[node] = self._part(key, inputs[0], inputs[1], frame.scope[node])

    def _part(self, key: PartKey, args: Sequence[Any], kwargs: Mapping[str, Any], outer: Scope) -> Any:
        """Write a part, and return its output."""
        frame = self._frames[key]
        inputs = [n for n in frame.scope if n.op == "placeholder"]
        if len(inputs) != len(args) or kwargs:
            name = next(name for name, k in self._keys.items() if k == key)
            raise not_a_part(name, f"takes {len(inputs)} inputs, and is called with {len(args) + len(kwargs)}")
        env: dict[Node, Any] = dict(zip(inputs, args, strict=True))
        for node in frame.scope:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            if node.op != "placeholder":
                env[node] = self._write(frame, node, env.__getitem__, outer)
        return None

    def _write(self, frame: Frame, node: Node, value: Callable[[Node], Any], outer: Scope) -> Node:
        flat, origin = self.flat, frame.origin.get(node)
        target = self._name(frame.module, str(node.target)) if node.op in ("get_attr", "call_module") else node.target
        scope = NEUTRAL if node.op in FREE else _inside(outer, frame.scope[node])
        copied = self._writer.copy(node, value, target)
        for made in self._made.get(origin, ()) if origin else ():
            if flat.scope[made] == scope and _alike(made, copied):
                flat.graph.erase_node(copied)
                flat.place[made] = min(flat.place[made], frame.place[node])
                return made
        if origin is not None:
            flat.origin[copied] = origin
            self._made.setdefault(origin, []).append(copied)
        flat.scope[copied], flat.place[copied] = scope, frame.place[node]
        return copied


def _alike(a: Node, b: Node) -> bool:
    return a.op == b.op and a.target == b.target and repr((a.args, a.kwargs)) == repr((b.args, b.kwargs))


def _first(node: Node) -> Any:
    return node.args[0]


def _member(call: Node, values: Sequence[Any], position: Any) -> Any:
    """What ``getitem(call, position)`` is."""
    if not isinstance(position, int) or not -len(values) <= position < len(values):
        raise not_a_part(call.name, f"gives {len(values)} values, of which {position!r} is read")
    return values[position]
