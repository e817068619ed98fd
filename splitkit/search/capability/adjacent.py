"""Partitions of nodes that read each other: each node joins its readers' partitions where that makes no cycle.

This is torch's ``skip_horizontal_fusion``. Nodes are visited from the end of the graph, and each is merged with the
partitions of its readers, one after the other. Two blocks (a partition, or an unsupported node) may be merged if no
path from one to the other goes through a third. Ranks, which fall along every dependence, end the search for a path::

    a ── b            a joins b, then c: the path b -> U -> c forbids that
    │    └── U ── c
    └──────────── c
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from splitkit.graph.dependences import Before, nodes_after
from splitkit.search.capability.resources import Load, PartitionLimits


def by_readers(
    before: Before, supported: Mapping[Node, bool], limits: PartitionLimits, loads: Mapping[Node, Load]
) -> dict[int, list[Node]]:
    """Return torch's id of each partition -> its nodes; the arguments are those of `levels.by_levels`.

    Torch numbers the supported nodes from the end of the graph, and a merged partition keeps the id of the larger one,
    of the earlier node's if both are equal.
    """
    after = nodes_after(before)
    blocks = _Blocks(limits)
    of_node: dict[Node, int] = {}
    numbers = itertools.count()
    for node in reversed(list(before)):
        number = next(numbers) if supported[node] else None
        block = of_node[node] = blocks.add(node, number, (of_node[n] for n in after[node]), loads.get(node))
        if supported[node]:
            for other in dict.fromkeys(blocks.find(of_node[user]) for user in node.users if supported[user]):
                if blocks.fit(block, other) and not blocks.are_apart(block, other):
                    block = blocks.merge(block, other)
    return {block.number: block.nodes for block in blocks.known() if block.number is not None}


@dataclass
class _Block:
    """A partition, or an unsupported node.

    Attributes:
        nodes: its nodes.
        number: torch's id of the partition; ``None`` for an unsupported node.
        after: the blocks that wait for it.
        before: the blocks that it waits for.
        rank: a number above those of all blocks in ``after``.
        load: what the partition holds, if there are limits.
        reach: blocks that are known to have a path to it.
    """

    nodes: list[Node]
    number: int | None
    after: dict[int, None]
    load: Load | None
    before: dict[int, None] = field(default_factory=dict)
    rank: int = 0
    reach: set[int] = field(default_factory=set)

    @property
    def weight(self) -> int:
        return len(self.nodes) + len(self.after) + len(self.before)


class _Blocks:
    """The graph behind the visited nodes, with every partition as one block."""

    def __init__(self, limits: PartitionLimits) -> None:
        self._limits = limits
        self._blocks: list[_Block] = []
        self._became: list[int] = []  # block -> the block that it is merged into, itself if none

    def known(self) -> Iterator[_Block]:
        """Yield the blocks that are not merged into others."""
        return (block for i, block in enumerate(self._blocks) if self._became[i] == i)

    def add(self, node: Node, number: int | None, after: Iterable[int], load: Load | None) -> int:
        """Add a block of one node that comes before all others; return its index."""
        index = len(self._blocks)
        block = _Block([node], number, dict.fromkeys(map(self.find, after)), load)
        self._blocks.append(block)
        self._became.append(index)
        for other in block.after:
            self._blocks[other].before[index] = None
        block.rank = self._rank_above(block.after)
        return index

    def find(self, index: int) -> int:
        """Return the block that a block has become."""
        became = self._became
        while became[index] != index:
            became[index] = became[became[index]]
            index = became[index]
        return index

    def fit(self, one: int, other: int) -> bool:
        """Return whether two partitions keep to the limits together."""
        mine, others = self._blocks[one].load, self._blocks[other].load
        return mine is None or others is None or mine.fits_with(others, self._limits)

    def are_apart(self, one: int, other: int) -> bool:
        """Return whether a path from one block to the other goes through a third."""
        blocks = self._blocks
        if blocks[one].rank < blocks[other].rank:
            one, other = other, one
        known, lowest = blocks[other].reach, blocks[other].rank
        came_from: dict[int, int] = {n: one for n in blocks[one].after if n != other}
        waiting = list(came_from)
        while waiting:
            index = waiting.pop()
            block = blocks[index]
            if block.rank <= lowest:
                continue
            if index in known or other in block.after:
                while index != one:
                    known.add(index)
                    index = came_from[index]
                return True
            for n in block.after:
                if n not in came_from:
                    came_from[n] = index
                    waiting.append(n)
        return False

    def merge(self, one: int, other: int) -> int:
        """Merge two blocks that are not apart; return the index that both have now."""
        mine, others = self._blocks[one], self._blocks[other]
        number = mine.number if len(mine.nodes) >= len(others.nodes) else others.number
        rank = self._rank_together(one, other)
        kept, gone = (one, other) if mine.weight >= others.weight else (other, one)
        block, merged = self._blocks[kept], self._blocks[gone]
        self._became[gone] = kept
        block.number, block.rank = number, rank
        block.nodes += merged.nodes
        self._reconnect(kept, gone)
        if block.load is not None and merged.load is not None:
            block.load += merged.load
        block.reach |= merged.reach
        merged.nodes, merged.load, merged.reach = [], None, set()
        self._raise(kept)
        return kept

    def _reconnect(self, kept: int, gone: int) -> None:
        blocks = self._blocks
        block, merged = blocks[kept], blocks[gone]
        for n in merged.after:
            del blocks[n].before[gone]
            if n != kept:
                blocks[n].before[kept] = block.after[n] = None
        for n in merged.before:
            del blocks[n].after[gone]
            if n != kept:
                blocks[n].after[kept] = block.before[n] = None
        merged.after, merged.before = {}, {}

    def _rank_together(self, one: int, other: int) -> int:
        """Return the rank of two blocks without the dependence of the one on the other."""
        mine, others = self._blocks[one], self._blocks[other]
        first = self._rank_above(n for n in mine.after if n != other) if other in mine.after else mine.rank
        second = self._rank_above(n for n in others.after if n != one) if one in others.after else others.rank
        return max(first, second)

    def _rank_above(self, indices: Iterable[int]) -> int:
        return 1 + max((self._blocks[n].rank for n in indices), default=-1)

    def _raise(self, index: int) -> None:
        """Raise the ranks of the blocks before this one above its own."""
        waiting = [index]
        while waiting:
            block = self._blocks[waiting.pop()]
            for n in block.before:
                if self._blocks[n].rank <= block.rank:
                    self._blocks[n].rank = block.rank + 1
                    waiting.append(n)
