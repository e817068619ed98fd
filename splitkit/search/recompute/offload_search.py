"""The search for the least recompute and waiting within a budget, where saved values may wait on the host.

Any plan of recompute becomes one within the budget if enough of its values are offloaded. So the candidates are the
plans that `RecomputeSearch` meets for this budget and for larger ones, and those on the hull of saved bytes; what each
offloads is chosen by `offload_choice`, and `OffloadTimeline` judges all by one rule. Groups of ops then change sides
around the best, as in `descent`. The best plan without offload and the best that only offloads are among the
candidates, so the result is never worse than either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from math import inf

import numpy as np

from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.search.recompute.plan_pool import Descent, Pool, Seen
from splitkit.search.recompute.recompute_search import RecomputeSearch
from splitkit.training.choices import Bools, Choice
from splitkit.training.offload_timeline import OffloadModel, OffloadRun, OffloadTimeline
from splitkit.training.peaks import PeakTrace

# What to offload of one choice of saved values: greedy orders, shortened, and exchanges of single values.
#
# For a fixed set the timeline is found by one rule (`OffloadTimeline.transfers`). Which set waits least is a knapsack
# with release times; the orders here are rules of thumb. Values made early wait longest for backward, so their copies
# have the most time; the largest first is the rule of torchtitan's memory policy.


_EXCHANGES = 40  # sets that are tried; with 2 to 320, the one request that gets here had the same plan
_OFFLOAD_CHOICE_FEW = 6  # values of which all sets are tried


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
    elif len(timeline.values) <= _OFFLOAD_CHOICE_FEW:
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
    count = bisect_left(range(len(order)), True, key=lambda count: timeline.fits(order[:count], budget))
    return _judged(timeline, _needed(timeline, order[:count], budget), budget, host)


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


_LARGER = (1 / 12, 1 / 6, 1 / 3, 2 / 3)  # of the way to the peak of saving everything: other budgets that are searched
_STEPS = 60_000  # nodes that the search for changes simulates at most
_MOST = 120  # changes that it tries
_STARTS = 3  # plans over the budget from which one goes down to it
_FEW = 12  # ops of which all pairs change sides, too


@dataclass(frozen=True, eq=False)
class OffloadPlan:
    """A choice with transfers, simulated.

    Attributes:
        seen: the choice.
        timeline: its steps.
        run: the transfers, and how long they are waited for.
    """

    seen: Seen
    timeline: OffloadTimeline
    run: OffloadRun

    @property
    def seconds(self) -> float:
        """The seconds of recompute and of waiting."""
        return self.seen.seconds + self.run.exposed


class OffloadSearch:
    """Searches for plans that recompute and offload.

    Attributes:
        search: the search without offload, whose plans are candidates.
        model: makes timelines.
        host: bytes of the host.
    """

    def __init__(self, search: RecomputeSearch, model: OffloadModel, host: float = inf) -> None:
        self.search, self.model, self.host = search, model, host
        self.pool: Pool = search.pool
        self.tried = 0

    def best(self, budget: int, whole: Seen) -> OffloadPlan | None:
        """Return the best plan found within a budget.

        Args:
            budget: bytes on the device.
            whole: the plan that recomputes nothing, with its peak.
        """
        best = self.plan(whole.runs, budget)
        for look in self._looks(budget, whole):
            if best is not None and not best.seconds:
                return best
            look()
        over: list[tuple[int, float, bytes]] = []
        for seen in sorted(_front(self.pool), key=lambda seen: (seen.seconds, seen.peak)):
            if best is None or seen.seconds < best.seconds:
                found = self.plan(seen.runs, budget)
                if found is None:
                    over.append((self._excess(seen.runs, budget), seen.seconds, seen.runs.tobytes()))
                elif best is None or found.seconds < best.seconds:
                    best = found
        if best is not None:
            best = self._changed(self._refined(best, budget).seen.runs, budget, best)
        for _, _, runs in sorted(over)[:_STARTS]:
            best = self._changed(np.frombuffer(runs, np.bool_), budget, best)
        return best

    def _looks(self, budget: int, whole: Seen) -> Iterator[Callable[[], object]]:
        """Yield searches for candidates: for this budget, for larger ones, and of the hull of saved bytes."""
        yield lambda: self.search.peak(budget)
        if self.pool.best(lambda seen: seen.peak <= budget) is None:
            yield self._low
        for share in _LARGER if budget < whole.peak else ():
            # the plans of its programs are enough here: what they lack to the budget is offloaded
            yield partial(self.search.bound, budget + int(share * (whole.peak - budget)))
        yield lambda: [self.pool.see(choice.runs) for choice in Hull(self.pool.savings).choices]

    def _low(self) -> None:
        other = self.search.anew()
        other.low_peak()
        self.pool.take(other.pool)

    def lowest(self) -> OffloadPlan:
        """Return the plan with the lowest peak of those seen, if all that the host has room for is offloaded."""
        found: list[tuple[int, int, Seen]] = []
        for number, seen in enumerate(_front(self.pool)):
            timeline = self.model.timeline(*self._traced(seen.runs))
            found.append((int((timeline.trace.timeline - timeline.absent(self._room(timeline))).max()), number, seen))
        peak, _, seen = min(found)
        timeline = self.model.timeline(*self._traced(seen.runs))
        run = timeline.run(timeline.transfers(self._room(timeline), peak) or ())
        return OffloadPlan(seen, timeline, run)

    def kept(self, seen: Seen) -> OffloadPlan:
        """Return a plan that has been seen, with nothing on the host."""
        timeline = self.model.timeline(*self._traced(seen.runs))
        return OffloadPlan(seen, timeline, timeline.run(()))

    def _traced(self, runs: Bools) -> tuple[Choice, PeakTrace]:
        seen, trace = self.pool.trace(runs)
        return seen.choice, trace

    def _room(self, timeline: OffloadTimeline) -> list[int]:
        """Return the values that fit on the host, those made first before others."""
        room, found = self.host, list[int]()
        for item in sorted(timeline.values, key=lambda item: int(timeline.trace.born[item])):
            if (nbytes := int(timeline.trace.nbytes[item])) <= room:
                found.append(item)
                room -= nbytes
        return found

    def plan(self, runs: Bools, budget: int, *, thorough: bool = False) -> OffloadPlan | None:
        """Return the choice that recomputes these ops, with what it must offload; ``None`` if that is not enough."""
        seen, trace = self.pool.trace(runs)
        timeline = self.model.timeline(seen.choice, trace)
        self.tried += 1
        run = offload(timeline, budget, self.host, thorough)
        return None if run is None else OffloadPlan(seen, timeline, run)

    def _refined(self, best: OffloadPlan, budget: int) -> OffloadPlan:
        found = self.plan(best.seen.runs, budget, thorough=True)
        return found if found is not None and found.seconds < best.seconds else best

    def _excess(self, runs: Bools, budget: int) -> int:
        """Return the bytes times steps above the budget that remain if all that can be is offloaded."""
        timeline = self.model.timeline(*self._traced(runs))
        left = timeline.trace.timeline - timeline.absent(self._room(timeline)) - budget
        return int(np.maximum(left, 0).sum())

    def _changed(self, start: Bools, budget: int, best: OffloadPlan | None) -> OffloadPlan | None:
        """Let groups of ops and single ops change sides, from a start, while that makes it better.

        A plan over the budget is better with less excess, one within it with fewer seconds. All are quicker than the
        best one known.
        """
        left = max(1, min(_MOST, _STEPS // max(1, len(self.pool.peaks.nodes))))
        descent, tried, improved = Descent(self.pool), set[bytes](), True
        here = self._height(start, budget)
        while improved:
            improved = False
            for runs in _flips(start, descent):
                choice = self.pool.savings.choose(runs)
                if (key := choice.runs.tobytes()) in tried or (best and choice.seconds >= best.seconds):
                    continue
                tried.add(key)
                left -= 1
                found = self.plan(runs, budget)
                height = (0, found.seconds) if found is not None else self._height(runs, budget)
                if found is not None and (best is None or found.seconds < best.seconds):
                    best = self._refined(found, budget)
                if height < here:
                    here, start, improved = height, choice.runs, True
                if not left or (best is not None and not best.seconds):
                    return best
        return best

    def _height(self, runs: Bools, budget: int) -> tuple[int, float]:
        found = self.plan(runs, budget)
        return (self._excess(runs, budget), 0.0) if found is None else (0, found.seconds)


def _flips(runs: Bools, descent: Descent) -> Iterator[Bools]:
    groups = sorted(descent.large, key=lambda group: -len(group))
    singles = descent.free.tolist()
    pairs = combinations(singles, 2) if len(singles) <= _FEW else ()
    for move in (*groups, *descent.free[:, None], *map(list, pairs)):
        for wanted in (False, True, ~runs[move]):
            if (runs[move] != wanted).any():
                changed = runs.copy()
                changed[move] = wanted
                yield changed


def _front(plans: Iterable[Seen]) -> list[Seen]:
    """Return the plans that no other one beats in time and peak, and in time and saved bytes."""
    known = list(plans)
    ranked = [
        sorted((seen.seconds, nbytes, number) for number, (seen, nbytes) in enumerate(zip(known, taken, strict=True)))
        for taken in ([seen.peak for seen in known], [seen.saved for seen in known])
    ]
    found: dict[int, Seen] = {}
    for rank in ranked:
        least: float = inf
        for _, nbytes, number in rank:
            if nbytes < least:
                least, found[number] = nbytes, known[number]
    return list(found.values())
