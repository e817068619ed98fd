"""Judges cuts by a simulated step in which every rank recomputes as little as its memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeVar

import numpy as np

from splitkit.costs import Links
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.pipelines.rank_choice import Points, RankChoice, Span

_ROUNDS = 6  # until ranks fit; with 3 to 48, four plans were the same, with 1 a step was 1.6 % longer
_PRODUCTS = 1000  # combinations of points of all ranks that are sorted
_SIMULATED = 300  # and of these simulated, for each way to cut
_VALUES = 60  # of stages in which each value is tried the other way

Moved = tuple[tuple[int, ...], ...]
"""For each stage the storages of its problem that go to the host."""
Choose = Callable[[int, Sequence[Span], int], tuple[Points, Moved] | None]
"""(rank, positions of its stages, bytes that it leaves free) -> what its stages save and move, if that fits."""
_Item = TypeVar("_Item")


@dataclass(frozen=True, eq=False)
class ScoredCuts:
    """Cuts and what each stage saves.

    Attributes:
        ends: the position behind each stage.
        points: the point of each stage on its frontier.
        run: the simulated step.
        moved: for each stage, the storages of its problem that go to the host; empty if none may.
    """

    ends: tuple[int, ...]
    points: Points
    run: ScheduleRun
    moved: Moved = ()

    @property
    def seconds(self) -> float:
        """The simulated step."""
        return self.run.seconds

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The positions of each stage."""
        return list(pairwise((0, *self.ends)))


