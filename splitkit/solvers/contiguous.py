"""Cut a sequence into consecutive blocks whose heaviest is as light as possible, exactly."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_ROOM = 2**61  # sums of scaled weights stay below this


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

    Best is: the heaviest block as light as possible (exact), and among all such divisions the least total cut cost
    (exact, a dynamic program over the window of positions that each cut can take).

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
    latest = _ends(prefix, blocks, limit)
    mirrored = _ends(_prefix(whole[::-1]), blocks, limit)
    assert latest is not None and mirrored is not None
    items = len(whole)
    earliest = [*(items - end for end in mirrored[-2::-1]), items]  # where block j may end at the earliest
    price = np.zeros(items) if cut_costs is None else cut_costs
    best: dict[int, float] = {0: 0.0}  # start of the next block -> least cost so far
    origins: list[dict[int, int]] = []
    for end_low, end_high in zip(earliest[:-1], latest[:-1], strict=True):
        best, origin = _extend(best, range(end_low, end_high + 1), prefix, limit, price)
        origins.append(origin)
    last = min((s for s in best if prefix[items] - prefix[s] <= limit), key=lambda s: (best[s], s))
    starts = [last]
    for origin in reversed(origins):
        starts.append(origin[starts[-1]])
    return starts[::-1]


def _extend(
    best: dict[int, float], ends: range, prefix: Ints, limit: int, price: Floats
) -> tuple[dict[int, float], dict[int, int]]:
    """One more block: for each end, the cheapest start within ``limit``, by a sliding-window minimum."""
    costs: dict[int, float] = {}
    origin: dict[int, int] = {}
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
            origin[end] = window[0]
    return costs, origin


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
