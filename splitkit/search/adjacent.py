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
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from splitkit import _torch
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.dependences import Before, lowest_first, nodes_after
from splitkit.graph.storages import start_of


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


# What a partition may hold at most: nodes, and bytes of parameters, each tensor counted once per partition.


@dataclass(frozen=True)
class PartitionLimits:
    """The most that a partition may hold; ``None`` is no limit.

    Attributes:
        nodes: the number of nodes, members of tuples included.
        parameter_bytes: bytes of parameters, buffers and constants.
    """

    nodes: int | None = None
    parameter_bytes: int | None = None

    def __bool__(self) -> bool:
        return self.nodes is not None or self.parameter_bytes is not None


@dataclass
class Load:
    """What a node or a partition holds.

    Attributes:
        nodes: the number of nodes.
        tensors: tensor -> its bytes.
        nbytes: their sum.
    """

    nodes: int = 0
    tensors: dict[Hashable, int] = field(default_factory=dict)
    nbytes: int = 0

    def __iadd__(self, other: Load) -> Load:
        self.nodes += other.nodes
        for tensor, nbytes in other.tensors.items():
            if tensor not in self.tensors:
                self.tensors[tensor] = nbytes
                self.nbytes += nbytes
        return self

    def fits_with(self, other: Load, limits: PartitionLimits) -> bool:
        """Return whether the two together keep to the limits."""
        if limits.nodes is not None and self.nodes + other.nodes > limits.nodes:
            return False
        if limits.parameter_bytes is None:
            return True
        new = sum(nbytes for tensor, nbytes in other.tensors.items() if tensor not in self.tensors)
        return self.nbytes + new <= limits.parameter_bytes


def loads_of(
    flow: Dataflow, nodes: Iterable[Node], limits: PartitionLimits, owners: Mapping[Node, Node]
) -> dict[Node, Load]:
    """Return what each node holds, with the members of its tuple, which hold nothing themselves.

    Args:
        flow: facts about the graph.
        nodes: the nodes of a backend.
        limits: what has no limit is not counted.
        owners: member of a tuple -> the node whose partition it joins.
    """
    found: dict[Node, Load] = {}
    for node in nodes:
        found[node] = load = Load()
        if node not in owners:
            load.nodes = 1
            if limits.parameter_bytes is not None and _reads_state(node):
                load += _tensors(flow, node)
    for owner in owners.values():
        if owner in found:
            found[owner].nodes += 1
    return found


def _reads_state(node: Node) -> bool:
    return node.op in ("call_module", "get_attr") or any(n.op == "get_attr" for n in node.all_input_nodes)


def _tensors(flow: Dataflow, node: Node) -> Load:
    sizes: dict[Hashable, int] = {start_of(t): t.numel() * t.element_size() for t in flow.owned(node)}
    return Load(tensors=sizes, nbytes=sum(sizes.values()))


# A lower bound on the number of partitions: the segments of a path, and how much must fit into how many of them.
#
# The least number of partitions under limits is NP-hard (bin packing). Let ``head`` of a node be the largest number of
# its partition on a path that ends there: partitions that must come before it, and its own. In any division, the
# earliest partition that holds a node with ``head >= t`` comes after ``t - 1`` others, which hold no such node. If
# these nodes need ``c`` partitions because of the limits, there are at least ``t - 1 + c``; and the same from the
# other end::
#
#     head      1        2        2        at most two nodes per partition:
#               a ── U ─ b        |        head >= 2: b, d, e, f need 2, and 1 comes before: 3 partitions
#               c ── V ─ d, e, f  |        all: 6 nodes need 3 partitions


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


