"""Sorts a graph topologically, with a choice of which ready unit comes next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any


def in_turn(before: Sequence[Collection[int]], place: Callable[[int, int], Any]) -> Iterator[int]:
    """Yield the units in topological order, always the first of the ready ones; those on or behind a cycle are left
    out.

    Args:
        before: the units before each unit.
        place: (unit that becomes ready, number of units taken) -> its place among the ready ones, the least first.
    """
    after: list[list[int]] = [[] for _ in before]
    for unit, units in enumerate(before):
        for first in units:
            after[first].append(unit)
    missing = [len(units) for units in before]
    heap = [(place(unit, 0), unit) for unit, count in enumerate(missing) if not count]
    heapq.heapify(heap)
    taken = 0
    while heap:
        _, unit = heapq.heappop(heap)
        yield unit
        taken += 1
        for then in after[unit]:
            missing[then] -= 1
            if not missing[then]:
                heapq.heappush(heap, (place(then, taken), then))
