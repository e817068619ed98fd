"""Chooses the points of the frontiers of a rank's stages: the least recompute that fits the rank's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.search.pipelines.rank_loads import RankLoads
from splitkit.search.pipelines.stage_frontiers import StageFrontier, StageFrontiers

Span = tuple[int, int]


class RankChoice:
    """The choices of all ranks.

    Attributes:
        frontiers: the frontiers of all stages.
        loads: what each rank holds at once.
        limits: the bytes of each rank, ``None`` without limit.
    """

    def __init__(self, frontiers: StageFrontiers, loads: Sequence[RankLoads], limits: Sequence[int | None]) -> None:
        self.frontiers, self.loads, self.limits = frontiers, loads, limits
        self._known: dict[tuple[int, tuple[Span, ...], int], tuple[int, ...] | None] = {}
        self._spans: dict[Span, tuple[int, int | None]] = {}

    def of(self, rank: int, spans: Sequence[Span], reserve: int = 0) -> tuple[int, ...] | None:
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

    def fixed(self, span: Span) -> int:
        """Return the bytes of weights, gradients and optimizer of a stage."""
        return self._bytes_of(span)[0]

    def _bytes_of(self, span: Span) -> tuple[int, int | None]:
        """Return the fixed bytes of a stage, and those that wait for its weight part."""
        if span not in self._spans:
            problems = self.frontiers.problems
            parameters, gradients = problems.parameter_bytes(*span)
            optimizer = problems.optimizer
            state = gradients * STATE_OF[optimizer] if optimizer else 0
            self._spans[span] = parameters + gradients + state, problems.waiting(*span)
        return self._spans[span]

    def _choose(self, rank: int, spans: Sequence[Span], reserve: int) -> tuple[int, ...] | None:
        given, limit = self.loads[rank], self.limits[rank]
        found = [self.frontiers.of(*span) for span in spans]
        at = [0] * len(spans)
        if limit is None:
            return tuple(at)
        known = [self._bytes_of(span) for span in spans]
        free = limit - reserve - sum(fixed for fixed, _ in known)
        waits = [waiting for _, waiting in known]
        while not _fits(given, found, at, waits, free):
            step = self._cheapest_step(given, found, at)
            if step is None:
                return None
            at[step] += 1
        for stage in range(len(spans)) if len(spans) > 1 else ():
            while at[stage] and _fits(given, found, [a - (i == stage) for i, a in enumerate(at)], waits, free):
                at[stage] -= 1
        return tuple(at)

    def _cheapest_step(self, given: RankLoads, found: Sequence[StageFrontier], at: Sequence[int]) -> int | None:
        """Return the stage that frees the most bytes a second if it recomputes more."""
        best, rate = None, -1.0
        counts = given.surely().tolist()
        for i, (frontier, index) in enumerate(zip(found, at, strict=True)):
            if index + 1 < len(frontier.points):
                here, there = frontier.points[index : index + 2]
                seconds = max(there.seconds - here.seconds, 1e-30)
                if (own := counts[i] * (here.saved - there.saved) / seconds) > rate:
                    best, rate = i, own
        return best


def _fits(
    given: RankLoads, found: Sequence[StageFrontier], at: Sequence[int], waits: Sequence[int | None], free: int
) -> bool:
    points = [frontier.points[index] for frontier, index in zip(found, at, strict=True)]
    saved = np.array([point.saved for point in points], np.int64)
    later = np.array([s if w is None else w for s, w in zip(saved.tolist(), waits, strict=True)], np.int64)
    live = given.saved @ saved + given.waiting @ later
    if int(live.max(initial=0)) > free:
        return False
    extra = np.array([frontier.temporary(index) for frontier, index in zip(found, at, strict=True)], np.int64)
    return int((live + extra[given.runs]).max(initial=0)) <= free
