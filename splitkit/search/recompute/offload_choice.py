"""What to offload of one choice of saved values: greedy orders, shortened, and exchanges of single values.

For a fixed set the timeline is found by one rule (`OffloadTimeline.transfers`). Which set waits least is a knapsack
with release times; the orders here are rules of thumb. Values made early wait longest for backward, so their copies
have the most time; the largest first is the rule of torchtitan's memory policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from splitkit.training.offload_timeline import OffloadRun, OffloadTimeline

_EXCHANGES = 40


def offload(timeline: OffloadTimeline, budget: int, host: float = inf, thorough: bool = False) -> OffloadRun | None:
    """Return the run that waits least of those found within the budget; ``None`` if no set of values is enough.

    Args:
        timeline: the choice.
        budget: bytes on the device.
        host: bytes on the host.
        thorough: whether to exchange single values afterwards.
    """
    if not timeline.fits([], budget):
        runs = (_greedy(timeline, order, budget, host) for order in _orders(timeline))
    else:
        runs = iter([timeline.run(())])
    best = min(filter(None, runs), key=_rank, default=None)
    return _exchanged(timeline, best, budget, host) if thorough and best is not None and best.exposed else best


def largest_first(timeline: OffloadTimeline, budget: int, host: float = inf) -> OffloadRun | None:
    """Return the run that offloads the largest values until the budget is kept, and nothing else is decided."""
    return _greedy(timeline, sorted(timeline.values, key=_largest(timeline)), budget, host, shorten=False)


def _rank(run: OffloadRun) -> tuple[float, int, int]:
    return run.exposed, run.host, run.peak


def _largest(timeline: OffloadTimeline) -> Callable[[int], tuple[int, int]]:
    return lambda item: (-int(timeline.trace.nbytes[item]), item)


def _orders(timeline: OffloadTimeline) -> Iterator[list[int]]:
    trace, items = timeline.trace, list(timeline.values)
    yield sorted(items, key=lambda i: (int(trace.born[i]), i))
    yield sorted(items, key=lambda i: (-int(timeline.first[i]), i))
    yield sorted(items, key=lambda i: (int(trace.left[i] - timeline.first[i]) * int(trace.nbytes[i]), i))
    yield sorted(items, key=_largest(timeline))


def _greedy(
    timeline: OffloadTimeline, order: Sequence[int], budget: int, host: float, shorten: bool = True
) -> OffloadRun | None:
    """Return the run of the shortest beginning of an order that fits, without those values that are not needed."""
    if not timeline.fits(order, budget):
        return None
    low, high = 0, len(order)  # a longer beginning frees more
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if timeline.fits(order[:middle], budget) else (middle + 1, high)
    chosen = list(order[:high])
    return _judged(timeline, _needed(timeline, chosen, budget) if shorten else chosen, budget, host)


def _needed(timeline: OffloadTimeline, chosen: Sequence[int], budget: int) -> list[int]:
    """Return the values without those that the budget does not need; the last ones are dropped first."""
    free, nbytes = budget - timeline.trace.timeline + timeline.absent(chosen), timeline.trace.nbytes
    kept = list(chosen)
    for item in reversed(chosen):
        span = slice(int(timeline.trace.left[item]) + 1, int(timeline.first[item]))
        if (free[span] >= nbytes[item]).all():
            free[span] -= nbytes[item]
            kept.remove(item)
    return kept


def _judged(timeline: OffloadTimeline, chosen: Sequence[int], budget: int, host: float) -> OffloadRun | None:
    if sum(int(timeline.trace.nbytes[item]) for item in chosen) > host:
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
        chosen = [one.item for one in best.transfers]
        for item in orders[0]:
            for order in orders[:2]:
                others = [i for i in order if i != item and i not in chosen]
                moved = [i for i in chosen if i != item] if item in chosen else [item, *chosen]
                found = _needed(timeline, [*moved, *(others if item in chosen else [])], budget)
                if (key := frozenset(found)) in tried or not timeline.fits(found, budget):
                    continue
                tried.add(key)
                left -= 1
                run = _judged(timeline, found, budget, host)
                if run is not None and _rank(run) < _rank(best):
                    best, improved = run, True
                if not left or not best.exposed:
                    return best
    return best
