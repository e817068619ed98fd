"""Finds cuts, what stages save, and what waits on the host meanwhile, for the shortest simulated step.

The best plan without offload, and offloading the largest values first, are among the candidates for all cuts that are
looked at.

**The bound.** Each rank copies what all microbatches offload once, in each direction, within the step. So a plan of a
step of at most z seconds offloads at most ``z * bandwidth / microbatches`` bytes of each microbatch, and at any moment
no more of them is away than the order of actions says. With that much more memory, the bounds of `CutSearch` hold for
all plans that take at most z: the step that was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, inf

from splitkit.costs import Links
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.pipelines.cut_scoring import CutScoring, Moved, ScoredCuts
from splitkit.search.pipelines.cut_search import CutSearch, FoundCuts
from splitkit.search.pipelines.offload_choice_of_ranks import OffloadChoice
from splitkit.search.pipelines.rank_choice import Points, RankChoice, Span
from splitkit.search.pipelines.rank_loads import rank_loads
from splitkit.search.pipelines.stage_frontiers import FrontierPoint, StageFrontiers
from splitkit.search.pipelines.stage_transfers import StageTransfers

_SHARES = (1.0, 0.5, None)
"""Shares of a rank's time in which its link may be busy; ``None``: the largest first, and nothing recomputed."""
_MOST = 2**60
_HALVINGS = 8  # of the memory, for a refusal that says what would do


@dataclass(frozen=True, eq=False)
class RankHost:
    """The host of each rank.

    Attributes:
        transfers: what stages can move over its link.
        nbytes: the bytes that each rank may have there.
    """

    transfers: StageTransfers
    nbytes: float = inf


class OffloadScoring(CutScoring):
    """Scores cuts without offload, and with several ways to offload; the shortest step counts."""

    def __init__(self, choices: RankChoice, order: PipelineOrder, links: Links | None, host: RankHost) -> None:
        super().__init__(choices, order, links)
        self.transfers = host.transfers
        self.loads = rank_loads(order, offload=True)
        self._offload = OffloadChoice(choices, host.transfers, self.loads, host.nbytes)

    def _score(self, ends: tuple[int, ...]) -> ScoredCuts | None:
        best = super()._score(ends)
        self.proven.pop(ends, None)  # of steps without offload
        if best is not None and not any(point.seconds for point in best.points):
            return best
        for share in _SHARES:
            found = self._fitted(ends, partial(self._offloaded, share))
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
        return best

    def _offloaded(
        self, share: float | None, spans: Sequence[Span], reserves: Sequence[int]
    ) -> tuple[Points, Moved] | None:
        points: dict[int, FrontierPoint] = {}
        moved: dict[int, tuple[int, ...]] = {}
        for rank, load in enumerate(self.choices.loads):
            found = self._offload.of(rank, [spans[stage] for stage in load.stages], share, reserves[rank])
            if found is None:
                return None
            points |= zip(load.stages, found.points, strict=True)
            moved |= zip(load.stages, found.moved, strict=True)
        return tuple(points[s] for s in range(len(spans))), tuple(moved[s] for s in range(len(spans)))

    def _costs(self, spans: Sequence[Span], points: Points, moved: Moved) -> list[StageCosts]:
        costs = super()._costs(spans, points, moved)
        frontiers = self.choices.frontiers
        for stage, storages in enumerate(moved):
            if storages:
                problem, choice = frontiers.problem(*spans[stage]), frontiers.choice(*spans[stage], points[stage])
                costs[stage] = replace(costs[stage], copies=self.transfers.copies(problem, choice, storages))
        return costs


class OffloadCutSearch(CutSearch):
    """A search for one graph, schedule, memory and host.

    Attributes:
        host: the host of each rank.
    """

    def __init__(
        self,
        frontiers: StageFrontiers,
        order: PipelineOrder,
        links: Links | None,
        limits: Sequence[int | None],
        host: RankHost,
    ) -> None:
        super().__init__(frontiers, order, links, limits)
        self.host = host
        self.scoring: OffloadScoring = OffloadScoring(self.choices, order, links, host)

    def like(self, limits: Sequence[int | None]) -> CutSearch:
        """Return the same search with other limits."""
        return OffloadCutSearch(self.frontiers, self.order, self.links, limits, self.host)

    def run(self) -> FoundCuts:
        """Search, and prove a bound."""
        plain = CutSearch(self.frontiers, self.order, self.links, self.limits)
        alone = plain.run()
        if all(limit is None for limit in self.limits):
            return alone
        pace = float(self.problems.seconds[-1]) * self.order.microbatches / len(self.order.ranks)
        place = {int(cut): number for number, cut in enumerate(self.cuts)}
        seeds = CutSearch(self.frontiers, self.order, self.links, self._relaxed(pace)).seeds()
        if alone.best is not None:
            seeds.append(tuple(place[end] for end in alone.best.ends))
        fitting = self._fitting(dict.fromkeys(seeds)) or self._fitting(self._tight())
        best = self.local(fitting or ([] if alone.best is None else [alone.best]) or self._lean_ones())
        if best is None:
            return FoundCuts(None, 0.0, self.looked_at, len(self.scoring.tried), self.frontiers.classes, self.single)
        relaxed = CutSearch(self.frontiers, self.order, self.links, self._relaxed(best.seconds))
        bound = relaxed.bound(best.seconds)
        if self.few:
            least, found = relaxed.all_cuts(best, self.scoring)
            bound, best = max(bound, least), found or best
        return FoundCuts(best, bound, self.looked_at, len(self.scoring.tried), self.frontiers.classes, self.single)

    @cached_property
    def _smallest(self) -> ScoredCuts:
        """The lowest peak with offload: some cuts are planned for ever less memory than is enough without."""
        best = CutSearch(self.frontiers, self.order, self.links, self.limits).smallest()
        ends = dict.fromkeys([best.ends, *(tuple(int(self.cuts[e]) for e in each) for each in self._tight())])
        for each in ends:
            low, high = 0, max(best.run.peaks)
            for _ in range(_HALVINGS):
                middle = (low + high) // 2
                found = self.like([middle] * len(self.limits)).scoring.of(each)
                low, high = (middle, high) if found is None else (low, max(found.run.peaks))
                best = best if found is None else min(best, found, key=lambda scored: max(scored.run.peaks))
        return best

    def _relaxed(self, seconds: float) -> list[int | None]:
        """Return the memory of each rank and what it can have on the host at once in a step of so many seconds."""
        link = self.host.transfers.link
        rate = min(link.out.bandwidth, link.back.bandwidth)
        each = min(seconds * rate / self.order.microbatches, float(_MOST))
        found: list[int | None] = []
        for limit, load in zip(self.limits, self.scoring.loads, strict=True):
            away = min(each * int(load.away.max(initial=0)), self.host.nbytes, float(_MOST))
            found.append(None if limit is None else limit + ceil(away))
        return found
