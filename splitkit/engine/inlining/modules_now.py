"""The modules of a split as they are now, node by node: what each was in the original, what it wants, where it belongs.

Nodes are recognised as copies of original nodes by their names; the others were added by whoever edited a module.
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
from splitkit.plans.parts import HOST, PartKey

FREE = ("placeholder", "get_attr")
"""Nodes that are the same under any ambient state, and at any time."""

Place = tuple[int, int]
"""Where a node belongs: an index in the original graph, and before (-1), at (0) or after (1) the node there."""


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


@dataclass(frozen=True)
class Frame:
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
        """The scope of each of its nodes but state ops, with the original's regions where they are still alike."""
        return self._scopes[0]

    @property
    def final(self) -> Scope:
        """The state in which it leaves its caller."""
        return self._scopes[1]

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


def is_for_regions(node: Node, scope: Mapping[Node, Scope]) -> bool:
    """Is it an attribute that only state ops read?"""
    return node.op == "get_attr" and bool(node.users) and scope.keys().isdisjoint(node.users)


def _region(enter: Node) -> tuple[object, str]:
    """What a region is, whichever graph its enter is in."""
    return enter.target, repr(fx.node.map_arg((enter.args, enter.kwargs), lambda n: str(n.target)))


def _renamed(scope: Scope, names: Mapping[Node, Node]) -> Scope:
    if not scope.regions:
        return scope
    return Scope(tuple(names.get(enter, enter) for enter in scope.regions), scope.settings)
