"""Nodes that no runtime can put into different stages: what shares written memory, and what cannot be sent.

A value that crosses a border is a copy. So whatever writes some memory, and all that touches it before the last write,
is in one stage; of memory that is there before the graph runs (inputs, buffers), each stage has its own, so that all
that touches it is::

    y = conv(x)      one stage
    y.relu_()        with it
    z = y + 1        anywhere behind: what it reads is copied after the last write
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from splitkit import _torch
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.effects import NO_MEMORY, memory_of
from splitkit.graph.symbols import value_of
from splitkit.graph.written import GIVEN, touches

SCALARS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The numbers that can be sent, and as what."""
_BY_ADDRESS = ("as_strided", "as_strided_", "_reshape_alias", "set_", "untyped_storage")


def together(flow: Dataflow) -> list[tuple[Node, ...]]:
    """Sets of placeable nodes, each of which must be in one stage; a node may be in several sets."""
    sets = [*_by_memory(flow), *_by_values(flow), *_by_address(flow)]
    placed = [dict.fromkeys(node for node in nodes if flow.is_placeable(node)) for nodes in sets]
    return [tuple(nodes) for nodes in placed if len(nodes) > 1]


def _by_memory(flow: Dataflow) -> Iterator[list[Node]]:
    """All that touches memory up to the last write, or ever."""
    memory = memory_of(flow.effects, flow.root)
    given = {item for node, item in memory.members.items() if isinstance(node, Node) and node.op in GIVEN}
    for item, rows in touches(flow, memory).items():
        writes = [place for place, touch in enumerate(rows) if touch.writes]
        if writes:
            end = len(rows) if item in given or item in NO_MEMORY else writes[-1] + 1
            yield [touch.node for touch in rows[:end] if touch.node.op != "output"]


def _by_values(flow: Dataflow) -> Iterator[list[Node]]:
    """What makes a value that cannot be sent, and all that reads it."""
    for value in flow.index:
        known = value_of(value)
        if known is not None and unsendable(known):  # what is not known is not known to be odd
            yield [flow.producer(value), *value.users]


def _by_address(flow: Dataflow) -> Iterator[list[Node]]:
    """What reads memory by address, and what made that memory, where a copy would have other addresses."""
    for node, base in read_by_address(flow):
        if base.op not in GIVEN and not fills_memory(value_of(base)):
            yield [node, flow.producer(base)]


def unsendable(value: object) -> str:
    """What a value is that cannot be sent to another process; nothing for tensors and numbers."""
    try:
        if isinstance(value, torch.Tensor):
            _ = [_torch.size_hint(n) for n in value.shape]
            return ""
        value = _torch.size_hint(value) if isinstance(value, torch.SymInt) else value
    except TypeError:
        return "value of a size that only the data decides"
    return "" if type(value) in SCALARS else type(value).__name__


def read_by_address(flow: Dataflow) -> Iterator[tuple[Node, Node]]:
    """Nodes that read the memory of a value by address, each with that value and all that share its memory."""
    for node in flow.nodes:
        if getattr(node.target, "__name__", str(node.target)).split(".")[0] in _BY_ADDRESS:
            bases = list(node.all_input_nodes)
            for base in bases:  # grows
                effect = flow.effects.get(base)
                bases += [n for n in (effect.aliases if effect else ()) if n not in bases]
            yield from ((node, base) for base in bases)


def fills_memory(value: Any) -> bool:
    """Whether a tensor is all of its memory, in order, so that a copy has the same addresses."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return bool(value.is_contiguous() and value.storage_offset() == 0 and whole)
