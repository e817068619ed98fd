"""Members of tuples: ``getitem`` nodes join the partition of the node that made their tuple, as in torch's partitioner.

Torch moves every reader of a node that only ``getitem`` nodes read. It does not look at what else such a reader waits
for (an index that a node computes, a write before it), and may thereby make a cycle, or move a node for ever. Here
readers with other dependences are moved if the result has no cycle, and otherwise stay where they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Node

from splitkit.graph.dependences import Before, lowest_first

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
