"""Replaces devices that capture hard-coded in a graph by the device of the part.

::

    zeros(2, device="cpu")     on cuda:1     zeros(2, device="cuda:1")
    x.to("cpu")                ==>           x.to("cuda:1")
    _enter_autocast("cpu")                   _enter_autocast("cuda")
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.graph.storages import attribute
from splitkit.runtime.devices.device_map import follows

_DEVICE_METHODS = frozenset({"cpu", "cuda", "xpu", "mtia", "ipu"})
"""The methods of tensors that are named like the device to which they copy."""

_IN_CODE = re.compile(r"(?:device\(type=)?'([a-z]+)(?:', index=|:)(\d+)[')]")
"""A device with an index as generated code names it: ``device(type='cuda', index=1)``, ``'cuda:1'``."""


def with_numbered_devices(code: str) -> str:
    """Replace each device with an index in generated code by its place in the order in which the code names them.

    The code of a capture on ``cuda:1`` becomes the code of one on ``cuda:0``, but differs if one uses more devices.
    """
    places: dict[tuple[str, ...], int] = {}
    return _IN_CODE.sub(lambda found: f"{found[1]} {places.setdefault(found.groups(), len(places))}", code)


def names_devices(gm: fx.GraphModule, device: torch.device, captured: frozenset[str]) -> bool:
    """Whether a graph, or one nested in it, names another device."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(_rewritten(n, device, captured) != (n.target, n.args, n.kwargs) for g in graphs for n in g.nodes)


def graph_on_device(gm: fx.GraphModule, device: torch.device, captured: frozenset[str]) -> fx.GraphModule:
    """Return a copy of a graph, with the same tensors, in which hard-coded devices are this device."""
    made = copy.deepcopy(gm, {id(t): t for t in (*gm.parameters(), *gm.buffers())})
    for inner in (m for m in made.modules() if isinstance(m, fx.GraphModule)):
        for node in inner.graph.nodes:
            rewrite_devices(node, device, captured)
        inner.recompile()
    return made


def follow_device(gm: fx.GraphModule, device: torch.device, captured: frozenset[str]) -> None:
    """Replace hard-coded devices in a graph, in place; graphs nested in it are copied first, but not their tensors."""
    changed = False
    for node in gm.graph.nodes:
        new = _rewritten(node, device, captured)
        if new != (node.target, node.args, node.kwargs):
            node.target, node.args, node.kwargs = new
            changed = True
        inner = attribute(gm, str(node.target)) if node.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule) and names_devices(inner, device, captured):
            owner, _, name = str(node.target).rpartition(".")
            setattr(gm.get_submodule(owner), name, graph_on_device(inner, device, captured))
    if changed:
        gm.recompile()


def rewrite_devices(node: Node, device: torch.device, captured: frozenset[str]) -> None:
    """Replace the device on which a node was captured: in ``zeros(2, device="cpu")`` or ``x.cuda()``, for example.

    Autocast regions for the captured device type become regions for the type of ``device``.
    """
    node.target, node.args, node.kwargs = _rewritten(node, device, captured)


def _rewritten(node: Node, device: torch.device, captured: frozenset[str]) -> tuple[Any, Any, Any]:
    def on(d: torch.device) -> torch.device:
        return device if follows(d, captured) else d

    target = node.target
    args, kwargs = (pytree.tree_map_only(torch.device, on, given) for given in (node.args, node.kwargs))
    if isinstance(kwargs.get("device"), (str, int)):
        kwargs = {**kwargs, "device": _named_device(kwargs["device"], on)}
    if target is _torch.ENTER_AUTOCAST and args and args[0] in captured:
        args = (device.type, *args[1:])
    if node.op == "call_method":
        target, args = _method(str(target), args, on)
    return target, args, kwargs


def _method(name: str, args: Any, on: Callable[[torch.device], torch.device]) -> tuple[str, Any]:
    if name in _DEVICE_METHODS:
        return "to", (args[0], on(torch.device(name)))
    if name == "to":
        return name, tuple(_named_device(a, on) if isinstance(a, str) else a for a in args)
    return name, args


def _named_device(name: str | int, on: Callable[[torch.device], torch.device]) -> torch.device:
    return on(torch.device(name))
