"""The search for stages by their true peaks: the least memory, and the fastest stages within a limit.

Solvers see sums over nodes. What a stage truly holds depends only on its nodes and the microbatches in flight, so over
given borders (`splitkit.search.stages.candidate_borders`) a dynamic program is exact, except for what waits for its
rank: that is known when the step is simulated. The program yields chains of stages, best first; the first that fits
is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice, pairwise

import numpy as np

from splitkit.pipeline.stage_prices import StagePrices
from splitkit.search.additive_memory import AdditiveMemory
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.stages.candidate_borders import (
    BorderSet,
    InFlight,
    StagePeaks,
    ideal_borders,
    loads_between,
    order_borders,
)
from splitkit.solvers.clock import Clock, endless_clock
from splitkit.solvers.line.border_chains import Chains, count_of
from splitkit.solvers.placement.core import core_of, orders
from splitkit.solvers.placement.problem import Floats, Ints, Problem

MOST_UNITS = 5_000
"""Beyond so many units nothing is looked for."""
_SETS = 8_000  # stages that are priced over all borders; along orders `PeakSearch.stretches`
_SIMULATED, _ALONG = 4_096, 48  # chains that are simulated: over all borders, along each order
_WAITING = (1, 2, 4)  # messages that may wait for a rank
_ROUNDS = 8  # with 1 to 64, three requests had the same plans
_SHARES = (1.02, 1.1, 1.25, 1.5, 2, 4, np.inf)  # of the least sums
_NEAR = 1.1  # relative to the best: tracks whose lowest peak is higher are left at that
_MOVES, _FAR = 160, (1, -1, 2, -2, 4, -4, 8, -8)  # borders that are moved, and how far


@dataclass(eq=False)
class PeakSearch:
    """One search by true peaks.

    Attributes:
        placing: the units; none of them shared.
        prices: the memory of stages.
        problem: prices of units and values, from which orders are found.
        holding: additive lower bounds on the memory of units.
        flights: about how many microbatches each stage holds.
        sure_flights: how many it holds for certain.
        rank_of: stage -> its rank.
        limits: bytes of each rank, None for no limit.
        travel: transfer times at a border; None if transfers are free.
        tolerance: relative; how much slower the bottleneck may be where that balances the stages.
        peaks: (n,) stages -> peak bytes of each rank.
        cache: (n,) bytes of cache that each unit keeps.
        replicas: the devices of each stage.
        stretches: how many segments of orders may still be priced.
        clock: the deadline of the search.
    """

    placing: PlacementModel
    prices: StagePrices
    problem: Problem
    holding: AdditiveMemory
    flights: InFlight
    sure_flights: InFlight
    rank_of: Sequence[int]
    limits: Sequence[int | None]
    travel: TransferTimes | None
    tolerance: float
    peaks: Callable[[Ints], Sequence[int]]
    cache: Ints
    replicas: int = 1
    stretches: int = 30_000
    clock: Clock = field(default_factory=endless_clock, repr=False)
    _simulated: dict[bytes, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _known: dict[bytes, BorderSet] = field(default_factory=dict, repr=False)

    @cached_property
    def all_borders(self) -> BorderSet | None:
        """All borders if they are few, else None."""
        found = ideal_borders(self.placing, self.prices)
        return None if found is None else replace(found, cache=self.cache, replicas=self.replicas)

    def _along(self, stage: Ints) -> Iterator[BorderSet]:
        """Yield borders along orders: the graph's own, the one of given stages, and nine others."""
        units = np.arange(len(stage))
        others = orders(core_of(self.problem, units))
        for order in chain([units, np.argsort(stage, kind="stable")], others):
            if (key := order.astype(np.int64).tobytes()) not in self._known:
                found = order_borders(self.placing, self.prices, order)
                self._known[key] = replace(found, cache=self.cache, replicas=self.replicas)
            yield self._known[key]

    def least(self, known: Ints) -> Ints:
        """Return (n,) stages with the lowest maximum peak found over the limited ranks, at most that of ``known``.

        It is the lowest of all if all borders of the graph were enumerated.
        """
        best, limited = known, np.isfinite(self._capacity)
        for peaks in self._usable(known, np.where(limited, float(self._top(known)), np.inf)):
            most = self._top(best) - 1
            if self.clock.is_over():
                break
            for share in (np.inf,) if peaks.track.whole else _SHARES:  # a little room at first: fewer stages to price
                capacity = np.where(limited, min(most, peaks.least_sums * share), np.inf)
                if not self._affordable(peaks, capacity):
                    break
                lower = self._lower(peaks, capacity, best)
                if lower is not best or capacity.min() >= most:
                    best = lower
                    break
        return best

    def choices(self, known: Ints, *, lowest: bool) -> list[Ints]:
        """Return divisions (n,) into stages that fit; if none are found, or if ``lowest``, one with the lowest peak."""
        least = self.least(known)
        if lowest:
            return [least]
        found = [least] if self.fits(least) else []
        if found or len(set(self.limits)) > 1:
            found = [*self.within(least), *found]
        return found or [least]

    def within(self, known: Ints) -> Iterator[Ints]:
        """Return stages that fit, the fastest and more balanced ones of each set of borders; None if there are none."""
        for peaks in self._usable(known, self._capacity):
            if self._affordable(peaks, self._capacity):
                yield from self._fastest(peaks)

    def fits(self, stage: Ints) -> bool:
        """Return whether every rank is large enough."""
        return max(self._over(stage)) <= 0

    def _over(self, stage: Ints) -> list[int]:
        """Return the bytes by which each rank is too small."""
        return [0 if m is None else peak - m for peak, m in zip(self._peaks(stage), self.limits, strict=True)]

    def _top(self, stage: Ints) -> int:
        return self._heights(stage)[0]

    def _heights(self, stage: Ints) -> list[int]:
        """Return the peaks of the limited ranks, the highest first."""
        peaks = zip(self._peaks(stage), self.limits, strict=True)
        return sorted((peak for peak, limit in peaks if limit is not None), reverse=True)

    def _peaks(self, stage: Ints) -> tuple[int, ...]:
        key = stage.tobytes()
        if key not in self._simulated:
            self._simulated[key] = tuple(self.peaks(stage))
        return self._simulated[key]

    @cached_property
    def _capacity(self) -> Floats:
        """(k,) bytes of the rank of each stage."""
        limits = [self.limits[rank] for rank in self.rank_of]
        return np.array([np.inf if limit is None else float(limit) for limit in limits])

    def _lower(self, peaks: StagePeaks, capacity: Floats, best: Ints) -> Ints:
        """Return stages with a lower peak than the best, if there are any, with their borders improved at the end."""
        track, low, reached = peaks.track, peaks.within(capacity), self._top(best)
        lowest: list[int] | None = None
        for waiting in (0,) if track.whole else (0, *_WAITING):
            chains = Chains(track.first, track.last, low + waiting * peaks.waiting())
            for value, borders in islice(chains.best_first(), _SIMULATED if track.whole else _ALONG):
                if (value >= self._top(best) and not waiting) or self.clock.is_over():
                    break
                stage = track.stage_of(borders)
                if lowest is None or self._top(stage) < self._top(track.stage_of(lowest)):
                    lowest = borders
                best = stage if self._top(stage) < self._top(best) else best
        if lowest is None or track.whole or self._top(track.stage_of(lowest)) > reached * _NEAR:
            return best
        moved = self._moved(track, lowest)
        return moved if self._top(moved) < self._top(best) else best

    def _moved(self, track: BorderSet, borders: list[int]) -> Ints:
        """Move borders along their order one by one as long as peaks fall."""
        left, now, height = _MOVES, borders, self._heights(track.stage_of(borders))
        better = True
        while better and left > 0:
            better = False
            for at in range(len(now) - 1):
                for far in _FAR:
                    then = [*now[:at], now[at] + far, *now[at + 1 :]]
                    if not (now[at - 1] if at else 0) < then[at] < now[at + 1]:
                        continue
                    left = 0 if self.clock.is_over() else left - 1
                    if (found := self._heights(track.stage_of(then))) < height:
                        now, height, better = then, found, True
        return track.stage_of(now)

    def _fastest(self, peaks: StagePeaks) -> Iterator[Ints]:
        """Return the stages with the smallest bottleneck that fit, and the most balanced ones of about that load."""
        if (few := self._few(peaks)) is not None:
            yield from few
            return
        track, loads, capacity = peaks.track, self._loads(peaks.track), self._capacity
        for number in range(_ROUNDS):
            chains = Chains(track.first, track.last, np.where(np.isfinite(peaks.within(capacity)), loads, np.inf))
            over: list[int] = []
            most = 1 if number else _SIMULATED if track.whole else _ALONG
            for value, borders in islice(chains.best_first(), most):
                over = self._over(stage := track.stage_of(borders))
                if max(over) <= 0:
                    yield stage
                    yield from self._even(track, chains, value)
                    return
                if self.clock.is_over():
                    return
            if not over:
                return
            capacity = capacity - np.maximum(0.0, over)[list(self.rank_of)]

    def _few(self, peaks: StagePeaks) -> list[Ints] | None:
        """Return, if all chains of all borders are few, those that fit and have the least loads of ranks."""
        track = peaks.track
        if not track.whole or count_of(track.first, track.last, len(self.rank_of)) > _SIMULATED:
            return None
        possible = np.where(np.isfinite(peaks.within(self._capacity)), 0.0, np.inf)
        chains = [borders for _, borders in Chains(track.first, track.last, possible).best_first()]
        pair = {ends: i for i, ends in enumerate(zip(track.first.tolist(), track.last.tolist(), strict=True))}
        loads, ranks = self._loads(track), max(self.rank_of) + 1
        worst = [
            float(
                np.bincount(
                    self.rank_of,
                    [loads[step, pair[ends]] for step, ends in enumerate(pairwise([0, *borders]))],
                    ranks,
                ).max()
            )
            for borders in chains
        ]
        found: list[Ints] = []
        most = np.inf
        for at in np.argsort(worst, kind="stable").tolist():
            if worst[at] > most or self.clock.is_over():
                break
            if self.fits(stage := track.stage_of(chains[at])):
                most = min(most, worst[at] * (1 + self.tolerance))
                found.append(stage)
        return found

    def _even(self, track: BorderSet, chains: Chains, value: float) -> Iterator[Ints]:
        for tolerance in dict.fromkeys((self.tolerance, 0.0)):
            borders = chains.least_squares(value * (1 + tolerance))
            if borders is not None and self.fits(stage := track.stage_of(borders)):
                yield stage

    def _loads(self, track: BorderSet) -> Floats:
        """Return (k, p) seconds of each stage in each place, including values that only pass through."""
        return loads_between(track, self.placing, self.travel, len(self.rank_of))

    def _usable(self, known: Ints, capacity: Floats) -> Iterator[StagePeaks]:
        """Yield all borders if they are few, else those along orders."""
        if len(known) > MOST_UNITS:
            return
        if self._all is not None and self._all.unpriced(capacity).sum() <= _SETS:
            yield self._all
            return
        yield from (StagePeaks(track, self.holding, self.flights) for track in self._along(known))

    @cached_property
    def _all(self) -> StagePeaks | None:
        return None if (track := self.all_borders) is None else StagePeaks(track, self.holding, self.sure_flights)

    def _affordable(self, peaks: StagePeaks, capacity: Floats) -> bool:
        """Return whether the stages between these borders can still be priced."""
        wanted = 0 if peaks.track.whole else int(peaks.unpriced(capacity).sum())
        if wanted > self.stretches or (wanted and self.clock.is_over()):
            return False
        self.stretches -= wanted
        return True
