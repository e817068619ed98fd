"""Refuses plans in which a device would miss a write to memory by another device.

Memory that is written must be on one device; others may read it before the first write or after the last, since a
value that crosses to another device is a copy, made once per device::

    cuda:0             cuda:1
    y = conv(x) ──y──▶ y.relu_()       fine: cuda:1 writes its copy
    y.relu_()   ──y──▶ y + 1           fine: copied after the write
    y = conv(x) ──y──▶ y.relu_()
    y + 1                              refused: cuda:0 does not see the write on cuda:1
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from splitkit.errors import PipelineError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.shared_memory import GIVEN, NO_MEMORY, Memory, memory_classes, memory_touches

Devices = Mapping[Node, Sequence[torch.device]]


@dataclass(frozen=True)
class WrittenMemory:
    """Memory that is written.

    Attributes:
        homes: inputs and attributes of the graph whose memory is written -> the device that writes it.
        values: all nodes whose memory is written; they are copied only when they are read.
    """

    homes: Mapping[Node, torch.device]
    values: frozenset[Node]


Rows = Sequence[tuple[Node, Sequence[torch.device], bool]]
"""The accesses to some memory in graph order: the node, the devices that run it, whether it writes."""


def written_memory(flow: Dataflow, devices: Devices, step: Mapping[Node, int]) -> WrittenMemory:
    """Find the device of memory that is written.

    Args:
        flow: facts about the graph.
        devices: node -> the devices that compute it, its home first; other nodes are not computed.
        step: node -> the position at which its part runs.

    Raises:
        PipelineError: SK808 if copies would give other values than the graph.
    """
    memory = memory_classes(flow.effects, flow.root)
    members = {n: item for n, item in memory.members.items() if isinstance(n, Node) and item in memory.written}
    sharing: dict[Hashable, list[Node]] = {}
    for node in sorted(members, key=flow.index.__getitem__):
        sharing.setdefault(members[node], []).append(node)
    homes: dict[Hashable, torch.device] = {}
    for item, rows in _uses(flow, memory, devices).items():
        if any(is_write for _, _, is_write in rows):
            homes[item] = _require_one_home(item in NO_MEMORY, rows)
            _require_views_in_turn(flow, rows, homes[item], step)
            _require_one_way_in(flow, devices, sharing.get(item, []), rows, homes[item])
    given = {n: homes[item] for n, item in members.items() if n.op in GIVEN and item in homes}
    return WrittenMemory(given, frozenset(members))


def _uses(flow: Dataflow, memory: Memory, devices: Devices) -> Mapping[Hashable, Rows]:
    found: dict[Hashable, list[tuple[Node, Sequence[torch.device], bool]]] = {}
    for item, rows in memory_touches(flow.effects, memory).items():
        for node, value, writes in rows:
            if value in devices:
                where = devices[value][:1] if node.op == "output" else devices[value]
                found.setdefault(item, []).append((node, where, writes))
    return found


def _require_one_home(all_of_it: bool, rows: Rows) -> torch.device:
    """Return the device of all writes to some memory; all accesses in between, or all at all, must be there too."""
    writes = [i for i, (_, _, is_write) in enumerate(rows) if is_write]
    first, last = (0, len(rows) - 1) if all_of_it else (writes[0], writes[-1])
    writer, (home, *_), _ = rows[writes[0]]
    for node, where, _ in rows[first : last + 1]:
        if any(device != home for device in where):
            raise _apart(writer, node)
    early = {device for _, where, _ in rows[:first] for device in where}
    for node, where, _ in rows[last + 1 :]:
        if any(
            device != home and device in early for device in where
        ):  # this device reads a copy made before the writes
            raise _apart(writer, node)
    return home


def _require_views_in_turn(flow: Dataflow, rows: Rows, home: torch.device, step: Mapping[Node, int]) -> None:
    """Refuse a view on another device if its copy would be made between other writes than in the graph."""
    writes = [node for node, _, is_write in rows if is_write and node in step]
    places, steps = [flow.index[node] for node in writes], [step[node] for node in writes]  # writes keep their order
    for node, where, _ in rows:
        if node in flow.references and any(device != home for device in where):
            before = bisect_left(places, flow.index[node])
            if not bisect_left(steps, step[node]) <= before <= bisect_right(steps, step[node]):
                raise _apart(writes[0], node)


def _require_one_way_in(
    flow: Dataflow, devices: Devices, sharing: Sequence[Node], rows: Rows, home: torch.device
) -> None:
    """Refuse memory that enters the writing device as several values, or that others read after the write."""
    values = [n for n in sharing if n.op not in GIVEN and n in devices]
    writer = next(node for node, _, is_write in rows if is_write)
    begins_here = len(values) < len(sharing) or not values or devices[values[0]][0] == home
    entering: set[Node] = set()
    for value in values:
        if devices[value][0] == home or flow.index[value] > flow.index[writer]:
            continue
        for user in value.users:
            if home in devices.get(user, ()):
                entering.add(value)
            elif user in devices and flow.index[user] > flow.index[writer]:
                raise _apart(writer, user)
    if len(entering) > (0 if begins_here else 1):
        raise _apart(writer, max(entering, key=flow.index.__getitem__))


def _apart(a: Node, b: Node) -> PipelineError:
    other = "what is returned" if b.op == "output" else b.name
    return PipelineError(
        "SK808",
        f"{a.name} writes memory that {other} shares on another device",
        "Put all nodes that share it into parts on one device: a value that crosses is a copy.",
        [a, b],
    )
