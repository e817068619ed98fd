"""Chooses what the stages of a rank recompute, and which saved values go to the host, within the rank's memory.

In the steady state of a pipeline a rank computes, for each microbatch, all of its stages once. As long as the copies of
a microbatch take no longer in either direction, no action waits for them. So values are offloaded up to a share of that
time, and what the memory still lacks is recomputed. Shares are tried and simulated, since a step also has a beginning
and an end, where ranks have less to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from splitkit.search.pipelines.rank_choice import Points, RankChoice, Span, freed_rate
from splitkit.search.pipelines.rank_loads import RankLoads
from splitkit.search.pipelines.stage_frontiers import FrontierPoint, StageFrontier
from splitkit.search.pipelines.stage_transfers import StageTransfers
from splitkit.training.choices import Ints

_ROUNDS = 20


@dataclass(frozen=True, eq=False)
class RankOffload:
    """What a rank does.

    Attributes:
        points: the points of its stages.
        moved: for each stage, the storages of its problem that go to the host.
    """

    points: Points
    moved: tuple[tuple[int, ...], ...]


class OffloadChoice:
    """The choices of all ranks.

    Attributes:
        ranks: the choices without offload, with the memory of each rank.
        transfers: what stages can move.
        loads: what each rank holds at once, and has on the host.
        host: the bytes that each rank has on the host.
    """

    def __init__(
        self, ranks: RankChoice, transfers: StageTransfers, loads: Sequence[RankLoads], host: float = inf
    ) -> None:
        self.ranks, self.transfers, self.loads, self.host = ranks, transfers, loads, host
        self._values: dict[tuple[Span, FrontierPoint], dict[int, int]] = {}

    def of(self, rank: int, spans: Sequence[Span], share: float | None, reserve: int = 0) -> RankOffload | None:
        """Return the choice of a rank; ``None`` if it does not fit.

        Args:
            rank: the rank.
            spans: the positions of its stages.
            share: the share of its time in which the link may be busy; ``None``: stages recompute as little as they
                can, and the largest values are offloaded until the rest fits, however long that takes.
            reserve: bytes that are left free, for messages.
        """
        found = [self.ranks.frontiers.of(*span) for span in spans]
        fitted = (self._one if len(spans) == 1 else self._several)(rank, spans, found, share, reserve)
        if fitted is None:
            return None
        now = fitted
        counts = self.loads[rank].surely().tolist()
        for stage in sorted(range(len(spans)), key=lambda s: -fitted.points[s].seconds):
            left = -now.lacks / max(1, counts[stage])
            more = found[stage].within(now.points[stage].saved + left)
            if more is not None and more.seconds < now.points[stage].seconds:
                points = (*now.points[:stage], more, *now.points[stage + 1 :])
                changed = self._with(rank, spans, points, share, reserve)
                now = changed if changed.lacks <= 0 else now
        return now.chosen()

    def _one(
        self, rank: int, spans: Sequence[Span], found: Sequence[StageFrontier], share: float | None, reserve: int
    ) -> _Order | None:
        """Return the point of the only stage: less is saved as long as the link cannot take enough."""
        count, allowed = max(1, int(self.loads[rank].surely()[0])), inf
        for _ in range(_ROUNDS):
            point = found[0].within(allowed)
            if point is None:
                return None
            now = self._with(rank, spans, (point,), share, reserve)
            if now.lacks <= 0 or share is None:
                return now if now.lacks <= 0 else None
            allowed = min(point.saved - 1.0, point.saved - now.lacks / count)
        return None

    def _several(
        self, rank: int, spans: Sequence[Span], found: Sequence[StageFrontier], share: float | None, reserve: int
    ) -> _Order | None:
        """Return points of several stages: recompute where a second frees the most, until the link takes the rest."""
        corners = [frontier.corners() for frontier in found]
        at, counts = [0] * len(spans), self.loads[rank].surely().tolist()
        now = self._with(rank, spans, tuple(own[0] for own in corners), share, reserve)
        while now.lacks > 0:
            rates = [freed_rate(own, i, count) for own, i, count in zip(corners, at, counts, strict=True)]
            step = int(np.argmax(rates))
            if rates[step] < 0 or share is None:
                return None
            at[step] += 1
            points = tuple(own[i] for own, i in zip(corners, at, strict=True))
            now = self._with(rank, spans, points, share, reserve)
        return now

    def _with(self, rank: int, spans: Sequence[Span], points: Points, share: float | None, reserve: int) -> _Order:
        """Return the values of some points in the order in which they are offloaded, as far as the link takes them."""
        values = [self._movable(span, point) for span, point in zip(spans, points, strict=True)]
        loads, link = self.loads[rank], self.transfers.link
        gone = loads.away.max(axis=0, initial=0).tolist()
        counts = loads.surely().tolist()
        order = sorted(
            ((stage, storage) for stage, own in enumerate(values) for storage in own if gone[stage]),
            key=lambda pair: (-values[pair[0]][pair[1]] * (1 if share is None else gone[pair[0]]), pair),
        )
        problems = self.ranks.frontiers.problems
        busy = sum(float(problems.seconds[b] - problems.seconds[a]) for a, b in spans)
        busy += sum(point.seconds for point in points)
        most, taken = inf if share is None else share * busy, list[tuple[int, int]]()
        out = back = host = 0.0
        for stage, storage in order:
            nbytes = values[stage][storage]
            there = host + nbytes * counts[stage]
            later = out + link.out.seconds(nbytes), back + link.back.seconds(nbytes)
            if max(later) <= most and there <= self.host:
                (out, back), host = later, there
                taken.append((stage, storage))
        limit = self.ranks.limits[rank]
        known = [self.ranks.bytes_of(span) for span in spans]
        free = inf if limit is None else limit - reserve - sum(fixed for fixed, _ in known)
        return _Order(points, taken, values, loads, [waits for _, waits in known], free)

    def _movable(self, span: Span, point: FrontierPoint) -> dict[int, int]:
        """Return storage -> bytes of what a stage can move at a point."""
        key = span, point
        if key not in self._values:
            problem, choice = self.ranks.frontiers.problem(*span), self.ranks.frontiers.choice(*span, point)
            sizes = problem.savings.nbytes
            self._values[key] = {s: int(sizes[s]) for s in self.transfers.movable(problem, choice)}
        return self._values[key]


@dataclass(frozen=True, eq=False)
class _Order:
    """Points of a rank, and an order of values of which as many are offloaded as the memory needs.

    Attributes:
        points: the points.
        order: (stage, storage) of what may be offloaded.
        values: for each stage, storage -> bytes.
        loads: what the rank holds at once.
        waits: bytes of each stage that wait for the weight part, ``None`` for all that it saves.
        free: bytes that microbatches may take.
    """

    points: Points
    order: Sequence[tuple[int, int]]
    values: Sequence[dict[int, int]]
    loads: RankLoads
    waits: Sequence[int | None]
    free: float

    @cached_property
    def _held(self) -> Ints:
        saved = np.array([point.saved for point in self.points], np.int64)
        later = np.array([s if w is None else w for s, w in zip(saved.tolist(), self.waits, strict=True)], np.int64)
        extra = np.array([point.temporary for point in self.points], np.int64)
        held: Ints = self.loads.saved @ saved + self.loads.waiting @ later + extra[self.loads.runs]
        return held

    @cached_property
    def lacks(self) -> float:
        """The bytes by which the limit is exceeded if all of the order is offloaded; not positive if it fits."""
        return self._over(len(self.order))

    def _over(self, count: int) -> float:
        moved = np.zeros(len(self.points), np.int64)
        for stage, storage in self.order[:count]:
            moved[stage] += self.values[stage][storage]
        return float((self._held - self.loads.away @ moved).max(initial=0)) - self.free

    def chosen(self) -> RankOffload:
        """Return the choice with the shortest beginning of the order that is enough."""
        low, high = 0, len(self.order)  # a longer beginning frees more
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._over(middle) <= 0 else (middle + 1, high)
        moved: list[list[int]] = [[] for _ in self.points]
        for stage, storage in self.order[:high]:
            moved[stage].append(storage)
        return RankOffload(self.points, tuple(tuple(sorted(own)) for own in moved))
