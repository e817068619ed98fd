"""What to offload of one choice of saved values: greedy orders, shortened, and exchanges of single values.

For a fixed set the timeline is found by one rule (`OffloadTimeline.transfers`). Which set waits least is a knapsack
with release times; the orders here are rules of thumb. Values made early wait longest for backward, so their copies
have the most time; the largest first is the rule of torchtitan's memory policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from math import inf

from splitkit.training.offload_timeline import OffloadRun, OffloadTimeline

_EXCHANGES = 40
_FEW = 6  # values of which all sets are tried


def offload(timeline: OffloadTimeline, budget: int, host: float = inf, thorough: bool = False) -> OffloadRun | None:
    """Return the run that waits least of those found within the budget; ``None`` if no set of values is enough.

    Args:
        timeline: the choice.
        budget: bytes on the device.
        host: bytes on the host.
        thorough: whether to exchange single values afterwards.
    """
    runs: Iterator[OffloadRun | None]
    if timeline.fits([], budget):
        runs = iter([timeline.run(())])
    elif len(timeline.values) <= _FEW:
        runs = (_judged(timeline, chosen, budget, host) for chosen in _subsets(list(timeline.values)))
    else:
        runs = (_greedy(timeline, order, budget, host) for order in _orders(timeline))
    best = min(filter(None, runs), key=_rank, default=None)
    return _exchanged(timeline, best, budget, host) if thorough and best is not None and best.exposed else best


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))


def _rank(run: OffloadRun) -> tuple[float, int, int]:
    return run.exposed, run.host, run.peak


def _orders(timeline: OffloadTimeline) -> Iterator[list[int]]:
    trace, items = timeline.trace, list(timeline.values)
    yield sorted(items, key=lambda i: (int(trace.born[i]), i))
    yield sorted(items, key=lambda i: (-int(timeline.first[i]), i))
    yield sorted(items, key=lambda i: (int(trace.left[i] - timeline.first[i]) * int(trace.nbytes[i]), i))
    yield sorted(items, key=lambda i: (-int(trace.nbytes[i]), i))


def _greedy(timeline: OffloadTimeline, order: Sequence[int], budget: int, host: float) -> OffloadRun | None:
    """Return the run that offloads the shortest prefix of an order that fits, less values that need not go."""
    if not timeline.fits(order, budget):
        return None
    low, high = 0, len(order)  # a longer beginning frees more
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if timeline.fits(order[:middle], budget) else (middle + 1, high)
    return _judged(timeline, _needed(timeline, order[:high], budget), budget, host)


def _needed(timeline: OffloadTimeline, chosen: Sequence[int], budget: int) -> list[int]:
    """Drop values, the last one first, as long as the budget is kept; return the rest."""
    free, nbytes = budget - timeline.trace.timeline + timeline.absent(chosen), timeline.trace.nbytes
    kept = list(chosen)
    for item in reversed(chosen):
        span = slice(int(timeline.trace.left[item]) + 1, int(timeline.first[item]))
        if (free[span] >= nbytes[item]).all():
            free[span] -= nbytes[item]
            kept.remove(item)
    return kept


def _judged(timeline: OffloadTimeline, chosen: Sequence[int], budget: int, host: float) -> OffloadRun | None:
    if sum(int(timeline.trace.nbytes[item]) for item in chosen) > host or not timeline.fits(chosen, budget):
        return None
    transfers = timeline.transfers(chosen, budget)
    return None if transfers is None else timeline.run(transfers)


def _exchanged(timeline: OffloadTimeline, best: OffloadRun, budget: int, host: float) -> OffloadRun:
    """Take single values in or out, and others out or in as the budget needs, while that lets the step wait less."""
    orders = list(_orders(timeline))
    tried, left = set[frozenset[int]](), _EXCHANGES
    improved = True
    while improved:
        improved = False
        for found in _neighbours(timeline, [one.item for one in best.transfers], orders[:2], budget):
            if (key := frozenset(found)) in tried:
                continue
            tried.add(key)
            left -= 1
            run = _judged(timeline, found, budget, host)
            if run is not None and _rank(run) < _rank(best):
                best, improved = run, True
            if not left or not best.exposed:
                return best
    return best


def _neighbours(
    timeline: OffloadTimeline, chosen: Sequence[int], orders: Sequence[Sequence[int]], budget: int
) -> Iterator[list[int]]:
    """Yield sets with one value more, and with one value changed for others."""
    for item in orders[0]:
        if item not in chosen:
            yield [item, *chosen]
            yield _needed(timeline, [item, *chosen], budget)
            continue
        moved = [other for other in chosen if other != item]
        for order in orders:
            found = [*moved, *(other for other in order if other not in chosen)]
            if timeline.fits(found, budget):
                yield _needed(timeline, found, budget)
