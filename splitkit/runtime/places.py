"""Which device computes and holds what, of a split whose parts have devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.engine.split import Split
from splitkit.errors import PipelineError, nearest
from splitkit.graph.checks import check_nodes
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import attribute, tensors
from splitkit.graph.symbols import value_of
from splitkit.pipeline.together import fills_memory, read_by_address
from splitkit.plans.localize import is_small
from splitkit.plans.parts import HOST, PartKey
from splitkit.runtime.written import WrittenMemory, steps_of, written_memory

DeviceLike = torch.device | str
Devices = Mapping[PartKey, DeviceLike] | Sequence[DeviceLike] | DeviceLike | None
"""Part -> device, devices in the order of the parts, or one for all; ``None``: those of the plan."""


def devices_of(split: Split, given: Devices) -> Mapping[PartKey, torch.device]:
    """The device of each part, in the order of execution; with an index where the type has several.

    Raises:
        PipelineError: SK807 for a part without a device, or one that cannot be run so.
    """
    keys = tuple(split.parts)
    if not keys:
        raise _bad("the split has no parts: all is in the host", "Plan some.")
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
            raise _bad(f"part {key!r} has no device", 'Give them: to_devices(split, ["cuda:0", "cuda:1"]).', key)
        if part.replicas > 1:
            raise _bad(
                f"part {key!r} has {part.replicas} replicas, which take a process each",
                "Run it with splitkit.runtime.pipeline, or plan without replicas.",
                key,
            )
        found[key] = _device(device, key)
    return found


def _device(given: object, key: PartKey) -> torch.device:
    try:
        device = torch.device(given)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError) as error:
        raise _bad(f"part {key!r} has the device {given!r:.100}: {error}", 'Use "cuda:0", say.', key) from error
    return torch.device(device.type, device.index or 0) if device.type in ("cpu", "cuda") else device


def _bad(reason: str, remedy: str, *parts: object) -> PipelineError:
    return PipelineError("SK807", reason, remedy, parts)


@dataclass(frozen=True)
class DevicePlaces:
    """Where everything is.

    Attributes:
        parts: part -> its device.
        nodes: nodes of the parent -> where their values are made; inputs, and what is made of them alone and is
            small, are wherever the caller has them.
        tensors: id of a parameter, buffer or constant that is read -> where it is held.
        written: what is written, and where.
    """

    parts: Mapping[PartKey, torch.device]
    nodes: Mapping[Node, torch.device]
    tensors: Mapping[int, torch.device]
    written: WrittenMemory


def places_of(split: Split, parts: Mapping[PartKey, torch.device]) -> DevicePlaces:
    """Where everything is.

    Raises:
        PipelineError: SK807 for a module that is called on several devices, SK808 for memory that is written and would
            lie on several.
    """
    nodes = _host_nodes(split, parts)
    runs: dict[Node, list[torch.device]] = {}
    for key, sub in split.subgraphs.items():
        for node in sub.nodes:
            runs.setdefault(node, []).append(parts[key])
    for node, copied in split.copies[HOST].items():
        if copied in nodes:
            runs.setdefault(node, []).append(nodes[copied])
    runs = {n: _home_first(split, parts, n, where) for n, where in runs.items()}
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


def _home_first(
    split: Split, parts: Mapping[PartKey, torch.device], node: Node, where: Sequence[torch.device]
) -> list[torch.device]:
    home = split.plan.places.get(node, (HOST,))[0]
    first = [parts[home]] if home in parts else []
    return list(dict.fromkeys([*first, *where]))


def _host_nodes(split: Split, parts: Mapping[PartKey, torch.device]) -> dict[Node, torch.device]:
    """Calls in the parent: a part is where it is said to be, an op of the host where the first value that it reads is,
    else where it is read first.
    """
    graph, first = split.module.graph, next(iter(parts.values()))
    by_name = {name: parts[key] for key, name in split.names.items()}
    original = {copied: node for node, copied in split.copies[HOST].items()}
    found: dict[Node, torch.device] = {}
    late: list[Node] = []
    checks = check_nodes(graph)  # run where the caller is, on what it gives
    for node in graph.nodes:
        if node in checks:
            continue
        if node.op in ("call_module", "get_attr") and node.target in by_name:  # get_attr: one that is checkpointed
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
    """The device of each tensor that is read: that of the module which is called with it, of what writes it, of the
    part that reads it first.
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
                "SK808", f"{fixed[tensor_id][1]} holds a buffer that {device} writes", "Put both there."
            )
    return {**first, **homes, **{i: device for i, (device, _) in fixed.items()}}


def _readers(
    split: Split, parts: Mapping[PartKey, torch.device], nodes: Mapping[Node, torch.device]
) -> Iterator[tuple[Node, torch.device]]:
    """Nodes that read attributes or call modules of the original, and where, in the order of execution."""
    for key, sub in split.subgraphs.items():
        yield from ((n, parts[key]) for n in sub.nodes if n.op in ("get_attr", "call_module"))
    for node, copied in split.copies[HOST].items():
        if node.op == "call_module":
            yield node, nodes[copied]
        elif node.op == "get_attr":
            yield from ((node, device) for device in _first_read(copied, nodes, parts))


def _first_read(
    node: Node, nodes: Mapping[Node, torch.device], parts: Mapping[PartKey, torch.device]
) -> Iterable[torch.device]:
    return [next((nodes[user] for user in node.users if user in nodes), next(iter(parts.values())))]


def _require_dense(split: Split, runs: Mapping[Node, Sequence[torch.device]], held: Mapping[int, torch.device]) -> None:
    """``as_strided`` reads the memory of a value by address: a copy has other addresses where there were gaps.

    Raises:
        PipelineError: SK808 where it reads (a view of) a copy of such a value.
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
                f"{node.name} reads the memory of {base.name} by address, of which its device has a copy",
                "Put both into parts of one device.",
                [node, base],
            )


def captured_types(split: Split) -> frozenset[str]:
    """The types of the devices that the graph was captured on: of its parameters, else of its inputs."""
    graph = split.flow.graph
    for op in ("get_attr", "placeholder"):
        found = {t.device.type for n in graph.find_nodes(op=op) for t in tensors(value_of(n))}
        if found:
            return frozenset(found)
    held = {t.device.type for t in (*split.flow.root.parameters(), *split.flow.root.buffers())}
    return frozenset(held or {"cpu"})


def follows(device: torch.device, captured: frozenset[str]) -> bool:
    """Whether a device that the graph names moves with its part: not ``meta``, and not a CPU that a model on another
    device asks for.
    """
    return device.type in captured or device.type not in ("cpu", "meta")


def stays(node: Node, captured: frozenset[str]) -> bool:
    """Whether a value need not be moved: a number, or on the CPU though the model was captured elsewhere."""
    value: Any = value_of(node)
    if value is None:
        return "val" in node.meta
    found = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (torch.Tensor, torch.device))]
    devices = [leaf.device if isinstance(leaf, torch.Tensor) else leaf for leaf in found]
    return not any(follows(device, captured) for device in devices)
