"""Relate the modules of a split, as they are now, to the original: the origin, scope and place of each node.

A node is a copy of an original node if it has the name of the copy; the others were added by someone who edited a
module.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.split import Split
from splitkit.errors import GraphError
from splitkit.graph.scope import Scope, scopes
from splitkit.graph.storages import attribute
from splitkit.plans.parts import PARENT, PartKey

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
