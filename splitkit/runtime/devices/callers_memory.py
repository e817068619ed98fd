"""Finds the values whose memory the caller of a graph can write after a call."""

from __future__ import annotations

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow
from splitkit.graph.shared_memory import GIVEN


def callers_memory(flow: Dataflow) -> frozenset[Node]:
    """Return the inputs, attributes and outputs of a graph, and all values that may share memory with one of them.

    Opaque code may keep what it was given: then these are all values.
    """
    effects = flow.effects
    if not all(effect.known for effect in effects.values()):
        return frozenset(flow.graph.nodes)
    sharing: dict[Node, list[Node]] = {}
    for node, effect in effects.items():
        for other in effect.aliases:
            sharing.setdefault(node, []).append(other)
            sharing.setdefault(other, []).append(node)
    rest = [n for n in flow.graph.nodes if n.op in GIVEN] + flow.graph.output_node().all_input_nodes
    found = set[Node]()
    while rest:
        node = rest.pop()
        if node not in found:
            found.add(node)
            rest += sharing.get(node, ())
    return frozenset(found)
