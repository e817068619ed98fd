"""Write a split, as it is now, as one flat graph: the parts replace their calls, in the order in which they run.

State ops are left out; the flat graph records the scope of each node instead, in terms of the original's regions.
Copies of one node that are still equal become one again::

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

from splitkit.engine.codegen.writer import Writer
from splitkit.engine.inlining.current_modules import STATELESS_OPS, CurrentModule, Place, unusable_part
from splitkit.engine.split import Split
from splitkit.graph.check_nodes import check_nodes
from splitkit.graph.scope import NEUTRAL, Scope
from splitkit.plans.parts import PARENT, PartKey

Names = Callable[[fx.GraphModule, str], str]
"""(module, target) -> the name of that attribute in the flat graph."""


@dataclass(frozen=True)
class FlatGraph:
    """The result of `flatten`.

    Attributes:
        graph: the flat graph.
        scope: node -> its ambient state.
        place: node -> its place in the original graph.
        origin: copy -> the original node; added nodes have none.
        final: the ambient state after the split has run.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    scope: dict[Node, Scope] = field(default_factory=dict)
    place: dict[Node, Place] = field(default_factory=dict)
    origin: dict[Node, Node] = field(default_factory=dict)
    final: Scope = NEUTRAL


def flatten(
    split: Split, modules: Mapping[PartKey, fx.GraphModule], name: Callable[[fx.GraphModule, str], str]
) -> FlatGraph:
    """Return the flat graph of a split.

    Args:
        split: the split.
        modules: its modules as they are now, see `current_modules`.
        name: returns the name of an attribute in the flat graph.

    Raises:
        GraphError: SK106 if the call of a part cannot be inlined, SK103 if an edit broke a region.
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
        self._modules = {key: CurrentModule(split, key, module) for key, module in modules.items()}
        self._keys = {part: key for key, part in split.names.items()}
        self._name = name
        self.flat = FlatGraph(final=self._modules[PARENT].final)
        self._writer = Writer(self.flat.graph)
        self._made: dict[Node, list[Node]] = {}  # original node -> the nodes written for it

    def parent(self) -> None:
        """Write the parent; calls of parts and their getitems vanish."""
        current = self._modules[PARENT]
        env: dict[Node, Any] = {}

        def value(node: Node) -> Any:
            if isinstance(env[node], fx.GraphModule):
                raise unusable_part(str(node.target), "is passed to a function that is not checkpoint")
            return env[node]

        checks = check_nodes(current.module.graph)  # input checks, which only a split needs
        for node in (n for n in current.scope if n not in checks):
            args, kwargs = node.args, node.kwargs
            if node.op in ("get_attr", "call_module") and node.target in self._keys:
                key = self._keys[str(node.target)]
                if node.op == "get_attr":
                    env[node] = self._modules[key].module
                    continue
            elif node.target is checkpoint and isinstance(args[0], Node) and args[0].target in self._keys:
                key, args, kwargs = self._keys[str(args[0].target)], args[1:], {}
            elif node.target is operator.getitem and isinstance(members := env.get(_first(node)), Sequence):
                env[node] = _member(_first(node), members, args[1])
                continue
            else:
                env[node] = self._write(current, node, value, NEUTRAL)
                continue
            inputs: Any = fx.node.map_arg((args, kwargs), value)
            env[node] = self._part(key, inputs[0], inputs[1], current.scope[node])

    def _part(self, key: PartKey, args: Sequence[Any], kwargs: Mapping[str, Any], outer: Scope) -> Any:
        """Write the nodes of a part, and return its output value."""
        current = self._modules[key]
        inputs = [n for n in current.scope if n.op == "placeholder"]
        if len(inputs) != len(args) or kwargs:
            name = next(name for name, k in self._keys.items() if k == key)
            raise unusable_part(name, f"takes {len(inputs)} inputs, and is called with {len(args) + len(kwargs)}")
        env: dict[Node, Any] = dict(zip(inputs, args, strict=True))
        for node in current.scope:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            if node.op != "placeholder":
                env[node] = self._write(current, node, env.__getitem__, outer)
        return None

    def _write(self, current: CurrentModule, node: Node, value: Callable[[Node], Any], outer: Scope) -> Node:
        flat, origin = self.flat, current.origin.get(node)
        target = self._name(current.module, str(node.target)) if node.op in ("get_attr", "call_module") else node.target
        scope = NEUTRAL if node.op in STATELESS_OPS else _inside(outer, current.scope[node])
        copied = self._writer.copy(node, value, target)
        for made in self._made.get(origin, ()) if origin else ():
            if flat.scope[made] == scope and _alike(made, copied):
                flat.graph.erase_node(copied)
                flat.place[made] = min(flat.place[made], current.place[node])
                return made
        if origin is not None:
            flat.origin[copied] = origin
            self._made.setdefault(origin, []).append(copied)
        flat.scope[copied], flat.place[copied] = scope, current.place[node]
        return copied


def _alike(a: Node, b: Node) -> bool:
    return a.op == b.op and a.target == b.target and repr((a.args, a.kwargs)) == repr((b.args, b.kwargs))


def _first(node: Node) -> Any:
    return node.args[0]


def _member(call: Node, values: Sequence[Any], position: Any) -> Any:
    """Return the value of ``getitem(call, position)``."""
    if not isinstance(position, int) or not -len(values) <= position < len(values):
        raise unusable_part(call.name, f"gives {len(values)} values, of which {position!r} is read")
    return values[position]
