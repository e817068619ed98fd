"""All dependences of a graph, also those that a `Dataflow` leaves to the engine: state ops and rebound attributes."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from torch.fx import Node

from splitkit._torch import inputs_of
from splitkit.graph.dataflow import Dataflow, nodes_after
from splitkit.graph.shared_memory import GIVEN

Before = Mapping[Node, Iterable[Node]]
"""Node -> the nodes that must run before it, each once."""
_Key = TypeVar("_Key", int, tuple[int, int])


def lowest_first(waits: Mapping[_Key, Collection[_Key]]) -> list[_Key]:
    """Sort keys topologically, the lowest that waits for nothing first; keys on a cycle, and those behind it, are left
    out.

    Args:
        waits: key -> the keys that must come before it, each once.
    """
    after = nodes_after(waits)
    missing = {key: len(earlier) for key, earlier in waits.items()}
    ready = [key for key, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        key = heapq.heappop(ready)
        order.append(key)
        for k in after[key]:
            missing[k] -= 1
            if not missing[k]:
                heapq.heappush(ready, k)
    return order


def all_dependences(flow: Dataflow) -> Before:
    """Return the nodes that must run before each node of a graph whose state ops stay where they are.

    The graph may be run in any order that these dependences allow. They are the inputs of a node, its order edges, and:

    - A state op (enter autocast, set the grad mode) comes after every node before it and before every node behind it,
      except those that no ambient state concerns: inputs, attributes, members of tuples and the output.
    - An attribute that opaque code may bind anew is read between the same opaque nodes as in the graph.

    The number of dependences is linear in nodes, edges and order edges.
    """
    before = {node: dict.fromkeys(inputs_of(node)) for node in flow.index}
    for node, earlier in flow.after.items():
        before[node] |= dict.fromkeys(earlier)
    for read, (previous, following) in flow.bindings.reads.items():
        if previous is not None:
            before[read][previous] = None
        if following is not None:
            before[following][read] = None
    if len(flow.scope) < len(flow.index):
        _add_state_ops(flow, before)
    return before


def _add_state_ops(flow: Dataflow, before: Mapping[Node, dict[Node, None]]) -> None:
    last: Node | None = None
    since: list[Node] = []  # the nodes after the last state op
    for node in flow.index:
        if node in flow.scope and (node.op in GIVEN or node.op == "output" or node in flow.followers):
            continue
        if last is not None:
            before[node][last] = None
        if node in flow.scope:
            since.append(node)
        else:
            before[node] |= dict.fromkeys(since)
            last, since = node, []