class CutScoring:
    """Scores cuts of one graph under one schedule.

    Attributes:
        choices: what ranks save.
        order: the actions of the schedule.
        links: the links between ranks.
    """

    def __init__(self, choices: RankChoice, order: PipelineOrder, links: Links | None) -> None:
        self.choices, self.order, self.links = choices, order, links
        self.tried: dict[tuple[int, ...], ScoredCuts | None] = {}
        self.proven: dict[tuple[int, ...], float] = {}
        """Cuts -> a lower bound on their step, where all points of their stages were looked at."""
        self._lean: dict[tuple[int, ...], ScoredCuts] = {}

    def of(self, ends: Sequence[int]) -> ScoredCuts | None:
        """Return the score of cuts, or ``None`` if some rank cannot hold its stages."""
        key = tuple(map(int, ends))
        if key not in self.tried:
            self.tried[key] = self._score(key)
        return self.tried[key]

    def shortfall(self, ends: Sequence[int]) -> int:
        """Return the total bytes by which ranks exceed their memory in any case, without messages."""
        ranks = enumerate(zip(self._spans(ends), self.choices.limits, strict=True))
        return sum(
            max(0, self.choices.lean(rank, spans)[0] - limit) for rank, (spans, limit) in ranks if limit is not None
        )

    def _score(self, ends: tuple[int, ...]) -> ScoredCuts | None:
        found, lacking = self._fitted(ends, self._points), 0.0
        for every in (False, True):
            if lacking < (np.inf if found is None else found.seconds) and self._small(ends, every=every):
                found, lacking = self._quickest(ends, found, every=every)
        return found if found is None or self._small(ends, every=False) else self._improved(found)

    def _improved(self, found: ScoredCuts) -> ScoredCuts:
        """Save one value more or less, of stages with few, as long as that fits and makes the step shorter."""
        stages = [self.choices.frontiers.of(*span) for span in found.spans]
        better: ScoredCuts | None = found if sum(stage.values for stage in stages) <= _VALUES else None
        while better is not None:
            found, better = better, None
            near = (
                self._run(found.ends, (*found.points[:at], point, *found.points[at + 1 :]))
                for at, stage in enumerate(stages)
                for point in stage.near(found.points[at])
            )
            better = next((n for n in near if n.seconds < found.seconds * (1 - 1e-9) and self.fits(n)), None)
        return found

    def _small(self, ends: tuple[int, ...], *, every: bool) -> bool:
        return all(self.choices.small(spans, every=every) for spans in self._spans(ends))

    def _spans(self, ends: Sequence[int]) -> list[list[Span]]:
        """Return the positions of the stages of each rank."""
        spans = list(pairwise((0, *ends)))
        return [[spans[stage] for stage in load.stages] for load in self.choices.loads]

    def _quickest(
        self, ends: tuple[int, ...], best: ScoredCuts | None, *, every: bool
    ) -> tuple[ScoredCuts | None, float]:
        """Return the shortest step of all combinations of points that fit, of which the best may be known.

        Also return the shortest step of those that lack memory for messages alone. Points that are beaten by these may
        fit, as messages arrive at other times, but take as long at least; so they are looked at if ``every``.
        """
        ranks = enumerate(zip(self._spans(ends), self.choices.limits, strict=True))
        fits = [
            [p for needed, p in self.choices.combined(rank, spans, every=every) if limit is None or needed <= limit]
            for rank, (spans, limit) in ranks
        ]
        bounds, most = self._products(ends, fits)
        bound = lacking = np.inf
        for bound, points in bounds:
            if best is not None and bound >= best.seconds * (1 - 1e-12):
                break
            found = self._run(ends, points)
            if best is None or found.seconds < best.seconds:
                if self.fits(found):
                    best = found
                else:
                    lacking = min(lacking, found.seconds)
        else:
            bound = most
        least = min(bound, np.inf if every else lacking, np.inf if best is None else best.seconds)
        self.proven[ends] = max(self.proven.get(ends, 0.0), least)
        return best, lacking

    def leanest(self, ends: Sequence[int]) -> ScoredCuts:
        """Return the lowest peak of the combinations of points that do not depend on the limits."""
        key = tuple(map(int, ends))
        if key not in self._lean:
            ranks, every = list(enumerate(self._spans(key))), self._small(key, every=True)
            best = self._run(key, self._by_stage([self.choices.lean(*each)[1] for each in ranks]))
            if every or self._small(key, every=False):
                combined = [self.choices.combined(*each, every=every) for each in ranks]
                for needed, points in self._lean_products(combined):
                    if needed >= max(best.run.peaks):
                        break
                    best = min(best, self._run(key, points), key=lambda scored: max(scored.run.peaks))
            self._lean[key] = best
        return self._lean[key]

    def relaxed(self, found: ScoredCuts) -> ScoredCuts:
        """Let stages recompute less as long as the step fits, the longest recompute first.

        Return that, or the score of the cuts if that is better; it is their score from then on.
        """
        known, spans = self.of(found.ends), found.spans
        stages = () if any(found.moved) else range(len(spans))
        for stage in sorted(stages, key=lambda s: -found.points[s].seconds):
            for point in self.choices.frontiers.of(*spans[stage]).ladder:
                if point.seconds >= found.points[stage].seconds:
                    break
                changed = self._run(found.ends, (*found.points[:stage], point, *found.points[stage + 1 :]))
                if self.fits(changed):
                    found = changed
                    break
        found = found if known is None else min(known, found, key=lambda scored: scored.seconds)
        self.tried[found.ends] = found
        return found

    def least_peak(self, ends: Sequence[int]) -> int:
        """Return a lower bound on the peaks of `leanest`."""
        return max(self.choices.lean(rank, spans)[0] for rank, spans in enumerate(self._spans(ends)))

    def _products(
        self, ends: Sequence[int], own: Sequence[Sequence[Points]]
    ) -> tuple[list[tuple[float, Points]], float]:
        """Return (lower bound on the step, points by stage) of combinations of all ranks, and a bound for others."""
        each = max(1, int(_PRODUCTS ** (1 / len(own))))
        busy = [
            [self._busy(spans, points) for points in some[:each]]
            for spans, some in zip(self._spans(ends), own, strict=True)
        ]
        numbers = product(*(range(len(some)) for some in busy))
        bounds = sorted((max(b[i] for b, i in zip(busy, at, strict=True)), sum(at), at) for at in numbers)
        found = [
            (bound, self._by_stage([some[i] for some, i in zip(own, at, strict=True)]))
            for bound, _, at in bounds[:_SIMULATED]
        ]
        if any(len(some) > each for some in own):
            return found, 0.0
        return found, bounds[_SIMULATED][0] if len(bounds) > _SIMULATED else np.inf

    def _lean_products(self, own: Sequence[Sequence[tuple[int, Points]]]) -> list[tuple[int, Points]]:
        """Return (lower bound on the peak, points by stage) of combinations of all ranks, by rising bound."""
        each = max(1, int(_PRODUCTS ** (1 / len(own))))
        short = [sorted(some, key=lambda pair: pair[0])[:each] for some in own]
        found = sorted(product(*short), key=lambda pairs: max(needed for needed, _ in pairs))[:_SIMULATED]
        return [(max(n for n, _ in pairs), self._by_stage([points for _, points in pairs])) for pairs in found]

    def _busy(self, spans: Sequence[Span], points: Points) -> float:
        """Return the seconds that a rank computes in a step."""
        costs = (self.choices.frontiers.costs(*span, point) for span, point in zip(spans, points, strict=True))
        return sum(c.forward + c.backward for c in costs) * self.order.microbatches

    def _by_stage(self, of_ranks: Sequence[Sequence[_Item]]) -> tuple[_Item, ...]:
        found: dict[int, _Item] = {}
        for load, own in zip(self.choices.loads, of_ranks, strict=True):
            found |= zip(load.stages, own, strict=True)
        return tuple(found[stage] for stage in range(len(found)))

    def _run(self, ends: tuple[int, ...], points: Points, moved: Moved = ()) -> ScoredCuts:
        spans = list(pairwise((0, *ends)))
        run = simulate_schedule(self._costs(spans, points, moved), self.order, links=self.links)
        return ScoredCuts(ends, points, run, moved)

    def _over(self, found: ScoredCuts) -> list[int]:
        """Return the bytes by which each rank exceeds its memory."""
        pairs = zip(found.run.peaks, self.choices.limits, strict=True)
        return [0 if limit is None else max(0, peak - limit) for peak, limit in pairs]

    def fits(self, found: ScoredCuts) -> bool:
        """Whether each rank has the memory for a step."""
        return not any(self._over(found))

    def _fitted(self, ends: tuple[int, ...], choose: Choose) -> ScoredCuts | None:
        """Simulate what ``choose`` returns for each rank, given what it leaves free, until that fits."""
        ranks, reserves = self._spans(ends), [0] * len(self.order.ranks)
        for _ in range(_ROUNDS):
            found: list[tuple[Points, Moved]] = []
            for rank, (spans, reserve) in enumerate(zip(ranks, reserves, strict=True)):
                if (own := choose(rank, spans, reserve)) is None:
                    return None
                found.append(own)
            scored = self._run(ends, *(self._by_stage(each) for each in zip(*found, strict=True)))
            if self.fits(scored):
                return scored
            over = self._over(scored)
            reserves = [self._reserve(rank, reserves[rank], more, scored) for rank, more in enumerate(over)]
        return None

    def _reserve(self, rank: int, reserve: int, over: int, scored: ScoredCuts) -> int:
        """Return the bytes that a rank must leave free in its next choice, to hold ``over`` bytes less than now.

        Messages come on top of what ranks hold, and a reserve as large as they are may allow the same points again.
        """
        limit, stages = self.choices.limits[rank], self.choices.loads[rank].stages
        if not over or limit is None or any(scored.moved):
            return reserve + over
        spans = [scored.spans[stage] for stage in stages]
        return limit - self.choices.needed(rank, spans, tuple(scored.points[stage] for stage in stages)) + over

    def _costs(self, spans: Sequence[Span], points: Points, moved: Moved) -> list[StageCosts]:
        return [self.choices.frontiers.costs(*span, point) for span, point in zip(spans, points, strict=True)]

    def _points(self, rank: int, spans: Sequence[Span], reserve: int) -> tuple[Points, Moved] | None:
        points = self.choices.of(rank, spans, reserve)
        return None if points is None else (points, ((),) * len(points))
