"""Chooses the points of the frontiers of a rank's stages: the least recompute that fits the rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.search.pipelines.rank_loads import RankLoads
from splitkit.search.pipelines.stage_frontiers import FrontierPoint, StageFrontier, StageFrontiers

Span = tuple[int, int]
Points = tuple[FrontierPoint, ...]
_ROUNDS = 20
_COMBINED = 400  # combinations of points of a rank's stages that are all looked at


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
        self._combined: dict[tuple[int, tuple[Span, ...], bool], list[tuple[int, Points]]] = {}
        self._lean: dict[tuple[int, tuple[Span, ...]], tuple[int, Points]] = {}

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
        """Return the bytes by which a rank exceeds its limit, if any, when its stages save as little as possible."""
        limit = self.limits[rank]
        if limit is None:
            return 0
        found = [self.frontiers.of(*span) for span in spans]
        held = self._held(rank, spans, limit)
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

    def small(self, spans: Sequence[Span], *, every: bool = False) -> bool:
        """Whether `combined` has all points of a rank's stages that may matter; if ``every``, all that there are."""
        found = [self.frontiers.of(*span) for span in spans]
        return all(f.small for f in found) and prod(len(f.every if every else f.ladder) for f in found) <= _COMBINED

    def combined(self, rank: int, spans: Sequence[Span], *, every: bool = False) -> list[tuple[int, Points]]:
        """Return (bytes that the rank needs without messages, points of its stages), by rising recompute time.

        If ``every``, with points that others beat: messages may take less memory where a stage takes longer.
        """
        key = rank, tuple(spans), every
        if key not in self._combined:
            held = self._held(rank, spans, 0)
            ladders = [self.frontiers.of(*span).every for span in spans] if every else self._ladders(spans)
            found = [(held.excess(points), points) for points in product(*ladders)]
            self._combined[key] = sorted(found, key=lambda each: sum(p.seconds for p in each[1]))
        return self._combined[key]

    def needed(self, rank: int, spans: Sequence[Span], points: Points) -> int:
        """Return the bytes that a rank needs without messages."""
        return self._held(rank, spans, 0).excess(points)

    def lean(self, rank: int, spans: Sequence[Span]) -> tuple[int, Points]:
        """Return the least bytes that a rank needs without messages, and the points of its stages."""
        key = rank, tuple(spans)
        if key not in self._lean:
            held = self._held(rank, spans, 0)
            found = sorted((held.excess(p, quick=True), i, p) for i, p in enumerate(product(*self._ladders(spans))))
            best = held.excess(found[0][2]), found[0][2]
            for least, _, points in found:
                if least >= best[0]:
                    break
                best = min(best, (held.excess(points), points), key=lambda pair: pair[0])
            self._lean[key] = best
        return self._lean[key]

    def _ladders(self, spans: Sequence[Span]) -> list[Points]:
        """Return the points of each stage; if there are many, the quickest, and the ones that hold the least."""
        ladders = [self.frontiers.of(*span).ladder for span in spans]
        if len(spans) == 1 or prod(map(len, ladders)) <= _COMBINED:
            return ladders
        each = max(2, int(_COMBINED ** (1 / len(spans))))
        lean = (sorted(own, key=lambda p: p.saved)[: each // 2] for own in ladders)
        return [
            tuple(dict.fromkeys([*own[: each - each // 2], *less])) for own, less in zip(ladders, lean, strict=True)
        ]

    def _held(self, rank: int, spans: Sequence[Span], limit: int) -> _Held:
        known = [self.bytes_of(span) for span in spans]
        return _Held(self.loads[rank], [waits for _, waits in known], limit - sum(fixed for fixed, _ in known))

    def _choose(self, rank: int, spans: Sequence[Span], reserve: int) -> Points | None:
        limit = self.limits[rank]
        found = [self.frontiers.of(*span) for span in spans]
        if limit is None:
            return tuple(point for f in found if (point := f.within(float("inf"))) is not None)
        held = self._held(rank, spans, limit - reserve)
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

    def excess(self, points: Points, *, quick: bool = False) -> int:
        """Return bytes by which the limit is exceeded at least, not positive if the points fit.

        If ``quick``, without the temporary bytes, which take time to find.
        """
        saved = np.array([point.saved for point in points], np.int64)
        later = np.array([s if w is None else w for s, w in zip(saved.tolist(), self.waits, strict=True)], np.int64)
        live = self.loads.saved @ saved + self.loads.waiting @ later
        if quick or int(live.max(initial=0)) > self.free >= 0:
            return int(live.max(initial=0)) - self.free
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
