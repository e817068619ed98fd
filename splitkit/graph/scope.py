"""Compute the scope of each node: the autocast, grad-mode and other ambient state that it was captured under.

No part computes state ops (enter, exit, set). They are read once and turned into the `Scope` of the nodes between them;
the engine writes them again wherever a part needs them::

    enter_autocast ─┐            part 0: enter, mm, exit
    mm              │  scope ==>
    relu            │            part 1: enter, relu, exit
    exit_autocast ──┘

The registry `splitkit.graph.ambient` says which targets are state ops.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.errors import GraphError
from splitkit.graph.ambient import GRAD, TARGETS, Region, closed_by, is_state_op, opened_by, read_by, written_by

__all__ = ["CALLERS", "NEUTRAL", "Scope", "is_state_op", "region_attributes", "region_kind", "scopes", "states_before"]


class _Callers:
    def __repr__(self) -> str:
        return "CALLERS"


CALLERS = _Callers()
"""The value of a setting that the graph has not set: the caller's value."""


@dataclass(frozen=True)
class Scope:
    """The ambient state of a node.

    Attributes:
        regions: the enter nodes of the open regions, outermost first.
        settings: (name, value) pairs that the graph has set, sorted by name; any other setting has the caller's value.
    """

    regions: tuple[Node, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def grad(self) -> bool | None:
        """The grad mode that the graph has set, ``None`` for the caller's."""
        value = self.value(GRAD.name)
        return None if value is CALLERS else bool(value)

    @property
    def autocast(self) -> tuple[Node, ...]:
        """The enter nodes of the open autocast regions, outermost first."""
        return tuple(enter for enter in self.regions if enter.target is _torch.ENTER_AUTOCAST)

    def value(self, setting: str) -> Any:
        """Return the value of a setting, or `CALLERS`."""
        return next((value for name, value in self.settings if name == setting), CALLERS)

    def having(self, values: Mapping[str, Any]) -> Scope:
        """Return a copy with other values; the value `CALLERS` removes a setting."""
        now = {name: value for name, value in {**dict(self.settings), **values}.items() if value is not CALLERS}
        return replace(self, settings=tuple(sorted(now.items(), key=operator.itemgetter(0))))


NEUTRAL = Scope()


def region_kind(enter: Node) -> Region:
    """Return the kind of region that the node ``enter`` opens."""
    kind = opened_by(enter)
    assert kind is not None, f"{enter.name} opens no region"
    return kind


def region_attributes(scope: Mapping[Node, Scope]) -> set[str]:
    """Return the names of the graph's attributes that its enter nodes take."""
    distinct = {id(s): s for s in scope.values()}
    return {str(a.target) for s in distinct.values() for enter in s.regions for a in enter.all_input_nodes}


def scopes(graph: fx.Graph) -> tuple[Mapping[Node, Scope], Scope]:
    """Return the scope of each node, and the state in which the graph leaves its caller.

    An exit restores the state that its enter saw, as torch's context managers do, even where regions of one kind
    interleave: enter a, enter b, exit a, exit b leaves the state of a in force.

    Raises:
        GraphError: SK103 when an exit has no open enter, or when the state depends on a computed value.
    """
    nodes = list(graph.nodes)
    if TARGETS.keys().isdisjoint(map(id, map(operator.attrgetter("target"), nodes))):
        return dict.fromkeys(nodes, NEUTRAL), NEUTRAL
    reader = _Reader()
    return {node: reader.now for node in nodes if not reader.read(node)}, reader.now


def states_before(graph: fx.Graph) -> Mapping[Node, Scope]:
    """Return the state before each node, including state ops."""
    reader, before = _Reader(), dict[Node, Scope]()
    for node in graph.nodes:
        before[node] = reader.now
        reader.read(node)
    return before


class _Reader:
    """Reads a graph node by node; ``now`` is the state after the last one."""

    def __init__(self) -> None:
        self.now = NEUTRAL
        self.saved: dict[Node, Scope] = {}  # by nodes that open a region, or yield the value of a setting
        self.order: dict[Node, int] = {}  # of regions, as they are opened

    def read(self, node: Node) -> bool:
        """Update ``now`` by ``node``, and return whether it is a state op."""
        if id(node.target) not in TARGETS or node.op != "call_function":
            return False
        if read_by(node):
            self.saved[node] = self.now
            return is_state_op(node)
        if kind := opened_by(node):
            self._enter(node, kind)
        elif kinds := closed_by(node):
            self._exit(node, kinds)
        else:
            self._set(node)
        return True

    def _enter(self, node: Node, kind: Region) -> None:
        if computed := [a for a in node.all_input_nodes if not _is_constant(a)]:
            raise GraphError(
                "SK103",
                f"{node.name} opens a region whose settings are computed by {computed[0].name}",
                "Capture the model with constant region settings.",
                [node],
            )
        if others := [user for user in node.users if kind not in closed_by(user)]:
            raise GraphError(
                "SK103",
                f"{others[0].name} reads what {node.name} yields, but does not close the region that it opens",
                "Let a region's exit be the only reader of what its enter yields.",
                [node, others[0]],
            )
        self.saved[node], self.order[node] = self.now, len(self.order)
        self.now = Scope((*self.now.regions, node), self.now.having(kind.sets(node)).settings)

    def _exit(self, node: Node, kinds: tuple[Region, ...]) -> None:
        enter = self._closed(node, kinds)
        if enter is None:
            raise GraphError(
                "SK103",
                f"{node.name} closes a region that was not opened before it, or has been closed",
                "Put an enter node before it, or erase the exit node.",
                [node],
            )
        kind, before = region_kind(enter), self.saved.pop(enter)
        key = kind.key(enter)
        others = [r for r in self.now.regions if region_kind(r).key(r) != key]
        restored = [r for r in before.regions if region_kind(r).key(r) == key]
        regions = tuple(sorted([*others, *restored], key=self.order.__getitem__))
        self.now = replace(self.now, regions=regions).having({name: before.value(name) for name in kind.sets(enter)})

    def _closed(self, node: Node, kinds: tuple[Region, ...]) -> Node | None:
        """Return the enter node of the region that ``node`` closes, if there is one."""
        if any(kind.handle for kind in kinds):
            handles = node.all_input_nodes
            known = [*node.args, *node.kwargs.values()] == handles and len(handles) == 1 and handles[0] in self.saved
            return handles[0] if known and opened_by(handles[0]) in kinds else None
        return next((enter for enter in reversed(self.now.regions) if opened_by(enter) in kinds), None)

    def _set(self, node: Node) -> None:
        setting, value = written_by(node)
        if isinstance(value, Node) and value in self.saved and read_by(value) is setting:
            value = self.saved[value].value(setting.name)
        elif node.all_input_nodes:
            raise GraphError(
                "SK103",
                f"{node.name} sets the {setting.name} to {value}, which the graph computes",
                f"Set it to a constant or to the result of {getattr(setting.get, '__name__', setting.get)}().",
                [node],
            )
        self.now = self.now.having({setting.name: value})


def _is_constant(node: Node) -> bool:
    """Whether a node is an attribute with the same value wherever it is read; a tensor is not, as it may be written."""
    if node.op != "get_attr":
        return False
    try:
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        return False
    return not isinstance(value, torch.Tensor)
