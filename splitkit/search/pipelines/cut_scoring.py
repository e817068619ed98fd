"""Judges cuts by a simulated step in which every rank recomputes as little as its memory allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitkit.costs import Links
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.pipelines.rank_choice import Points, RankChoice, Span
from splitkit.search.pipelines.stage_frontiers import FrontierPoint

_ROUNDS = 6

Moved = tuple[tuple[int, ...], ...]
"""For each stage the storages of its problem that go to the host."""
Choose = Callable[[Sequence[Span], Sequence[int]], tuple[Points, Moved] | None]
"""(positions of stages, bytes that each rank leaves free) -> what stages save and move, if that fits."""


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
        return list(zip((0, *self.ends[:-1]), self.ends, strict=True))


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

    def of(self, ends: Sequence[int]) -> ScoredCuts | None:
        """Return the score of cuts, or ``None`` if some rank cannot hold its stages."""
        key = tuple(map(int, ends))
        if key not in self.tried:
            self.tried[key] = self._score(key)
        return self.tried[key]

    def shortfall(self, ends: Sequence[int]) -> int:
        """Return the bytes that ranks lack together if all stages save the least that they can."""
        spans = list(zip((0, *ends[:-1]), ends, strict=True))
        lacking = (
            self.choices.shortfall(rank, [spans[s] for s in load.stages])
            for rank, load in enumerate(self.choices.loads)
        )
        return sum(lacking)

    def _score(self, ends: tuple[int, ...]) -> ScoredCuts | None:
        return self._fitted(ends, self._points)

    def _fitted(self, ends: tuple[int, ...], choose: Choose) -> ScoredCuts | None:
        """Simulate what ``choose`` returns for these stages, given what ranks leave free, until it fits."""
        spans = list(zip((0, *ends[:-1]), ends, strict=True))
        reserves = [0] * len(self.order.ranks)
        for _ in range(_ROUNDS):
            found = choose(spans, reserves)
            if found is None:
                return None
            points, moved = found
            run = simulate_schedule(self._costs(spans, points, moved), self.order, links=self.links)
            over = [
                0 if limit is None else max(0, peak - limit)
                for peak, limit in zip(run.peaks, self.choices.limits, strict=True)
            ]
            if not any(over):
                return ScoredCuts(ends, points, run, moved)
            # Messages come on top of what ranks hold: leave room for those that were in the way.
            reserves = [reserve + more for reserve, more in zip(reserves, over, strict=True)]
        return None

    def _costs(self, spans: Sequence[Span], points: Points, moved: Moved) -> list[StageCosts]:
        return [self.choices.frontiers.costs(*span, point) for span, point in zip(spans, points, strict=True)]

    def _points(self, spans: Sequence[Span], reserves: Sequence[int]) -> tuple[Points, Moved] | None:
        points: list[FrontierPoint | None] = [None] * len(spans)
        for rank, load in enumerate(self.choices.loads):
            found = self.choices.of(rank, [spans[stage] for stage in load.stages], reserves[rank])
            if found is None:
                return None
            for stage, point in zip(load.stages, found, strict=True):
                points[stage] = point
        return tuple(point for point in points if point is not None), ()
