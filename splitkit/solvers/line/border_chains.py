"""Chains of borders from the first to the last in a given number of steps, in order of their greatest cost.

The least greatest cost from border i on, with the steps k and after to go::

    to_go[steps, last border] = nothing
    to_go[k, i] = min over pairs (i, j) of max(cost[k, i, j], to_go[k + 1, j])

It is exact, so a best-first search that it guides (A*) extends no chain in vain.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Chains:
    """All chains over given pairs of borders; borders are numbered from 0, and pairs go from a lower to a higher
    number.

    Args:
        first: (p,) the border at which each pair begins.
        last: (p,) the border at which each pair ends.
        costs: (k, p) the cost of each pair as the step of each number; infinite where it cannot be that step.
    """

    def __init__(self, first: Ints, last: Ints, costs: Floats) -> None:
        self._first, self._last, self._costs = first, last, costs
        self._borders = int(last.max(initial=0)) + 1

    @property
    def least(self) -> float:
        """Return the least greatest cost of a chain; infinite if there is none."""
        return float(self._to_go[0][0])

    def best_first(self) -> Iterator[tuple[float, list[int]]]:
        """Yield chains in order of their greatest cost: the cost, and the borders but the first (A* with exact
        estimates).

        Of chains that are equal so far, the longer one is extended first, then the one of the least sum of squares.
        """
        starts = np.searchsorted(self._first[self._by_first], np.arange(self._borders + 1))
        steps, number = len(self._costs), 0
        heap: list[tuple[float, int, float, int, int, tuple[int, ...]]] = [(self.least, 0, 0.0, 0, 0, ())]
        while heap and np.isfinite(heap[0][0]):
            bound, done, squares, _, border, borders = heapq.heappop(heap)
            if done == -steps:
                yield bound, list(borders)
                continue
            around = self._by_first[starts[border] : starts[border + 1]]
            costs, then = self._costs[-done][around], self._last[around]
            bounds = np.maximum(np.maximum(costs, self._to_go[1 - done][then]), bound)
            for at in np.flatnonzero(np.isfinite(bounds)).tolist():
                number += 1
                total = squares + float(costs[at]) ** 2
                entry = float(bounds[at]), done - 1, total, number, int(then[at]), (*borders, int(then[at]))
                heapq.heappush(heap, entry)

    def least_squares(self, limit: float) -> list[int] | None:
        """Return the borders of the chain with the least sum of squared costs within the limit; None if
        there is none.
        """
        steps = len(self._costs)
        total = np.full((steps + 1, self._borders), np.inf)
        total[steps][-1] = 0.0
        allowed = np.where(self._costs <= limit, self._costs, np.inf)
        for step in reversed(range(steps)):
            np.minimum.at(total[step], self._first, allowed[step] ** 2 + total[step + 1][self._last])
        if not np.isfinite(total[0][0]):
            return None
        borders, border = [], 0
        for step in range(steps):
            around = np.flatnonzero(self._first == border)
            sums = allowed[step][around] ** 2 + total[step + 1][self._last[around]]
            border = int(self._last[around[sums.argmin()]])
            borders.append(border)
        return borders

    @cached_property
    def _by_first(self) -> Ints:
        return np.argsort(self._first, kind="stable")

    @cached_property
    def _to_go(self) -> Floats:
        """(k + 1, borders): the least greatest cost of the steps from that number on, from a border to the last one."""
        steps = len(self._costs)
        found = np.full((steps + 1, self._borders), np.inf)
        found[steps][-1] = -np.inf
        for step in reversed(range(steps)):
            np.minimum.at(found[step], self._first, np.maximum(self._costs[step], found[step + 1][self._last]))
        return found


def on_chains(first: Ints, last: Ints, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return (k, p) which pairs are a given step of some chain of allowed pairs.

    Args:
        first: (p,) the border at which each pair begins.
        last: (p,) the border at which each pair ends; the highest is the end of all chains.
        allowed: (k, p) whether a pair can be the step of each number.
    """
    steps, borders = len(allowed), int(last.max(initial=0)) + 1
    ahead, behind = (np.zeros((steps + 1, borders), np.bool_) for _ in range(2))
    ahead[0][0] = behind[steps][-1] = True
    for step in range(steps):
        ahead[step + 1][last[allowed[step] & ahead[step][first]]] = True
    for step in reversed(range(steps)):
        behind[step][first[allowed[step] & behind[step + 1][last]]] = True
    found: NDArray[np.bool_] = allowed & ahead[:-1][:, first] & behind[1:][:, last]
    return found


def count_of(first: Ints, last: Ints, steps: int) -> float:
    """Return how many chains of so many steps exist over given pairs of borders, from 0 to the highest."""
    ways: Floats = np.zeros(int(last.max(initial=0)) + 1)
    ways[0] = 1.0
    for _ in range(steps):
        ways = np.bincount(last, ways[first], len(ways)).astype(np.float64)
    return float(ways[-1])
