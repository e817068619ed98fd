"""Finds nodes that belong in one stage: they share written memory, unsendable values, a cache or a module's books.

A value that crosses a border is a copy. So all nodes that write some memory, or touch it before the last write, must be
in one stage. Of memory that exists before the graph runs (inputs, buffers) each stage has its own copy; if it is
written, all nodes that touch it must be in one stage::

    y = conv(x)      one stage
    y.relu_()        with it
    z = y + 1        any later stage: it reads a copy made after the last write

A cache of a decoder stays where it is from one call to the next, so all nodes that read it must be in one stage. What
only counts or records (`splitkit.graph.dataflow`) could run anywhere; its buffer belongs with its module's buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from splitkit import _torch
from splitkit.graph.caches import cache_forms, caches_of
from splitkit.graph.dataflow import Dataflow, bookkeeping
from splitkit.graph.shared_memory import GIVEN, NO_MEMORY, memory_classes, memory_touches
from splitkit.graph.storages import value_of

SCALARS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Type of a number that can be sent -> the dtype with which it is sent."""
_BY_ADDRESS = ("as_strided", "as_strided_", "_reshape_alias", "set_", "untyped_storage")


def together(flow: Dataflow) -> list[tuple[Node, ...]]:
    """Return sets of placeable nodes; all nodes of a set must be in one stage. A node may be in several sets."""
    return [nodes for nodes, _ in together_because(flow)]


def together_because(flow: Dataflow) -> list[tuple[tuple[Node, ...], str]]:
    """Return the sets of `together`, each with the reason."""
    rules = {
        "they use memory that one of them writes in place": _by_memory,
        "one reads a value of another that cannot be sent to another process": _by_values,
        "one reads the memory of another by address, and a copy has other addresses": _by_address,
        "they use one cache, which stays where it is from call to call": _by_cache,
        "one of them only keeps the books of the other's module": bookkeeping,
    }
    sets = ((nodes, why) for why, find in rules.items() for nodes in find(flow))
    placed = ((tuple(dict.fromkeys(node for node in nodes if flow.is_placeable(node))), why) for nodes, why in sets)
    return [(nodes, why) for nodes, why in placed if len(nodes) > 1]


def _by_memory(flow: Dataflow) -> Iterator[list[Node]]:
    """Yield the nodes that touch written memory up to the last write, or all of them for inputs and buffers."""
    memory = memory_classes(flow.effects, flow.root)
    given = {item for node, item in memory.members.items() if isinstance(node, Node) and node.op in GIVEN}
    for item, rows in memory_touches(flow.effects, memory).items():
        writes = [place for place, touch in enumerate(rows) if touch.writes]
        if writes:
            end = len(rows) if item in given or item in NO_MEMORY else writes[-1] + 1
            yield [touch.node for touch in rows[:end] if touch.node.op != "output"]


def _by_values(flow: Dataflow) -> Iterator[list[Node]]:
    """Yield the producer of each value that cannot be sent, with its readers."""
    for value in flow.index:
        known = value_of(value)
        if known is not None and unsendable(known):  # an unknown value may be a tensor
            yield [flow.producer(value), *value.users]


def _by_address(flow: Dataflow) -> Iterator[list[Node]]:
    """Yield nodes that read memory by address, with the producer of that memory if a copy has other addresses."""
    for node, base in read_by_address(flow):
        if base.op not in GIVEN and not fills_memory(value_of(base)):
            yield [node, flow.producer(base)]


def _by_cache(flow: Dataflow) -> Iterator[list[Node]]:
    """Yield the readers of each cache, the node that updates it among them."""
    for cache in caches_of(flow.root):
        yield cache_forms(flow.graph, cache)[1]


def unsendable(value: object) -> str:
    """Return the kind of a value that cannot be sent to another process; empty for tensors and numbers."""
    try:
        if isinstance(value, torch.Tensor):
            _ = [_torch.size_hint(n) for n in value.shape]
            return ""
        value = _torch.size_hint(value) if isinstance(value, torch.SymInt) else value
    except TypeError:
        return "value of a size that only the data decides"
    return "" if type(value) in SCALARS else type(value).__name__


def read_by_address(flow: Dataflow) -> Iterator[tuple[Node, Node]]:
    """Yield nodes that read memory by address, each with every value that shares this memory."""
    for node in flow.nodes:
        if getattr(node.target, "__name__", str(node.target)).split(".")[0] in _BY_ADDRESS:
            bases = list(node.all_input_nodes)
            for base in bases:  # the loop appends to the list
                effect = flow.effects.get(base)
                bases += [n for n in (effect.aliases if effect else ()) if n not in bases]
            yield from ((node, base) for base in bases)


def fills_memory(value: Any) -> bool:
    """Whether a tensor fills its storage contiguously, so that a copy has the same addresses."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return bool(value.is_contiguous() and value.storage_offset() == 0 and whole)
