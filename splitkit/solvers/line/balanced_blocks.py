"""Division of a sequence into consecutive blocks, as balanced as a limit allows, and then as cheap as possible.

For a weight of evenness, with the share of all work before each place and the price of a border there::

    cost[0, 0] = 0
    cost[b, j] = min over starts i of cost[b - 1, i] + price(i) + weight * (share(j) - share(i)) ** 2

The best start never decreases with the end, so the ends are solved by halving: each bounds the starts of its
neighbours, and a block takes O(n log n) steps. Several weights are tried, and the cheapest division that is still even
enough is taken.
"""

from __future__ import annotations

import numpy as np

from splitkit.solvers.placement.problem import Floats, Ints

_WEIGHTS = 2.0 ** np.arange(20, -20.5, -0.5)
"""Weights of evenness against the price of the borders, from nearly only evenness to nearly none."""
_SAME = 1e-9  # relative; sums of squares that differ by less are equal


def even_blocks(weights: Floats, blocks: int, limit: float, prices: Floats, tolerance: float) -> list[int] | None:
    """Return the first item of each block in the most even division, the cheapest of the nearly even ones.

    Evenness is the sum of the squared weights of the blocks, the least is the most even. For one price of evenness::

        f[p][j] = min over i < j with sum(weights[i:j]) <= limit of  f[p - 1][i] + prices[i] + price * sum(...) ** 2

    The square of a sum of what is not negative keeps the quadrangle inequality, and so does the limit, so that the best
    ``i`` grows with ``j``: O(p n log n), by halving (Galil & Park, "Dynamic programming with convexity, concavity and
    sparsity", 1992). The price of evenness is found by bisection, so that the division is one on the lower convex
    hull of evenness and price.

    Args:
        weights: (n,), not negative.
        blocks: the number of blocks, from 1 to n.
        limit: the greatest weight of a block.
        prices: (n,), not negative; ``prices[i]`` is paid for a border before item ``i``.
        tolerance: relative; how far the sum of squares may exceed the least.

    Returns:
        ``blocks`` increasing positions, the first of them 0; None if no division keeps the limit.
    """
    line = _Line(weights, blocks, limit)
    if not line.fits:
        return None
    best = line.divided(np.zeros(len(weights)), 1.0)
    least = line.squares(best)
    highest = float(prices.max(initial=0.0))
    if not highest:
        return best
    allowed, cheapest = least * (1 + max(tolerance, _SAME)), float(prices[best[1:]].sum())
    low, high = 0, len(_WEIGHTS)
    while low < high:  # the less evenness counts, the less even and the cheaper
        middle = (low + high) // 2
        found = line.divided(prices / highest, float(_WEIGHTS[middle]) / max(least, 1e-300))
        if line.squares(found) > allowed:
            high = middle
            continue
        low = middle + 1
        if (price := float(prices[found[1:]].sum())) < cheapest:
            best, cheapest = found, price
    return best


def block_of_each(starts: list[int], items: int) -> Ints:
    """Return (n,) the block of each item, from the first item of each block."""
    return np.searchsorted(starts, np.arange(items), side="right") - 1


class _Line:
    """The items in order, and which blocks of them keep to the limit."""

    def __init__(self, weights: Floats, blocks: int, limit: float) -> None:
        total = float(weights.sum()) or 1.0
        self._before = np.concatenate([[0.0], np.cumsum(weights)]) / total
        room = limit / total * (1 + 1e-12) + len(weights) * 2.0**-52  # what the sums are rounded by
        self._first = np.searchsorted(self._before, self._before - room, side="left")
        self._blocks = blocks
        self._reach = [0]  # how far so many blocks reach
        for _ in range(blocks):
            furthest = int(np.searchsorted(self._before, self._before[self._reach[-1]] + room, side="right")) - 1
            self._reach.append(min(furthest, len(weights)))
        self.fits = self._reach[-1] == len(weights)

    def squares(self, starts: list[int]) -> float:
        """Return the sum of squared weights of the blocks, as shares of the total."""
        ends = [*starts[1:], len(self._before) - 1]
        return float(np.square(self._before[ends] - self._before[starts]).sum())

    def divided(self, prices: Floats, weight: float) -> list[int]:
        """Return the division that minimises the price of its borders plus its weighted squares."""
        items = len(self._before) - 1
        cost = np.full(items + 1, np.inf)
        cost[0] = 0.0
        choices: list[Ints] = []
        for block in range(1, self._blocks + 1):
            last = items - (self._blocks - block)
            entered = cost if block == 1 else cost + np.append(prices, np.inf)
            cost, choice = self._extended(entered, weight, block, min(self._reach[block], last))
            choices.append(choice)
        starts, end = [], items
        for choice in reversed(choices):
            end = int(choice[end])
            starts.append(end)
        return starts[::-1]

    def _extended(self, entered: Floats, weight: float, block: int, last: int) -> tuple[Floats, Ints]:
        """Add one block: return for each end from ``block`` to ``last`` the least price and where the block begins."""
        rows = np.arange(block, last + 1)
        low = np.maximum(self._first[rows], block - 1)
        high = np.minimum(rows - 1, self._reach[block - 1])
        best = np.full(len(rows) + 2, -1, np.int64)
        stride = 1 << max(0, len(rows) - 1).bit_length()
        floor, ceiling = low.copy(), high.copy()
        cost, choice = np.full(len(entered), np.inf), np.zeros(len(entered), np.int64)
        while stride:
            now = np.arange(stride - 1, len(rows), 2 * stride)
            if len(now):
                found, at = self._least(entered, weight, rows[now], floor[now], ceiling[now])
                cost[rows[now]], choice[rows[now]] = found, at
                best[now] = at
                floor, ceiling = _narrowed(low, high, best[: len(rows)])
            stride //= 2
        return cost, choice

    def _least(self, entered: Floats, weight: float, ends: Ints, low: Ints, high: Ints) -> tuple[Floats, Ints]:
        """Return for each end the least over the starts from ``low`` to ``high``, and the first start that
        attains it.
        """
        sizes = high - low + 1
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        start = np.repeat(low - offsets, sizes) + np.arange(int(sizes.sum()))
        total = entered[start] + weight * np.square(np.repeat(self._before[ends], sizes) - self._before[start])
        least = np.minimum.reduceat(total, offsets)
        hit = np.flatnonzero(total == np.repeat(least, sizes))
        return least, start[hit[np.searchsorted(hit, offsets)]]


def _narrowed(low: Ints, high: Ints, best: Ints) -> tuple[Ints, Ints]:
    """Return the range of best starts of each row, given those of some rows (-1: unknown); they never decrease."""
    known = best >= 0
    floor = np.maximum(low, np.maximum.accumulate(np.where(known, best, 0)))
    above = np.where(known, best, len(best) + int(high.max()))
    ceiling = np.minimum(high, np.minimum.accumulate(above[::-1])[::-1])
    return floor, ceiling
