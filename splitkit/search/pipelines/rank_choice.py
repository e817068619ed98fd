"""Chooses the points of the frontiers of a rank's stages: the least recompute that fits the rank's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from splitkit.pipeline.order import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineOrder,
    host_windows,
)
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.search.pipelines.stage_frontiers import FrontierPoint, StageFrontier, StageFrontiers
from splitkit.training.choices import Ints

Span = tuple[int, int]
Points = tuple[FrontierPoint, ...]
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
        held, counts = self._held(rank, spans, limit - reserve), self.loads[rank].surely().tolist()
        points = fitting_points(found, counts, held.excess, held.free / max(1, counts[0]))
        return points if points is None or len(found) == 1 else with_less_recompute(found, counts, held.excess, points)


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
        live = live_bytes(self.loads, points, self.waits)
        if quick or int(live.max(initial=0)) > self.free >= 0:
            return int(live.max(initial=0)) - self.free
        extra = np.array([point.temporary for point in points], np.int64)
        live += extra[self.loads.runs]
        return int(live.max(initial=0)) - self.free


def live_bytes(loads: RankLoads, points: Points, waits: Sequence[int | None]) -> Ints:
    """Return (v,) the bytes of all microbatches at each moment, without the temporary ones.

    Args:
        loads: what the rank holds at once.
        points: the points of its stages.
        waits: bytes of each stage that wait for the weight part, ``None`` for all that it saves.
    """
    saved = np.array([point.saved for point in points], np.int64)
    later = np.array([s if w is None else w for s, w in zip(saved.tolist(), waits, strict=True)], np.int64)
    live: Ints = loads.saved @ saved + loads.waiting @ later
    return live


def fitting_points(
    frontiers: Sequence[StageFrontier],
    counts: Sequence[int],
    lacks: Callable[[Points], float],
    allowed: float = float("inf"),
    *,
    again: bool = True,
) -> Points | None:
    """Return points of a rank's stages that fit: a single stage saves less as long as it is too much; several stages
    recompute where a second frees the most bytes.

    Args:
        frontiers: the frontiers of the stages.
        counts: the microbatches that each stage holds.
        lacks: points -> the bytes that they lack, not positive if they fit.
        allowed: the most that a single stage may save of a microbatch.
        again: whether stages may recompute more than at first.
    """
    if len(frontiers) == 1:
        while (point := frontiers[0].within(allowed)) is not None:
            if (over := lacks((point,))) <= 0 or not again:
                return (point,) if over <= 0 else None
            allowed = min(point.saved - 1.0, point.saved - over / max(1, counts[0]))
        return None
    corners, at = [frontier.corners() for frontier in frontiers], [0] * len(frontiers)
    points = tuple(own[0] for own in corners)
    while lacks(points) > 0:
        rates = [freed_rate(own, i, count) for own, i, count in zip(corners, at, counts, strict=True)]
        step = int(np.argmax(rates))
        if rates[step] < 0 or not again:
            return None
        at[step] += 1
        points = tuple(own[i] for own, i in zip(corners, at, strict=True))
    return points


def with_less_recompute(
    frontiers: Sequence[StageFrontier], counts: Sequence[int], lacks: Callable[[Points], float], points: Points
) -> Points:
    """Use up what points that fit leave free; arguments as for `fitting_points`."""
    for stage in sorted(range(len(points)), key=lambda s: -points[s].seconds):
        left = -lacks(points) / max(1, counts[stage])
        more = frontiers[stage].within(points[stage].saved + left)
        if more is not None and more.seconds < points[stage].seconds:
            changed = (*points[:stage], more, *points[stage + 1 :])
            points = changed if lacks(changed) <= 0 else points
    return points


def freed_rate(corners: Sequence[FrontierPoint], at: int, count: int) -> float:
    """Return the bytes that a second of recompute frees at the next corner, -1 if there is none."""
    if at + 1 == len(corners):
        return -1.0
    seconds = max(corners[at + 1].seconds - corners[at].seconds, 1e-30)
    return max(0.0, count * (corners[at].saved - corners[at + 1].saved) / seconds)


# Counts the microbatches of each stage that a rank holds at once.
#
# The order of a rank's actions says what it holds after each, whatever their times: so many microbatches of a stage
# between forward and backward, and so many between the input part and the weight part.


@dataclass(frozen=True, eq=False)
class RankLoads:
    """What a rank holds at once.

    Attributes:
        stages: the stages of the rank.
        saved: (v, s) for each moment and stage, the microbatches that hold all that is saved.
        waiting: (v, s) the microbatches that wait for their weight part.
        runs: (v,) the index of the stage that computes at the moment.
        away: (v, s) the microbatches whose offloaded values are on the host only.
    """

    stages: tuple[int, ...]
    saved: Ints
    waiting: Ints
    runs: Ints
    away: Ints

    def surely(self) -> Ints:
        """Return (s,) the most microbatches that each stage holds while its backward runs, taken alone."""
        most: Ints = self.saved.max(axis=0, initial=0)
        return most


def rank_loads(order: PipelineOrder, offload: bool = False) -> list[RankLoads]:
    """Return the loads of each rank of an order; moments at which another one holds at least as much are left out.

    Args:
        order: the actions.
        offload: whether stages may offload; if not, nothing is away.
    """
    found = []
    for rank, row in enumerate(order.ranks):
        stages = tuple(s for s, r in enumerate(order.rank_of) if r == rank)
        away = _away(row, stages) if offload else np.zeros((len(row), len(stages)), np.int64)
        moments = [(*(-away[at]).tolist(), *moment) for at, moment in _moments(order, rank, stages)]
        count = len(stages)
        kept = _undominated(np.array(list(dict.fromkeys(moments)), np.int64).reshape(-1, 3 * count + 1))
        saved, waiting = kept[:, count : 2 * count], kept[:, 2 * count : -1]
        found.append(RankLoads(stages, saved, waiting, kept[:, -1], -kept[:, :count]))
    return found


def _away(row: Sequence[Action], stages: Sequence[int]) -> Ints:
    """Return (n, s) for each action and stage, the microbatches whose offloaded values are on the host only."""
    found = np.zeros((len(row) + 1, len(stages)), np.int64)
    for (stage, _), window in host_windows(row).items():
        found[window.released + 1, stages.index(stage)] += 1
        found[window.asked, stages.index(stage)] -= 1
    counts: Ints = np.cumsum(found, axis=0)[:-1]
    return counts


def warm_up(order: PipelineOrder) -> list[int]:
    """Return the number of forwards that each rank runs before its first backward."""
    rank, _, kind, _ = order.columns
    return [int(np.argmax(kind[rank == r] != FORWARD)) for r in range(len(order.ranks))]


def _moments(order: PipelineOrder, rank: int, stages: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the number of an action, and what the rank holds while it runs, or after an input part."""
    place = {stage: i for i, stage in enumerate(stages)}
    saved, waiting = [0] * len(stages), [0] * len(stages)
    columns = order.columns
    here = columns.rank == rank
    actions = zip(columns.stage[here].tolist(), columns.kind[here].tolist(), strict=True)
    for number, (stage, kind) in enumerate(actions):
        at = place[stage]
        saved[at] += kind == FORWARD
        yield number, (*saved, *waiting, at)
        if kind in (BACKWARD, BACKWARD_INPUT):
            saved[at] -= 1
        waiting[at] += kind == BACKWARD_INPUT
        if kind == BACKWARD_INPUT:
            yield number, (*saved, *waiting, at)
        waiting[at] -= kind == BACKWARD_WEIGHT


def _undominated(moments: Ints) -> Ints:
    """Return the moments of which none is below another with the same stage running."""
    order = np.argsort(-moments[:, :-1].sum(axis=1), kind="stable")
    kept: list[Ints] = []
    for row in moments[order]:
        if not any(other[-1] == row[-1] and (other[:-1] >= row[:-1]).all() for other in kept):
            kept.append(row)
    return np.array(kept, np.int64).reshape(-1, moments.shape[1])
