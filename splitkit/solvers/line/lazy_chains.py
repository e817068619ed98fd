"""The best chain of borders where the true cost of a pair is expensive to find, and a lower bound is known.

The best chain by the bounds is found, its pairs get their true costs, and so on until all pairs of the best chain have
theirs. Then no other chain is better, and most pairs were never asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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
    _known: NDArray[np.bool_] = field(init=False)
    _starts: Ints = field(init=False)

    def __post_init__(self) -> None:
        self._known = np.zeros(len(self.first), np.bool_)
        self._starts = np.searchsorted(self.first, np.arange(int(self.last.max(initial=0)) + 2))

    def least(self) -> BestChain | None:
        """Return the chain with the least greatest cost; None if there is none."""
        return self._settled(np.maximum, None)

    def even(self, limit: float) -> BestChain | None:
        """Return the chain within a limit that has the least sum of squared costs; None if there is none."""
        return self._settled(lambda own, then: own**2 + then, limit)

    def _settled(self, joined: Callable[[Floats, Floats], Floats], limit: float | None) -> BestChain | None:
        while True:
            bound, pairs = self._chain(self.costs, joined, limit)
            unknown = [pair for pair in pairs if not self._known[pair]]
            if unknown and self.stop():
                _, pairs = self._chain(np.where(self._known, self.costs, np.inf), joined, limit)
                unknown = []
            if not pairs:
                return None
            if not unknown:
                cost = max(float(self.costs[step, pair]) for step, pair in enumerate(pairs))
                return BestChain(cost, cost if limit is not None else bound, [int(self.last[pair]) for pair in pairs])
            for pair in unknown:
                self._known[pair] = True
                self.costs[:, pair] = np.maximum(self.costs[:, pair], self.price(pair))

    def _chain(
        self, costs: Floats, joined: Callable[[Floats, Floats], Floats], limit: float | None
    ) -> tuple[float, list[int]]:
        """Return the best chain by these costs, as its measure and its pairs; no pairs if there is none."""
        steps, borders = len(costs), len(self._starts) - 1
        to_go = np.full(borders, np.inf)
        to_go[-1] = 0.0 if limit is not None else -np.inf
        ways = np.empty_like(costs)
        some = np.flatnonzero(np.diff(self._starts))
        for step in reversed(range(steps)):
            allowed = costs[step] if limit is None else np.where(costs[step] <= limit, costs[step], np.inf)
            ways[step] = joined(allowed, to_go[self.last])
            to_go = np.full(borders, np.inf)
            to_go[some] = np.minimum.reduceat(ways[step], self._starts[some])
        if not np.isfinite(to_go[0]):
            return float("inf"), []
        border, pairs = 0, []
        for step in range(steps):
            start, end = int(self._starts[border]), int(self._starts[border + 1])
            pairs.append(start + int(ways[step][start:end].argmin()))
            border = int(self.last[pairs[-1]])
        return float(to_go[0]), pairs
