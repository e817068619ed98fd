"""Ambient state: which autocast, grad-mode and other regions a node was captured under.

State ops (enter, exit, set) are not computed by any part. They are read once, turned into the `Scope` of the nodes
between them, and written again by the emitter wherever a part needs them::

    enter_autocast ─┐            part 0: enter, mm, exit
    mm              │  scope ==>
    relu            │            part 1: enter, relu, exit
    exit_autocast ──┘

A *region* is a pair of targets (enter, exit) where exit restores what enter saw. Grad mode is a value that
``_set_grad_enabled`` overwrites. `REGIONS` is the table; a new kind of region is one more row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.errors import GraphError


@dataclass(frozen=True)
class Scope:
    """The ambient state of a node.

    Attributes:
        regions: the enter nodes that are open, outermost first.
        grad: the grad mode that the graph set, ``None`` for whatever the caller has.
    """

    regions: tuple[Node, ...] = ()
    grad: bool | None = None


NEUTRAL = Scope()


@dataclass(frozen=True)
class RegionKind:
    """One kind of region.

    Attributes:
        name: for messages.
        enter: target that opens it and yields a handle.
        exit: target that takes the handle and restores what ``enter`` saw.
        key: which state it changes; two regions with one key restore each other's state.
        grad: the grad mode that entering sets, given the enter node; ``None`` if it leaves grad mode alone.
    """

    name: str
    enter: Any
    exit: Any
    key: Callable[[Node], Hashable]
    grad: Callable[[Node], bool | None] = lambda node: None


REGIONS: tuple[RegionKind, ...] = (
    RegionKind("autocast", _torch.ENTER_AUTOCAST, _torch.EXIT_AUTOCAST, lambda n: ("autocast", n.args[0])),
    RegionKind(
        "inference_mode",
        _torch.ENTER_INFERENCE,
        _torch.EXIT_INFERENCE,
        lambda n: "inference_mode",
        lambda n: not n.args[0],  # c10::InferenceMode(on) also sets grad mode to `not on`
    ),
    RegionKind("record_function", _torch.ENTER_RECORD, _torch.EXIT_RECORD, lambda n: n),
)
_BY_ENTER = {kind.enter: kind for kind in REGIONS}
_BY_EXIT = {kind.exit: kind for kind in REGIONS}


def region_kind(enter: Node) -> RegionKind:
    """The kind of region that the node ``enter`` opens."""
    return _BY_ENTER[_packet(enter.target)]


def opens(node: Node) -> bool:
    """Whether ``node`` opens a region."""
    return node.op == "call_function" and _packet(node.target) in _BY_ENTER


def closes(node: Node) -> bool:
    """Whether ``node`` closes a region."""
    return node.op == "call_function" and _packet(node.target) in _BY_EXIT


def is_state_op(node: Node) -> bool:
    """Whether ``node`` only changes, or only saves for a later change, the ambient state."""
    if node.op != "call_function":
        return False
    if node.target is torch.is_grad_enabled:  # `prev = is_grad_enabled(); ...; set_grad_enabled(prev)`
        return bool(node.users) and all(user.target is _torch.SET_GRAD for user in node.users)
    return node.target is _torch.SET_GRAD or opens(node) or closes(node)


def _packet(target: object) -> object:
    """``aten.op.overload`` -> ``aten.op``: graphs carry either; unhashable targets are nobody's."""
    target = getattr(target, "overloadpacket", target)
    return target if isinstance(target, Hashable) else None


def scopes(graph: fx.Graph) -> tuple[Mapping[Node, Scope], Scope]:
    """The scope of each node, and the state in which the graph leaves its caller.

    An exit restores the state that its enter saw, as torch's context managers do, also where regions of one kind
    interleave (enter a, enter b, exit a, exit b leaves a's state behind).

    Raises:
        GraphError: SK103 when an exit has no open enter, or when the state depends on a computed value.
    """
    scope: dict[Node, Scope] = {}
    saved: dict[Node, Scope] = {}
    order: dict[Node, int] = {}  # of regions, as they are opened
    now = NEUTRAL
    for node in graph.nodes:
        if node.target is torch.is_grad_enabled:
            saved[node] = now
        if not is_state_op(node):
            scope[node] = now
        elif node.target is torch.is_grad_enabled:
            continue
        elif opens(node):
            saved[node], order[node] = now, len(order)
            now = _entered(node, now)
        elif closes(node):
            now = _exited(node, now, saved, order)
        else:
            now = replace(now, grad=_grad_set_by(node, saved))
    return scope, now


def _entered(node: Node, now: Scope) -> Scope:
    if node.all_input_nodes:
        raise GraphError(
            "SK103",
            f"{node.name} opens a region whose settings are computed by {node.all_input_nodes[0].name}",
            "Capture the model with constant region settings.",
            [node],
        )
    grad = region_kind(node).grad(node)
    return Scope((*now.regions, node), now.grad if grad is None else grad)


def _exited(node: Node, now: Scope, saved: Mapping[Node, Scope], order: Mapping[Node, int]) -> Scope:
    enter = node.args[0]
    if not isinstance(enter, Node) or enter not in saved:
        raise GraphError(
            "SK103",
            f"{node.name} closes a region that was not opened before it",
            "Put an enter node before it, or erase the exit node.",
            [node],
        )
    kind = region_kind(enter)
    key, before = kind.key(enter), saved[enter]
    others = [r for r in now.regions if region_kind(r).key(r) != key]
    restored = [r for r in before.regions if region_kind(r).key(r) == key]
    regions = tuple(sorted([*others, *restored], key=order.__getitem__))
    return Scope(regions, now.grad if kind.grad(enter) is None else before.grad)


def _grad_set_by(node: Node, saved: Mapping[Node, Scope]) -> bool | None:
    value = node.args[0]
    if isinstance(value, bool):
        return value
    if isinstance(value, Node) and value in saved:
        return saved[value].grad
    raise GraphError(
        "SK103",
        f"{node.name} sets the grad mode to {value}, which the graph computes",
        "Set it to True, False or the result of torch.is_grad_enabled().",
        [node],
    )
