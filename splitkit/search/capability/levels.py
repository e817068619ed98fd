"""Partitions by levels: each supported node joins the partition nearest to the end of the graph that it may join.

The partitions are kept in a row, the last of the graph first. Along every dependence between two supported nodes the
place in the row stays or grows backwards, and through an unsupported node it grows::

    a ── U ── b          b: place 0     {b, d}
    c ── d               a: place 1     {a}       c -> d: c may join place 0

Without limits this gives the partitions of torch's ``CapabilityBasedPartitioner``, which tries to merge each node, from
the end of the graph, with every partition. There any two partitions are connected by a path through an unsupported
node, because they would have been merged otherwise. A node, which comes before all of them, may therefore join exactly
those from a certain place on, and torch tries them from the end of the graph. The number of places is the number of
supported segments on some path, so no plan has fewer. With limits this is first-fit packing under precedence.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from splitkit.graph.dependences import Before
from splitkit.search.capability.resources import Load, PartitionLimits


def by_levels(
    before: Before, supported: Mapping[Node, bool], limits: PartitionLimits, loads: Mapping[Node, Load]
) -> list[list[Node]]:
    """Return the partitions in their row; each lists its nodes from the end of the graph.

    Time is linear without limits; with limits, a node may look at every partition that has no room for it.

    Args:
        before: node -> the nodes that must run before it, in an order of the graph.
        supported: node -> whether a backend can run it.
        limits: what a partition may hold.
        loads: supported node -> what it holds, if there are limits. No node exceeds the limits alone.
    """
    row = _Row(limits, loads)
    least = dict.fromkeys(before, 0)
    """Node -> the lowest place that its dependents allow; of an unsupported node, the places behind it in all."""
    for node in reversed(list(before)):
        if supported[node]:
            place = row.add(node, least[node])
            for earlier in before[node]:
                need = place if supported[earlier] else place + 1
                least[earlier] = max(least[earlier], need)
        else:
            place = least[node]
            for earlier in before[node]:
                least[earlier] = max(least[earlier], place)
    return row.partitions


class _Row:
    """Partitions that are being filled."""

    def __init__(self, limits: PartitionLimits, loads: Mapping[Node, Load]) -> None:
        self.partitions: list[list[Node]] = []
        self._limits, self._of_node = limits, loads
        self._loads: list[Load] = []
        self._next: list[int] = []  # full partition -> a later one that may not be full

    def add(self, node: Node, least: int) -> int:
        """Add a node to the first partition from ``least`` on that has room, or to a new one; return its place."""
        place = least
        if self._limits:
            load = self._of_node[node]
            place = self._open(least)
            while place < len(self.partitions) and not self._loads[place].fits_with(load, self._limits):
                place = self._open(place + 1)
        if place == len(self.partitions):
            self.partitions.append([])
            self._loads.append(Load())
            self._next.append(len(self._next))
        self.partitions[place].append(node)
        if self._limits:
            self._fill(place, load)
        return place

    def _fill(self, place: int, load: Load) -> None:
        now = self._loads[place]
        now += load
        if self._limits.nodes is not None and now.nodes >= self._limits.nodes:
            self._next[place] = place + 1

    def _open(self, place: int) -> int:
        """Return the first partition from ``place`` on that is not full of nodes."""
        path = []
        while place < len(self._next) and self._next[place] != place:
            path.append(place)
            place = self._next[place]
        for passed in path:
            self._next[passed] = place
        return place