# Partitions by levels: each supported node joins the partition nearest to the end of the graph that it may join.
#
# The partitions are kept in a row, the last of the graph first. Along every dependence between two supported nodes the
# place in the row stays or grows backwards, and through an unsupported node it grows::
#
#     a ── U ── b          b: place 0     {b, d}
#     c ── d               a: place 1     {a}       c -> d: c may join place 0
#
# Without limits this gives the partitions of torch's ``CapabilityBasedPartitioner``, which tries to merge each node,
# from the end of the graph, with every partition. There any two partitions are connected by a path through an
# unsupported node, because they would have been merged otherwise. A node, which comes before all of them, may
# therefore join exactly those from a certain place on, and torch tries them from the end of the graph. The number of
# places is the number of supported segments on some path, so no plan has fewer. With limits this is first-fit packing
# under precedence.


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

    def add(self, node: Node, least: int) -> int:
        """Add a node to the first partition from ``least`` on that has room, or to a new one; return its place."""
        place = least
        if self._limits:
            load = self._of_node[node]
            while place < len(self.partitions) and not self._loads[place].fits_with(load, self._limits):
                place += 1
        if place == len(self.partitions):
            self.partitions.append([])
            self._loads.append(Load())
        self.partitions[place].append(node)
        if self._limits:
            self._loads[place] += load
        return place


# Members of tuples: ``getitem`` nodes join the partition of the node that made their tuple, as in torch's partitioner.
#
# Torch moves every reader of a node that only ``getitem`` nodes read. It does not look at what else such a reader waits
# for (an index that a node computes, a write before it), and may thereby make a cycle, or move a node for ever. Here
# readers with other dependences are moved if the result has no cycle, and otherwise stay where they are.


Partitions = dict[int, dict[Node, int | None]]
"""Torch's id of a partition -> its nodes -> their places from the end of the graph; of a moved node, ``None``."""


def owners_of(before: Before) -> dict[Node, Node]:
    """Return ``getitem`` node -> the node whose partition it joins; only nodes that wait for nothing else."""
    found: dict[Node, Node] = {}
    for node in before:
        if _makes_a_tuple(node):
            found |= {user: found.get(node, node) for user in node.users if len([*before[user]]) == 1}
    return found


def move_members(partitions: Partitions, before: Before) -> Partitions:
    """Return the partitions with the members of tuples moved."""
    makers = {node: tuple(node.users) for node in before if _makes_a_tuple(node)}
    if any(len([*before[user]]) > 1 for users in makers.values() for user in users):
        moved = _moved(partitions, makers)
        if moved is not None and not has_cycle([[*nodes] for nodes in moved.values()], before):
            return moved
        alone = {node: tuple(u for u in users if len([*before[u]]) == 1) for node, users in makers.items()}
        makers = {node: users for node, users in alone.items() if users}
    moved = _moved(partitions, makers)
    assert moved is not None, "a node with one input moves with that input"
    return moved


def _makes_a_tuple(node: Node) -> bool:
    users = node.users
    return bool(users) and all(u.target is operator.getitem and u.op == "call_function" for u in users)


def _moved(partitions: Partitions, makers: Mapping[Node, tuple[Node, ...]]) -> Partitions | None:
    """Return the partitions after torch's rounds of moves; ``None`` if the rounds do not end.

    The rounds decide the order of the moved nodes, which stand at the end of their partition.
    """
    made = {number: dict(nodes) for number, nodes in partitions.items()}
    number_of = {node: number for number, nodes in made.items() for node in nodes}
    for _ in range(len(makers) + 2):
        moves = {
            user: number_of.get(node)
            for node, users in makers.items()
            for user in users
            if number_of.get(user) != number_of.get(node)
        }
        if not moves:
            return made
        for node, number in moves.items():
            if node in number_of:
                del made[number_of.pop(node)][node]
            if number is not None:
                number_of[node] = number
                made[number][node] = None
    return None


# The quotient graph of partitions: every partition as one block. Partitions can be fused if it has no cycle.


def has_cycle(partitions: Iterable[Sequence[Node]], before: Before) -> bool:
    """Return whether partitions wait for each other in a cycle."""
    block = {node: -1 - i for i, nodes in enumerate(partitions) for node in nodes}
    numbers = {node: block.get(node, i) for i, node in enumerate(before)}
    waits: dict[int, set[int]] = {number: set() for number in numbers.values()}
    for node, earlier in before.items():
        waits[numbers[node]].update(numbers[n] for n in earlier if numbers[n] != numbers[node])
    return len(lowest_first(waits)) < len(waits)


# Which partitions are worth a call, and which nodes at their borders are not: nodes that compute nothing.


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
