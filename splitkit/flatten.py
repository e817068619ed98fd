"""One flat graph of a split as it is now: its parts written in place of their calls, in the order in which they run.

Nodes are recognised as copies of original nodes by their names; the others were added by whoever edited a part. State
ops are left out: what they do to a node is its scope, in terms of the original's regions. Copies of one node that are
still alike become one again::

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
from splitkit.effects import attribute
from splitkit.errors import GraphError
from splitkit.plan import HOST, PartKey
from splitkit.scope import NEUTRAL, Scope, scopes
from splitkit.split import Split
from splitkit.writer import Writer

FREE = ("placeholder", "get_attr")
"""Nodes that are the same under any ambient state, and at any time."""

Place = tuple[int, int]
"""Where a node belongs: an index in the original graph, and before (-1), at (0) or after (1) the node there."""


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


def modules_of(split: Split) -> dict[PartKey, fx.GraphModule]:
    """The parent (`HOST`) and the parts as they are now, which need not be the modules that `split` made.

    Raises:
        GraphError: SK106 when one is no graph any more.
    """
    found: dict[PartKey, fx.GraphModule] = {HOST: split.module}
    for key, name in split.names.items():
        module = attribute(split.module, name)
        if not isinstance(module, fx.GraphModule):
            raise not_a_part(name, f"is a {type(module).__name__}, which has no graph")
        if type(_torch.codegen_of(module.graph)) is not fx.graph.CodeGen:
            raise not_a_part(name, "has a signature of its own")
        found[key] = module
    return found


def not_a_part(name: str, why: str) -> GraphError:
    """The error for a part that cannot be understood."""
    return GraphError(
        "SK106",
        f"the part {name!r} {why}",
        "Inline before parts are replaced or compiled, or put a GraphModule with the same inputs and outputs there.",
        [name],
    )


def flatten(split: Split, modules: Mapping[PartKey, fx.GraphModule], name: Callable[[fx.GraphModule, str], str]) -> Flat:
    """Write the parts in place of their calls.

    Args:
        split: what was split.
        modules: its modules as they are now, see `modules_of`.
        name: (module, target) -> what the attribute is called in the flat graph.

    Raises:
        GraphError: SK106 when a part is not called like a part, SK103 or SK104 when an edit broke regions or attributes.
    """
    flattener = _Flattener(split, modules, name)
    flattener.parent()
    return flattener.flat


@dataclass(frozen=True)
class _Frame:
    """One module of the split, and what its nodes were."""

    split: Split
    key: PartKey
    module: fx.GraphModule

    @cached_property
    def origin(self) -> dict[Node, Node]:
        """Its nodes that are copies -> the original nodes."""
        by_name = {copied.name: node for node, copied in self.split.copies[self.key].items()}
        return {node: by_name[node.name] for node in self.module.graph.nodes if node.name in by_name}

    @cached_property
    def scope(self) -> dict[Node, Scope]:
        """The scope of each of its nodes but state ops, with the original's regions where they are still alike."""
        found, flow = self._scopes[0], self.split.flow
        same: dict[Node, Node] = {}
        for node, origin in self.origin.items():
            for here, there in zip(found[node].regions, flow.scope[origin].regions, strict=False):
                if _region(here) == _region(there):
                    same.setdefault(here, there)
        return {node: _renamed(scope, same) for node, scope in found.items()}

    @cached_property
    def _scopes(self) -> tuple[Mapping[Node, Scope], Scope]:
        return scopes(self.module.graph)

    @property
    def final(self) -> Scope:
        """The state in which it leaves its caller; regions that stay open are named by the last node."""
        *_, last = self.scope.values()
        return last

    @cached_property
    def place(self) -> dict[Node, Place]:
        """Where its nodes belong. Added nodes follow those before them, or take the place of what was erased there."""
        index, places, waiting, last = self.split.flow.index, dict[Node, Place](), list[Node](), -1
        for node in self.scope:
            if node not in self.origin:
                waiting.append(node)
                continue
            here = index[self.origin[node]]
            places[node] = (here, int(self.split.plan.home(self.origin[node]) != self.key))
            if node.op not in FREE:
                places |= dict.fromkeys(waiting, self._between(last, here))
                waiting, last = [], here
        return places | dict.fromkeys(waiting, self._between(last, len(index)))

    def _between(self, last: int, here: int) -> Place:
        gap = bisect(self._erased, last)
        if gap < len(self._erased) and self._erased[gap] < here:
            return self._erased[gap], 0
        if last >= 0 or self.key is HOST:
            return last, 1
        return here, -1

    @cached_property
    def _erased(self) -> list[int]:
        left = self.split.copies[self.key].keys() - self.origin.values()
        return sorted(self.split.flow.index[node] for node in left)


def _region(enter: Node) -> tuple[Any, ...]:
    """What a region is, whichever graph its enter is in."""
    return enter.target, repr(fx.node.map_arg((enter.args, enter.kwargs), lambda n: n.target))


def _renamed(scope: Scope, names: Mapping[Node, Node]) -> Scope:
    if not scope.regions:
        return scope
    return Scope(tuple(names.get(enter, enter) for enter in scope.regions), scope.settings)


def _inside(outer: Scope, inner: Scope) -> Scope:
    if outer == NEUTRAL:
        return inner
    return Scope((*outer.regions, *inner.regions), outer.settings).having(dict(inner.settings))


class _Flattener:
    def __init__(
        self, split: Split, modules: Mapping[PartKey, fx.GraphModule], name: Callable[[fx.GraphModule, str], str]
    ) -> None:
        self._frames = {key: _Frame(split, key, module) for key, module in modules.items()}
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

        for node in frame.scope:
            args, kwargs = node.args, node.kwargs
            if node.op in ("get_attr", "call_module") and node.target in self._keys:
                key = self._keys[str(node.target)]
                if node.op == "get_attr":
                    env[node] = self._frames[key].module
                    continue
            elif node.target is checkpoint and isinstance(args[0], Node) and args[0].target in self._keys:
                key, args, kwargs = self._keys[str(args[0].target)], args[1:], {}
            elif node.target is operator.getitem and isinstance(env[args[0]], Sequence):  # type: ignore[index]
                env[node] = self._member(args[0], env[args[0]], args[1])  # type: ignore[index, arg-type]
                continue
            else:
                env[node] = self._write(frame, node, value, NEUTRAL)
                continue
            inputs = fx.node.map_arg((args, kwargs), value)
            env[node] = self._part(key, inputs[0], inputs[1], frame.scope[node])  # type: ignore[index]

    def _member(self, call: Node, values: Sequence[Any], position: Any) -> Any:
        if not isinstance(position, int) or not -len(values) <= position < len(values):
            raise not_a_part(call.name, f"gives {len(values)} values, of which {position!r} is read")
        return values[position]

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

    def _write(self, frame: _Frame, node: Node, value: Callable[[Node], Any], outer: Scope) -> Node:
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
