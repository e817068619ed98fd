"""Chains of borders from the first to the last in a given number of steps, in order of their greatest cost.

The least greatest cost from border i on, with the steps k and after to go::

    to_go[steps, last border] = nothing
    to_go[k, i] = min over pairs (i, j) of max(cost[k, i, j], to_go[k + 1, j])

It is exact, so a best-first search that it guides (A*) extends no chain in vain.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from splitkit.solvers.placement.problem import Bools, Floats, Ints


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
        pairs = best_chain(self._first, self._last, self._costs, limit)[1]
        return [int(self._last[pair]) for pair in pairs] or None

    @cached_property
    def _by_first(self) -> Ints:
        return np.argsort(self._first, kind="stable")

    @cached_property
    def _to_go(self) -> Floats:
        return _to_go(self._first, self._last, self._costs, None)


def best_chain(first: Ints, last: Ints, costs: Floats, limit: float | None = None) -> tuple[float, list[int]]:
    """Return the measure and the pairs of the chain with the least greatest cost; no pairs if there is none.

    Args:
        first: (p,) the border at which each pair begins.
        last: (p,) the border at which each pair ends; the highest is the end of all chains.
        costs: (k, p) the cost of each pair as the step of each number; infinite where it cannot be that step.
        limit: of each cost; if it is given, the sum of squared costs is to be the least.
    """
    to_go = _to_go(first, last, costs, limit)
    if not np.isfinite(to_go[0, 0]):
        return float("inf"), []
    border, pairs = 0, list[int]()
    for own, then in zip(costs, to_go[1:], strict=True):
        around = np.flatnonzero(first == border)
        pairs.append(int(around[_measures(own[around], then[last[around]], limit).argmin()]))
        border = int(last[pairs[-1]])
    return float(to_go[0, 0]), pairs


def _to_go(first: Ints, last: Ints, costs: Floats, limit: float | None) -> Floats:
    """Return (k + 1, borders) the least measure of the steps from that number on, from a border to the last one."""
    found = np.full((len(costs) + 1, int(last.max(initial=0)) + 1), np.inf)
    found[-1, -1] = -np.inf if limit is None else 0.0
    for step in reversed(range(len(costs))):
        np.minimum.at(found[step], first, _measures(costs[step], found[step + 1][last], limit))
    return found


def _measures(own: Floats, then: Floats, limit: float | None) -> Floats:
    return np.maximum(own, then) if limit is None else np.where(own <= limit, own, np.inf) ** 2 + then


def on_chains(first: Ints, last: Ints, allowed: Bools) -> Bools:
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
    found: Bools = allowed & ahead[:-1][:, first] & behind[1:][:, last]
    return found


def count_of(first: Ints, last: Ints, steps: int) -> float:
    """Return how many chains of so many steps exist over given pairs of borders, from 0 to the highest."""
    ways: Floats = np.zeros(int(last.max(initial=0)) + 1)
    ways[0] = 1.0
    for _ in range(steps):
        ways = np.bincount(last, ways[first], len(ways)).astype(np.float64)
    return float(ways[-1])


# The best chain of borders where the true cost of a pair is expensive to find, and a lower bound is known.
#
# The best chain by the bounds is found, its pairs get their true costs, and so on until all pairs of the best chain
# have theirs. Then no other chain is better, and most pairs were never asked for.


@dataclass(frozen=True)
class BestChain:
    """The best chain found.

    Attributes:
        cost: its greatest cost.
        bound: a lower bound on the greatest cost of every chain; the cost itself unless the search was stopped.
        borders: its borders, without the first.
    """

    cost: float
    bound: float
    borders: list[int]


@dataclass(eq=False)
class LazyChains:
    """All chains over pairs of borders, from border 0 to the last in as many steps as there are rows of costs.

    Attributes:
        first: (p,) the border at which each pair begins, in ascending order.
        last: (p,) the border at which each pair ends, a higher one.
        costs: (k, p) lower bounds on the cost of each pair as the step of each number; they become true costs.
        price: a function from a pair to its (k,) true costs.
        stop: whether to end the search with what is known.
    """

    first: Ints
    last: Ints
    costs: Floats
    price: Callable[[int], Floats]
    stop: Callable[[], bool]
    _known: Bools = field(init=False)

    def __post_init__(self) -> None:
        self._known = np.zeros(len(self.first), np.bool_)

    def best(self, limit: float | None = None) -> BestChain | None:
        """Return the chain with the least greatest cost, or within a limit the least sum of squared costs; None if
        there is none.
        """
        while True:
            bound, pairs = best_chain(self.first, self.last, self.costs, limit)
            unknown = [pair for pair in pairs if not self._known[pair]]
            if unknown and self.stop():
                _, pairs = best_chain(self.first, self.last, np.where(self._known, self.costs, np.inf), limit)
                unknown = []
            if not pairs:
                return None
            if not unknown:
                cost = max(float(self.costs[step, pair]) for step, pair in enumerate(pairs))
                return BestChain(cost, cost if limit is not None else bound, [int(self.last[pair]) for pair in pairs])
            for pair in unknown:
                self._known[pair] = True
                self.costs[:, pair] = np.maximum(self.costs[:, pair], self.price(pair))
