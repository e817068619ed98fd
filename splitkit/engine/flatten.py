"""Write a split, as it is now, as one flat graph: the parts replace their calls, in the order in which they run.

State ops are left out; the flat graph records the scope of each node instead, in terms of the original's regions.
Copies of one node that are still equal become one again::

    parent: h, submod_0, submod_1, add          flat: h, a, b, c, add
    submod_0: a, b      submod_1: b', c
"""

from __future__ import annotations

import operator
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from splitkit import _torch
from splitkit.engine.codegen.writer import Writer
from splitkit.engine.split import Split
from splitkit.errors import GraphError
from splitkit.graph.input_overlap import check_nodes
from splitkit.graph.scope import NEUTRAL, Scope, scopes
from splitkit.graph.storages import attribute
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


# Relate the modules of a split, as they are now, to the original: the origin, scope and place of each node.
#
# A node is a copy of an original node if it has the name of the copy; the others were added by someone who edited a
# module.


STATELESS_OPS = ("placeholder", "get_attr")
"""Ops whose nodes do not depend on the ambient state or the time at which they run."""

Place = tuple[int, int]
"""The place of a node: an index in the original graph, and before (-1), at (0) or after (1) the node there."""


def current_modules(split: Split) -> dict[PartKey, fx.GraphModule]:
    """Return the parent (`PARENT`) and the parts as they are now, which need not be the modules that `split` made.

    Raises:
        GraphError: SK106 if one of them has no graph any more.
    """
    found: dict[PartKey, fx.GraphModule] = {PARENT: split.module}
    for key, name in split.names.items():
        module = attribute(split.module, name)
        if not isinstance(module, fx.GraphModule):
            raise unusable_part(name, f"is a {type(module).__name__}, which has no graph")
        if type(_torch.codegen_of(module.graph)) is not fx.graph.CodeGen:
            raise unusable_part(name, "has a signature of its own")
        found[key] = module
    return found


def unusable_part(name: str, why: str) -> GraphError:
    """Return the error (SK106) for a part that cannot be inlined."""
    return GraphError(
        "SK106",
        f"the part {name!r} {why}",
        "Inline before parts are replaced or compiled, or put a GraphModule with the same inputs and outputs there.",
        [name],
    )


@dataclass(frozen=True)
class CurrentModule:
    """One module of the split as it is now, and the origin of its nodes."""

    split: Split
    key: PartKey
    module: fx.GraphModule

    @cached_property
    def origin(self) -> dict[Node, Node]:
        """Copy -> the original node, for the nodes that are copies."""
        by_name = {copied.name: node for node, copied in self.split.copies[self.key].items()}
        return {node: by_name[node.name] for node in self.module.graph.nodes if node.name in by_name}

    @cached_property
    def _scopes(self) -> tuple[dict[Node, Scope], Scope]:
        found, final = scopes(self.module.graph)
        flow, same = self.split.flow, dict[Node, Node]()
        pairs = [(found[node], flow.scope[origin]) for node, origin in self.origin.items()]
        for ours, originals in [*pairs, (final, flow.final)]:
            for here, there in zip(ours.regions, originals.regions, strict=False):
                if _region(here) == _region(there):
                    same.setdefault(here, there)
        kept = (n for n in found if not is_for_regions(n, found))
        return {node: _renamed(found[node], same) for node in kept}, _renamed(final, same)

    @property
    def scope(self) -> Mapping[Node, Scope]:
        """The scope of each node except state ops; regions that are unchanged are those of the original."""
        return self._scopes[0]

    @property
    def final(self) -> Scope:
        """The ambient state after the module has run."""
        return self._scopes[1]

    @cached_property
    def place(self) -> dict[Node, Place]:
        """Node -> its place. Added nodes follow those before them, or take the place of erased ones."""
        index, places, waiting, last = self.split.flow.index, dict[Node, Place](), list[Node](), -1
        for node in self.scope:
            if node not in self.origin:
                waiting.append(node)
                continue
            here = index[self.origin[node]]
            places[node] = (here, int(self.split.plan.home(self.origin[node]) != self.key))
            if node.op not in STATELESS_OPS:
                places |= dict.fromkeys(waiting, self._between(last, here))
                waiting, last = [], here
        return places | dict.fromkeys(waiting, self._between(last, len(index)))

    def _between(self, last: int, here: int) -> Place:
        gap = bisect(self._erased, last)
        if gap < len(self._erased) and self._erased[gap] < here:
            return self._erased[gap], 0
        if last >= 0 or self.key is PARENT:
            return last, 1
        return here, -1

    @cached_property
    def _erased(self) -> list[int]:
        left = self.split.copies[self.key].keys() - self.origin.values()
        return sorted(self.split.flow.index[node] for node in left)


def is_for_regions(node: Node, scope: Mapping[Node, Scope]) -> bool:
    """Whether a node is an attribute that only state ops read."""
    return node.op == "get_attr" and bool(node.users) and scope.keys().isdisjoint(node.users)


def _region(enter: Node) -> tuple[object, str]:
    """Return a key for a region that is the same in every graph."""
    return enter.target, repr(fx.node.map_arg((enter.args, enter.kwargs), lambda n: str(n.target)))


def _renamed(scope: Scope, names: Mapping[Node, Node]) -> Scope:
    if not scope.regions:
        return scope
    return Scope(tuple(names.get(enter, enter) for enter in scope.regions), scope.settings)
