"""Who touches memory that is written, in graph order: what decides which nodes can be on different devices."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow
from splitkit.graph.effects import AMBIENT, OUTSIDE, RANDOM, SIZES, Memory

GIVEN = ("placeholder", "get_attr")
"""The kinds of nodes that only name memory which is there before the graph runs."""
_FREE = frozenset({RANDOM, OUTSIDE, AMBIENT, *((SIZES, token) for token in (RANDOM, OUTSIDE, AMBIENT))})


class Touch(NamedTuple):
    """One node that touches some memory.

    Attributes:
        node: which; the output node for what the graph yields.
        value: what the graph yields, for the output node; else the node.
        writes: whether it writes the memory.
    """

    node: Node
    value: Node
    writes: bool


def touches(flow: Dataflow, memory: Memory) -> Mapping[Hashable, list[Touch]]:
    """Memory that is written -> the nodes that touch it, in graph order; those that only name it are left out."""
    found: dict[Hashable, list[Touch]] = {}
    for node, effect in flow.effects.items():
        if node.op == "output":
            for value in node.all_input_nodes:
                if (item := memory.members.get(value)) in memory.written:
                    found.setdefault(item, []).append(Touch(node, value, False))
        elif node.op not in GIVEN:
            writes, touched = memory.use(node, effect)
            for item in touched:
                if item not in _FREE:
                    found.setdefault(item, []).append(Touch(node, node, item in writes))
    return found
