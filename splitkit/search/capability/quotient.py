"""The quotient graph of partitions: every partition as one block. Partitions can be fused if it has no cycle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Node

from splitkit.graph.dependences import Before


def has_cycle(partitions: Iterable[Sequence[Node]], before: Before) -> bool:
    """Return whether partitions wait for each other in a cycle."""
    block = {node: -1 - i for i, nodes in enumerate(partitions) for node in nodes}
    numbers = {node: block.get(node, i) for i, node in enumerate(before)}
    return _sorted_blocks(numbers, before) < len(set(numbers.values()))


def _sorted_blocks(numbers: Mapping[Node, int], before: Before) -> int:
    """Return how many blocks can be put in an order."""
    after: dict[int, list[int]] = {number: [] for number in numbers.values()}
    missing = dict.fromkeys(after, 0)
    for node, earlier in before.items():
        for n in earlier:
            if numbers[n] != numbers[node]:
                after[numbers[n]].append(numbers[node])
                missing[numbers[node]] += 1
    ready = [number for number, count in missing.items() if not count]
    for number in ready:  # grows
        for other in after[number]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return len(ready)
