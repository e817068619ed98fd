"""The quotient graph of partitions: every partition as one block. Partitions can be fused if it has no cycle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

from splitkit.graph.dependences import Before, lowest_first


def has_cycle(partitions: Iterable[Sequence[Node]], before: Before) -> bool:
    """Return whether partitions wait for each other in a cycle."""
    block = {node: -1 - i for i, nodes in enumerate(partitions) for node in nodes}
    numbers = {node: block.get(node, i) for i, node in enumerate(before)}
    waits: dict[int, set[int]] = {number: set() for number in numbers.values()}
    for node, earlier in before.items():
        waits[numbers[node]].update(numbers[n] for n in earlier if numbers[n] != numbers[node])
    return len(lowest_first(waits)) < len(waits)
