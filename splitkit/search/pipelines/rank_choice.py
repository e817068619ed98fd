"""Chooses the points of the frontiers of a rank's stages: the least recompute that fits the rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.search.pipelines.rank_loads import RankLoads
from splitkit.search.pipelines.stage_frontiers import FrontierPoint, StageFrontier, StageFrontiers

Span = tuple[int, int]
Points = tuple[FrontierPoint, ...]
_ROUNDS = 20


class RankChoice:
    """The choices of all ranks.

    Attributes:
        frontiers: the frontiers of all stages.
        loads: what each rank holds at once.
        limits: the bytes of each rank, ``None`` without limit.
    """

    def __init__(self, frontiers: StageFrontiers, loads: Sequence[RankLoads], limits: Sequence[int | None]) -> None:
        self.frontiers, self.loads, self.limits = frontiers, loads, limits
        self._known: dict[tuple[int, tuple[Span, ...], int], Points | None] = {}
        self._spans: dict[Span, tuple[int, int | None]] = {}

    def of(self, rank: int, spans: Sequence[Span], reserve: int = 0) -> Points | None:
        """Return the point of each stage of a rank, or ``None`` if none fit.

        Args:
            rank: the rank.
            spans: the positions of its stages.
            reserve: bytes that are left free, for messages.
        """
        key = (rank, tuple(spans), reserve)
        if key not in self._known:
            self._known[key] = self._choose(rank, spans, reserve)
        return self._known[key]

    def shortfall(self, rank: int, spans: Sequence[Span]) -> int:
        """Return the bytes that a rank lacks if its stages save the least that they can; 0 without limit."""
        limit = self.limits[rank]
        if limit is None:
            return 0
        found = [self.frontiers.of(*span) for span in spans]
        known = [self.bytes_of(span) for span in spans]
        held = _Held(self.loads[rank], [waiting for _, waiting in known], limit - sum(fixed for fixed, _ in known))
        ends = tuple(point for f in found if (point := f.within(f.problem.held + f.least_saved)) is not None)
        return max(0, held.excess(ends))

    def fixed(self, span: Span) -> int:
        """Return the bytes of weights, gradients and optimizer of a stage."""
        return self.bytes_of(span)[0]

    def bytes_of(self, span: Span) -> tuple[int, int | None]:
        """Return the fixed bytes of a stage, and those that wait for its weight part."""
        if span not in self._spans:
            problems = self.frontiers.problems
            parameters, gradients = problems.parameter_bytes(*span)
            optimizer = problems.optimizer
            state = gradients * STATE_OF[optimizer] if optimizer else 0
            self._spans[span] = parameters + gradients + state, problems.waiting(*span)
        return self._spans[span]

    def _choose(self, rank: int, spans: Sequence[Span], reserve: int) -> Points | None:
        given, limit = self.loads[rank], self.limits[rank]
        found = [self.frontiers.of(*span) for span in spans]
        if limit is None:
            return tuple(point for f in found if (point := f.within(float("inf"))) is not None)
        known = [self.bytes_of(span) for span in spans]
        free = limit - reserve - sum(fixed for fixed, _ in known)
        held = _Held(given, [waiting for _, waiting in known], free)
        return held.of_one(found[0]) if len(found) == 1 else held.of_several(found)


@dataclass(frozen=True, eq=False)
class _Held:
    """The limit of one rank.

    Attributes:
        loads: what the rank holds at once.
        waits: bytes of each stage that wait for the weight part, ``None`` for all that it saves.
        free: bytes that microbatches may take.
    """

    loads: RankLoads
    waits: Sequence[int | None]
    free: int

    def excess(self, points: Points) -> int:
        """Return bytes by which the limit is exceeded at least, not positive if the points fit."""
        saved = np.array([point.saved for point in points], np.int64)
        later = np.array([s if w is None else w for s, w in zip(saved.tolist(), self.waits, strict=True)], np.int64)
        live = self.loads.saved @ saved + self.loads.waiting @ later
        if int(live.max(initial=0)) > self.free:  # without the temporary bytes, which take time to find
            return int(live.max()) - self.free
        extra = np.array([point.temporary for point in points], np.int64)
        live += extra[self.loads.runs]
        return int(live.max(initial=0)) - self.free

    def of_one(self, frontier: StageFrontier) -> Points | None:
        """Return the point of the only stage; less is saved as long as what it takes while it computes is too much."""
        count = max(1, int(self.loads.surely()[0]))
        allowed = self.free / count
        for _ in range(_ROUNDS):
            point = frontier.within(allowed)
            if point is None:
                return None
            if (over := self.excess((point,))) <= 0:
                return (point,)
            allowed = min(point.saved - 1.0, point.saved - over / count)
        return None

    def of_several(self, frontiers: Sequence[StageFrontier]) -> Points | None:
        """Return points of several stages: recompute where a second frees the most bytes, then use up what is left."""
        corners = [frontier.corners() for frontier in frontiers]
        counts, at = self.loads.surely().tolist(), [0] * len(frontiers)
        points = tuple(own[0] for own in corners)
        while self.excess(points) > 0:
            rates = [freed_rate(own, i, count) for own, i, count in zip(corners, at, counts, strict=True)]
            step = int(np.argmax(rates))
            if rates[step] < 0:
                return None
            at[step] += 1
            points = tuple(own[i] for own, i in zip(corners, at, strict=True))
        for stage in sorted(range(len(points)), key=lambda s: -points[s].seconds):
            left = -self.excess(points) / max(1, counts[stage])
            more = frontiers[stage].within(points[stage].saved + left)
            if more is not None and more.seconds < points[stage].seconds:
                changed = (*points[:stage], more, *points[stage + 1 :])
                points = changed if self.excess(changed) <= 0 else points
        return points


def freed_rate(corners: Sequence[FrontierPoint], at: int, count: int) -> float:
    """Return the bytes that a second of recompute frees at the next corner, -1 if there is none."""
    if at + 1 == len(corners):
        return -1.0
    seconds = max(corners[at + 1].seconds - corners[at].seconds, 1e-30)
    return max(0.0, count * (corners[at].saved - corners[at + 1].saved) / seconds)
