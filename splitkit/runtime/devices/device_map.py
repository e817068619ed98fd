"""Finds the device of each part, each node of the parent and each tensor of a split."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node
from torch.fx.node import map_aggregate

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.engine.split import Split
from splitkit.errors import PipelineError, nearest
from splitkit.graph.input_overlap import check_nodes
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import attribute, tensors, value_of
from splitkit.pipeline.inseparable_nodes import fills_memory, read_by_address
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.rewrite import is_small
from splitkit.runtime.devices.accelerators import with_index
from splitkit.runtime.devices.writes_across_devices import WrittenMemory, written_memory
from splitkit.runtime.parent import steps_of

DeviceLike = torch.device | str
Devices = Mapping[PartKey, DeviceLike] | Sequence[DeviceLike] | DeviceLike | None
"""Part -> device, devices in the order of the parts, or one for all; ``None``: the devices in the plan."""


def devices_of(split: Split, given: Devices) -> Mapping[PartKey, torch.device]:
    """Return the device of each part in the order of execution, each with an index.

    Raises:
        PipelineError: SK807 for a part that has no device, an unknown one, or replicas.
    """
    keys = tuple(split.parts)
    if not keys:
        raise _bad("the split has no parts: all nodes are in the parent", "Plan at least one part.")
    if isinstance(given, (str, torch.device)):
        given = [given] * len(keys)
    if given is not None and not isinstance(given, Mapping):
        if len(given) != len(keys):
            raise _bad(f"there are {len(given)} devices for {len(keys)} parts", "Give one for each, in their order.")
        given = dict(zip(keys, given, strict=True))
    for key in given or ():
        if key not in split.parts:
            known = nearest(str(key), list(map(str, keys)), f"The parts are {', '.join(map(repr, keys))}.")
            raise _bad(f"there is no part {key!r}", known)
    found: dict[PartKey, torch.device] = {}
    for key in keys:
        part = split.plan.parts[key]
        device = (given or {}).get(key, part.device)
        if device is None:
            raise _bad(f"part {key!r} has no device", 'Give one for each part: devices=["cuda:0", "cuda:1"].', key)
        if part.replicas > 1:
            raise _bad(
                f"part {key!r} has {part.replicas} replicas, each of which needs a process of its own",
                "Run it with splitkit.runtime.pipeline, or plan without replicas.",
                key,
            )
        found[key] = _device(device, key)
    return found


def _device(given: object, key: PartKey) -> torch.device:
    try:
        return with_index(torch.device(given))  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError) as error:
        raise _bad(f"part {key!r} has the device {given!r:.100}: {error}", 'Use "cuda:0", for example.', key) from error


def _bad(reason: str, remedy: str, *parts: object) -> PipelineError:
    return PipelineError("SK807", reason, remedy, parts)


@dataclass(frozen=True)
class DevicePlaces:
    """The devices of parts, nodes and tensors.

    Attributes:
        parts: part -> its device.
        nodes: node of the parent -> the device on which it is computed. Inputs, and small values computed from one
            input alone, are wherever the caller has the inputs.
        tensors: id of a parameter, buffer or constant that is read -> the device that holds it.
        written: the memory that is written, with its device.
    """

    parts: Mapping[PartKey, torch.device]
    nodes: Mapping[Node, torch.device]
    tensors: Mapping[int, torch.device]
    written: WrittenMemory


def places_of(split: Split, parts: Mapping[PartKey, torch.device]) -> DevicePlaces:
    """Return the devices of parts, nodes and tensors.

    Raises:
        PipelineError: SK807 for a module that is called on several devices, SK808 for memory that is written and would
            lie on several.
    """
    nodes = _parent_nodes(split, parts)
    runs: dict[Node, list[torch.device]] = {}
    for key, sub in split.subgraphs.items():
        for node in sub.nodes:
            runs.setdefault(node, []).append(parts[key])
    for node, copied in split.copies[PARENT].items():
        if copied in nodes:
            runs.setdefault(node, []).append(nodes[copied])
    for node, where in runs.items():
        home = split.plan.places.get(node, (PARENT,))[0]
        runs[node] = list(dict.fromkeys([parts[home], *where] if home in parts else where))
    computed = {n: d for n, d in runs.items() if n.op not in ("get_attr", "placeholder")}
    written = written_memory(split.flow, computed, steps_of(split))
    held = _held(split, parts, nodes, written)
    _require_dense(split, runs, held)
    checks = check_nodes(split.module.graph)
    for node in split.module.graph.find_nodes(op="get_attr"):
        value = attribute(split.module, str(node.target))
        if isinstance(value, torch.Tensor) and node not in checks:
            nodes[node] = held.get(id(value), next(iter(parts.values())))
    return DevicePlaces(parts, nodes, held, written)


def _parent_nodes(split: Split, parts: Mapping[PartKey, torch.device]) -> dict[Node, torch.device]:
    """Return the device of each call in the parent.

    A part is on its device. An op of the parent is on the device of the first value that it reads; if it reads none
    with a device, on that of its first reader.
    """
    graph, first = split.module.graph, next(iter(parts.values()))
    by_name = {name: parts[key] for key, name in split.names.items()}
    original = {copied: node for node, copied in split.copies[PARENT].items()}
    found: dict[Node, torch.device] = {}
    late: list[Node] = []
    checks = check_nodes(graph)  # run on the caller's device, on its inputs
    for node in graph.nodes:
        if node in checks:
            continue
        if node.op in ("call_module", "get_attr") and node.target in by_name:  # get_attr: a checkpointed part
            found[node] = by_name[str(node.target)]
        elif node.op.startswith("call_") and not is_state_op(node):
            if device := next((found[n] for n in node.all_input_nodes if n in found), None):
                found[node] = device
            elif node not in original or not is_small(original[node]) or len(node.all_input_nodes) > 1:
                late.append(node)
    for node in reversed(late):
        found[node] = next((found[user] for user in node.users if user in found), first)
    return found


def _held(
    split: Split, parts: Mapping[PartKey, torch.device], nodes: Mapping[Node, torch.device], written: WrittenMemory
) -> Mapping[int, torch.device]:
    """Return the device of each tensor that is read.

    It is the device on which the module with this tensor is called; otherwise the device that writes the tensor;
    otherwise the device of the first part that reads it.
    """
    root = split.flow.root
    fixed: dict[int, tuple[torch.device, str]] = {}
    first: dict[int, torch.device] = {}
    for node, device in _readers(split, parts, nodes):
        value = attribute(root, str(node.target))
        if isinstance(value, nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                before, name = fixed.setdefault(id(tensor), (device, str(node.target)))
                if before != device:
                    raise _bad(
                        f"{node.target} is called on {device}, and shares a tensor with {name}, called on {before}",
                        "Give both parts one device, or capture by export, which has no calls of modules.",
                        node,
                    )
        elif isinstance(value, torch.Tensor):
            first.setdefault(id(value), device)
    homes = {id(attribute(root, str(n.target))): d for n, d in written.homes.items() if n.op == "get_attr"}
    for tensor_id, device in homes.items():
        if fixed.get(tensor_id, (device, ""))[0] != device:
            raise PipelineError(
                "SK808", f"{fixed[tensor_id][1]} holds a buffer that {device} writes", "Put both on that device."
            )
    return {**first, **homes, **{i: device for i, (device, _) in fixed.items()}}


def _readers(
    split: Split, parts: Mapping[PartKey, torch.device], nodes: Mapping[Node, torch.device]
) -> Iterator[tuple[Node, torch.device]]:
    """Yield nodes that read attributes or call modules of the original, with their devices, in execution order."""
    for key, sub in split.subgraphs.items():
        yield from ((n, parts[key]) for n in sub.nodes if n.op in ("get_attr", "call_module"))
    for node, copied in split.copies[PARENT].items():
        if node.op == "call_module":
            yield node, nodes[copied]
        elif node.op == "get_attr":
            yield node, next((nodes[user] for user in copied.users if user in nodes), next(iter(parts.values())))


def _require_dense(split: Split, runs: Mapping[Node, Sequence[torch.device]], held: Mapping[int, torch.device]) -> None:
    """Refuse to read a copy by address: ``as_strided`` reads memory by offset, and a copy drops gaps between elements.

    Raises:
        PipelineError: SK808 if a node would read a copy, or a view of one, of a value with gaps.
    """
    for node, base in read_by_address(split.flow):
        where = runs.get(node, ())
        value: Any = value_of(base)
        if base.op == "get_attr":
            value = attribute(split.flow.root, str(base.target))
            there = [held.get(id(value), *where[:1])] if where else []
        else:
            there = list(runs.get(base, ()))
        if set(where) - set(there[:1]) and not fills_memory(value):
            raise PipelineError(
                "SK808",
                f"{node.name} reads the memory of {base.name} by address, but its device only has a copy of it",
                "Put both into parts of one device.",
                [node, base],
            )


def captured_types(graph: fx.Graph, root: nn.Module) -> frozenset[str]:
    """Return the device types on which a graph was captured: where its parameters are, otherwise its inputs."""
    for op in ("get_attr", "placeholder"):
        found = {t.device.type for n in graph.find_nodes(op=op) for t in tensors(value_of(n))}
        if found:
            return frozenset(found)
    held = {t.device.type for t in (*root.parameters(), *root.buffers())}
    return frozenset(held or {"cpu"})


def follows(device: torch.device, captured: frozenset[str]) -> bool:
    """Whether a device that the graph names is replaced by the device of its part.

    ``meta`` is not, nor is the CPU in a model that was captured on another device.
    """
    return device.type in captured or device.type not in ("cpu", "meta")


def stays(node: Node, captured: frozenset[str]) -> bool:
    """Whether a value need not be moved: a number, or a tensor that is on the CPU in a model captured elsewhere."""
    value: Any = value_of(node)
    if value is None:
        return "val" in node.meta
    found = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (torch.Tensor, torch.device))]
    devices = [leaf.device if isinstance(leaf, torch.Tensor) else leaf for leaf in found]
    return not any(follows(device, captured) for device in devices)


# Replaces devices that capture hard-coded in a graph by the device of the part.
#
# ::
#
#     zeros(2, device="cpu")     on cuda:1     zeros(2, device="cuda:1")
#     x.to("cpu")                ==>           x.to("cuda:1")
#     _enter_autocast("cpu")                   _enter_autocast("cuda")


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
    given: tuple[Any, Any] = node.args, node.kwargs
    args, kwargs = map_aggregate(given, lambda a: on(a) if isinstance(a, torch.device) else a)
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
