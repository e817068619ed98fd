"""A lower bound on the number of partitions: the segments of a path, and how much must fit into how many of them.

The least number of partitions under limits is NP-hard (bin packing). Let ``head`` of a node be the largest number of
its partition on a path that ends there: partitions that must come before it, and its own. In any division, the earliest
partition that holds a node with ``head >= t`` comes after ``t - 1`` others, which hold no such node. If these nodes
need ``c`` partitions because of the limits, there are at least ``t - 1 + c``; and the same from the other end::

    head      1        2        2        at most two nodes per partition:
              a ── U ─ b        |        head >= 2: b, d, e, f need 2, and 1 comes before: 3 partitions
              c ── V ─ d, e, f  |        all: 6 nodes need 3 partitions
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch.fx import Node

from splitkit.graph.dependences import Before, nodes_after
from splitkit.search.capability.resources import Load, PartitionLimits


def fewest_partitions(
    before: Before, members: Mapping[Node, bool], limits: PartitionLimits, loads: Mapping[Node, Load]
) -> int:
    """Return a number of partitions that no division of these nodes is below; without limits it is the least number.

    Args:
        before: node -> the nodes that must run before it, in an order of the graph.
        members: node -> whether it is in a partition; the others stay outside.
        limits: what a partition may hold.
        loads: member -> what it holds, if there are limits.
    """
    after = nodes_after(before)
    nodes = list(before)
    bounds = [0]
    for order, behind in ((nodes, before), (nodes[::-1], after)):
        heads = _heads(order, behind.__getitem__, members)
        bounds += [t - 1 + count for t, count in _needed(heads, limits, loads)]
    return max(bounds)


def _heads(
    order: Iterable[Node], behind: Callable[[Node], Iterable[Node]], members: Mapping[Node, bool]
) -> dict[Node, int]:
    """Return, for each member, the number of partitions on the path to it that has the most."""
    passed: dict[Node, int] = {}  # partitions on a path up to a node, itself included
    for node in order:
        most = 0
        for n in behind(node):
            most = max(most, passed[n] + (members[node] and not members[n]))
        passed[node] = max(most, 1) if members[node] else most
    return {node: count for node, count in passed.items() if members[node]}


def _needed(
    heads: Mapping[Node, int], limits: PartitionLimits, loads: Mapping[Node, Load]
) -> Iterable[tuple[int, int]]:
    """Yield, for each ``t``, how many partitions the members with ``head >= t`` need."""
    by_head: dict[int, list[Node]] = {}
    for node, head in heads.items():
        by_head.setdefault(head, []).append(node)
    total = Load()
    for t in sorted(by_head, reverse=True):
        if limits:
            for node in by_head[t]:
                total += loads[node]
        yield t, max(1, _shares(total.nodes, limits.nodes), _shares(total.nbytes, limits.parameter_bytes))


def _shares(amount: int, most: int | None) -> int:
    return -(-amount // most) if most else 0
