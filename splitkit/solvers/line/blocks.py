"""Cut a sequence into consecutive blocks whose heaviest is as light as possible, exactly."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ROOM = 2**61  # sums of scaled weights stay below this
_PAIRS = 2**22  # steps between two cuts that are weighed against each other


def scaled(weights: Floats) -> Ints:
    """Weights as integers, so that sums and comparisons are exact; what is rounded away is below 1e-15 of the total
    for up to a thousand items. Whole numbers whose sum is below 2**61 are kept as they are.
    """
    total = float(weights.sum())
    if total < _ROOM and np.all(weights == np.floor(weights)):
        return weights.astype(np.int64)
    return np.rint(weights * (_ROOM / 2 / total)).astype(np.int64)


def bottleneck(weights: Ints, blocks: int) -> int:
    """The least possible weight of the heaviest block: bisection over integers, each step one greedy probe.

    Args:
        weights: shape (n,), not negative.
        blocks: how many blocks, from 1 to n; each holds at least one item.
    """
    prefix = _prefix(weights)
    low = max(int(weights.max()), -(-int(prefix[-1]) // blocks))
    high = int(prefix[-1])
    while low < high:
        middle = (low + high) // 2
        if _ends(prefix, blocks, middle) is not None:
            high = middle
        else:
            low = middle + 1
    return low


def contiguous(weights: Floats, blocks: int, cut_costs: Floats | None = None) -> list[int]:
    """The first item of each block in the best division.

    Best is: the heaviest block as light as possible (exact); among all such divisions the least total cut cost (exact);
    among these the least sum of squared weights, so that the other blocks are even too (exact up to `_PAIRS`).

    Args:
        weights: shape (n,), not negative.
        blocks: how many blocks, from 1 to n.
        cut_costs: shape (n,); ``cut_costs[i]`` is paid for a cut before item ``i``. Nothing by default.

    Returns:
        ``blocks`` increasing positions, the first of them 0.
    """
    whole = scaled(weights)
    limit = bottleneck(whole, blocks)
    prefix = _prefix(whole)
    price = np.zeros(len(whole)) if cut_costs is None else cut_costs
    costs = [{0: 0.0}]  # for each cut: where it may be -> least cost up to it
    for window in _windows(whole, blocks, limit):
        costs.append(_extend(costs[-1], window, prefix, limit, price))
    return _most_even(costs, prefix, limit, price)


def _windows(whole: Ints, blocks: int, limit: int) -> list[range]:
    """Where each cut may be, so that what lies on either side still fits."""
    latest = _ends(_prefix(whole), blocks, limit)
    mirrored = _ends(_prefix(whole[::-1]), blocks, limit)
    assert latest is not None and mirrored is not None
    earliest = [len(whole) - end for end in mirrored[-2::-1]]
    return [range(low, high + 1) for low, high in zip(earliest, latest[:-1], strict=True)]


def _extend(best: dict[int, float], ends: range, prefix: Ints, limit: int, price: Floats) -> dict[int, float]:
    """One more block: for each end the least cost of all starts within ``limit``, by a sliding-window minimum."""
    costs: dict[int, float] = {}
    starts = iter(sorted(best))
    window: deque[int] = deque()
    coming = next(starts, None)
    for end in ends:
        while coming is not None and coming < end:
            while window and best[window[-1]] > best[coming]:
                window.pop()
            window.append(coming)
            coming = next(starts, None)
        while window and prefix[end] - prefix[window[0]] > limit:
            window.popleft()
        if window:
            costs[end] = best[window[0]] + float(price[end])
    return costs


def _most_even(costs: list[dict[int, float]], prefix: Ints, limit: int, price: Floats) -> list[int]:
    """The starts of the blocks: from the last cut back over steps of least cost, the evenest of these."""
    items = len(prefix) - 1
    least = min(cost for start, cost in costs[-1].items() if prefix[items] - prefix[start] <= limit)
    ends, target, added, squares = np.array([items]), np.array([least]), np.zeros(1), np.zeros(1)
    following: list[dict[int, int]] = []
    for layer in reversed(costs):
        starts = np.array(sorted(layer))
        cost = np.array([layer[int(start)] for start in starts])
        if len(starts) * len(ends) > _PAIRS:  # too many ties to weigh: the first will do
            ends, target, added, squares = ends[:1], target[:1], added[:1], squares[:1]
        load = prefix[ends][None, :] - prefix[starts][:, None]
        fits = (ends[None, :] > starts[:, None]) & (load <= limit)
        fits &= cost[:, None] + added[None, :] == target[None, :]  # the sum of `_extend`, so equal to the bit
        total = np.where(fits, (load / max(limit, 1)) ** 2 + squares[None, :], np.inf)
        choice, kept = total.argmin(axis=1), fits.any(axis=1)
        following.append({int(s): int(ends[c]) for s, c in zip(starts[kept], choice[kept], strict=True)})
        ends, target, squares = starts[kept], cost[kept], total[kept, choice[kept]]
        added = price[ends]
    path = [0]
    for step in reversed(following):
        path.append(step[path[-1]])
    return path[:-1]


def blocks_of(starts: list[int], items: int) -> Ints:
    """(n,) the block of each item, from the first item of each block."""
    return np.searchsorted(starts, np.arange(items), side="right") - 1


def _prefix(weights: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(weights)])


def _ends(prefix: Ints, blocks: int, limit: int) -> list[int] | None:
    """Where each block ends when every block takes as much as ``limit`` allows, or None if the items do not fit."""
    items = len(prefix) - 1
    ends: list[int] = []
    start = 0
    for left in range(blocks - 1, -1, -1):
        end = min(int(np.searchsorted(prefix, prefix[start] + limit, side="right")) - 1, items - left)
        if end <= start:
            return None
        ends.append(end)
        start = end
    return ends if start == items else None
