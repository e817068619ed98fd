"""Which partitions are worth a call, and which nodes at their borders are not: nodes that compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch.fx import Node

from splitkit import _torch
from splitkit.graph.dependences import Before, nodes_after

ALWAYS_TRANSPARENT = frozenset({"torch.ops.aten.view", "_operator.getitem"})
"""What torch's partitioner never counts as computing."""


def computing_calls(nodes: Iterable[Node], transparent: Collection[str], worth_a_call: Collection[str]) -> int:
    """Return how many function calls compute something; those in ``worth_a_call`` count twice, or once more."""
    names = [_torch.qualified_name(node.target) for node in nodes if node.op == "call_function"]
    return sum((name not in transparent) + (name in worth_a_call) for name in names)


def border_nodes(
    nodes: Collection[Node], before: Before, index: Mapping[Node, int], transparent: Collection[str]
) -> set[Node]:
    """Return the transparent calls of a partition that only transparent ones precede, or only transparent ones follow.

    Args:
        nodes: the nodes of a partition.
        before: node -> the nodes that must run before it.
        index: node -> its position in the graph.
        transparent: the qualified names of functions that compute nothing.
    """
    inside = set(nodes)
    calls = [n for n in nodes if n.op == "call_function" and _torch.qualified_name(n.target) in transparent]
    order = sorted(inside, key=index.__getitem__)
    own = {node: [n for n in before[node] if n in inside] for node in order}
    first = _closed(order, own.__getitem__, set(calls))
    last = _closed(reversed(order), nodes_after(own).__getitem__, set(calls))
    return first | last


def _closed(order: Iterable[Node], behind: Callable[[Node], Iterable[Node]], calls: Collection[Node]) -> set[Node]:
    """Return the calls behind which all nodes are such calls, or inputs of the graph."""
    found: set[Node] = set()
    for node in order:
        if node in calls and all(n in found or n.op == "placeholder" for n in behind(node)):
            found.add(node)
    return found
