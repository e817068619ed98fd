"""Cuts for memory over all orders of a small graph: each part ends at an *ideal*, closed under predecessors.

What a part holds depends only on its nodes and on what it takes and gives, that is, on the ideals at its two ends. A
graph that is nearly a chain has few ideals, so that all steps from one to the next can be tried.

For the first k parts, over the differences of two ideals that fit the k-th device::

    traffic[0, nothing] = 0
    traffic[k, B] = min over ideals A within B of traffic[k - 1, A] + bytes that cross at B
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

from splitkit.search.memory.memory_cuts import Limits, MemoryCuts

_MOST, _MOST_ASKED = 400, 4_000  # ideals; parts whose memory is asked for

Ideal = int
"""The positions of its nodes, as bits."""


class TooManyPartsError(Exception):
    """The graph has more possible parts than the search can ask about."""


class MemoryIdeals:
    """The possible parts of one graph, by the ideals at their ends.

    Args:
        size: the number of nodes.
        edges: pairs of positions (first, then).
        line: makes the memory of a topological order, given by the positions of its nodes.
    """

    def __init__(self, size: int, edges: Sequence[tuple[int, int]], line: Callable[[list[int]], MemoryCuts]) -> None:
        self._size, self._line, self._whole = size, line, (1 << size) - 1
        self._before = [0] * size
        for first, then in edges:
            self._before[then] |= 1 << first
        self._sums: dict[tuple[Ideal, Ideal], tuple[tuple[int, int], tuple[int, int]]] = {}
        self._traffic: dict[Ideal, int] = {}

    def best(self, limits: Limits) -> tuple[list[list[int]], int] | None:
        """Return the positions of the nodes of each part, and the traffic; None if no parts fit in any order.

        Raises:
            TooManyPartsError: the graph is too large to tell.
        """
        reached: dict[Ideal, int] = {0: 0}
        steps: list[dict[Ideal, Ideal]] = []
        for part, (memory, flights) in enumerate(zip(limits.memory, limits.flights, strict=True)):
            reached, came = self._step(reached, memory, flights, last=part + 1 == len(limits.memory))
            steps.append(came)
        if self._whole not in reached:
            return None
        ends = [self._whole]
        for came in reversed(steps):
            ends.append(came[ends[-1]])
        parts = [_positions(end & ~start) for end, start in pairwise(ends)]
        return parts[::-1], reached[self._whole]

    def _step(
        self, reached: dict[Ideal, int], memory: int, flights: int, *, last: bool
    ) -> tuple[dict[Ideal, int], dict[Ideal, Ideal]]:
        """Run one step of the dynamic program: from the possible ends of one part to those of the next, with traffic
        and starts.
        """
        after: dict[Ideal, int] = {}
        came: dict[Ideal, Ideal] = {}
        for start, crossed in reached.items():
            too_much: list[Ideal] = []
            for end in [self._whole] if last else self._ideals:
                if end == start or start & ~end or any(not more & ~end for more in too_much):
                    continue
                least, peak = ((once + flights * saved) for once, saved in self._held(start, end))
                if least > memory:
                    too_much.append(end)  # whatever has these nodes and more holds no less
                elif peak <= memory:
                    cost = crossed + self._traffic[end]
                    if cost < after.get(end, cost + 1):
                        after[end], came[end] = cost, start
        return after, came

    def _held(self, start: Ideal, end: Ideal) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the lower bound for parts with these nodes, and this part's bytes: fixed, and per microbatch."""
        if (start, end) not in self._sums:
            if len(self._sums) >= _MOST_ASKED:
                raise TooManyPartsError
            own = _positions(end & ~start)
            cuts = self._line([*_positions(start), *own, *_positions(self._whole & ~end)])
            first = start.bit_count()
            held = (self._sums_of(ask, first, first + len(own)) for ask in (cuts.least, cuts.peak))
            self._sums[start, end] = next(held), next(held)
            self._traffic.setdefault(end, cuts.traffic[first + len(own)] if end != self._whole else 0)
        return self._sums[start, end]

    @staticmethod
    def _sums_of(ask: Callable[[int, int, int], int], start: int, end: int) -> tuple[int, int]:
        once = ask(start, end, 0)
        return once, ask(start, end, 1) - once

    @cached_property
    def _ideals(self) -> list[Ideal]:
        """Return all ideals, from the smallest to the largest."""
        found, level = [0], {0}
        while level:
            level = {ideal | 1 << node for ideal in level for node in self._ready(ideal)}
            found += sorted(level)
            if len(found) > _MOST:
                raise TooManyPartsError
        return found

    def _ready(self, ideal: Ideal) -> list[int]:
        outside = (node for node in range(self._size) if not ideal >> node & 1)
        return [node for node in outside if not self._before[node] & ~ideal]


def _positions(ideal: Ideal) -> list[int]:
    """Return the nodes of an ideal, or of the difference of two."""
    return [place for place in range(ideal.bit_length()) if ideal >> place & 1]
