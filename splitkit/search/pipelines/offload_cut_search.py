"""Finds cuts, what stages save, and what waits on the host meanwhile, for the shortest simulated step.

The best plan without offload, and offloading the largest values first, are among the candidates for all cuts that are
looked at.

**The bound.** Each rank copies what all microbatches offload once, in each direction, within the step. So a plan of a
step of at most z seconds offloads at most ``z * bandwidth / microbatches`` bytes of each microbatch, and at any moment
no more of them is away than the order of actions says. With that much more memory, the bounds of `CutSearch` hold for
all plans that take at most z: the step that was found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from math import ceil, inf

import numpy as np
from torch.fx import Node

from splitkit.costs import Links
from splitkit.costs.links import HostLink
from splitkit.pipeline.order import PipelineOrder, StageCopies, suffix_sums
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.pipelines.cut_scoring import CutScoring, Moved, ScoredCuts
from splitkit.search.pipelines.cut_search import CutSearch
from splitkit.search.pipelines.rank_choice import (
    Points,
    RankChoice,
    RankLoads,
    Span,
    fitting_points,
    live_bytes,
    rank_loads,
    with_less_recompute,
)
from splitkit.search.pipelines.stage_frontiers import FrontierPoint, StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblem, StageProblems
from splitkit.training.choices import Choice, Ints
from splitkit.training.flow import output_nodes
from splitkit.training.offload_timeline import why_not_moved

_SHARES = (1.0, 0.5, None)
"""Shares of a rank's time in which its link may be busy; ``None``: the largest first, and nothing recomputed."""
_MOST = 2**60  # bytes; stands for no limit
_HALVINGS = 8  # of the memory, for a refusal that says what would do


class OffloadScoring(CutScoring):
    """Scores cuts without offload, and with several ways to offload; the shortest step counts.

    It chooses what the stages of a rank recompute, and which saved values go to the host, within the rank's memory. In
    the steady state of a pipeline a rank computes, for each microbatch, all of its stages once. As long as the copies
    of a microbatch take no longer in either direction, no action waits for them. So values are offloaded up to a share
    of that time, and what the memory still lacks is recomputed. Shares are tried and simulated, since a step also has a
    beginning and an end, where ranks have less to do.
    """

    def __init__(
        self, choices: RankChoice, order: PipelineOrder, links: Links | None, transfers: StageTransfers
    ) -> None:
        super().__init__(choices, order, links)
        self.transfers = transfers
        self.loads = rank_loads(order, offload=True)
        self._values: dict[tuple[Span, FrontierPoint], dict[int, int]] = {}

    def _score(self, ends: tuple[int, ...]) -> ScoredCuts | None:
        best = super()._score(ends)
        self.proven.pop(ends, None)  # of steps without offload
        if best is not None and not any(point.seconds for point in best.points):
            return best
        for share in _SHARES:
            found = self._fitted(ends, partial(self._choose, share))
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
        return best

    def _choose(
        self, share: float | None, rank: int, spans: Sequence[Span], reserve: int
    ) -> tuple[Points, Moved] | None:
        """Return the points of a rank's stages, and the storages that each moves; ``None`` if it does not fit.

        Args:
            share: the share of its time in which the link may be busy; ``None``: stages recompute as little as they
                can, and the largest values are offloaded until the rest fits, however long that takes.
            rank: the rank.
            spans: the positions of its stages.
            reserve: bytes that are left free, for messages.
        """
        found = [self.choices.frontiers.of(*span) for span in spans]
        counts = self.loads[rank].surely().tolist()

        @cache
        def order(points: Points) -> _Order:
            return self._with(rank, spans, points, share, reserve)

        def lacks(points: Points) -> float:
            return order(points).lacks

        points = fitting_points(found, counts, lacks, again=share is not None)
        return None if points is None else order(with_less_recompute(found, counts, lacks, points)).chosen()

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
        problems = self.choices.frontiers.problems
        busy = sum(float(problems.seconds[b] - problems.seconds[a]) for a, b in spans)
        busy += sum(point.seconds for point in points)
        most, taken = inf if share is None else share * busy, list[tuple[int, int]]()
        out = back = host = 0.0
        for stage, storage in order:
            nbytes = values[stage][storage]
            there = host + nbytes * counts[stage]
            later = out + link.out.seconds(nbytes), back + link.back.seconds(nbytes)
            if max(later) <= most and there <= self.transfers.host:
                (out, back), host = later, there
                taken.append((stage, storage))
        limit = self.choices.limits[rank]
        known = [self.choices.bytes_of(span) for span in spans]
        free = inf if limit is None else limit - reserve - sum(fixed for fixed, _ in known)
        return _Order(points, taken, values, loads, [waits for _, waits in known], free)

    def _movable(self, span: Span, point: FrontierPoint) -> dict[int, int]:
        """Return storage -> bytes of what a stage can move at a point."""
        key = span, point
        if key not in self._values:
            problem, choice = self.choices.frontiers.problem(*span), self.choices.frontiers.choice(*span, point)
            sizes = problem.savings.nbytes
            self._values[key] = {s: int(sizes[s]) for s in self.transfers.movable(problem, choice)}
        return self._values[key]

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
        transfers: what stages can move to the host of each rank.
    """

    def __init__(
        self,
        frontiers: StageFrontiers,
        order: PipelineOrder,
        links: Links | None,
        limits: Sequence[int | None],
        transfers: StageTransfers,
    ) -> None:
        super().__init__(frontiers, order, links, limits)
        self.transfers = transfers
        self.scoring: OffloadScoring = OffloadScoring(self.choices, order, links, transfers)

    def run(self) -> tuple[ScoredCuts | None, float]:
        """Return what `CutSearch.run` does, for plans that may offload."""
        plain = CutSearch(self.frontiers, self.order, self.links, self.limits)
        alone, bound = plain.run()
        if all(limit is None for limit in self.limits):
            self.scoring.tried |= plain.scoring.tried
            return alone, bound
        pace = float(self.problems.seconds[-1]) * self.order.microbatches / len(self.order.ranks)
        place = {int(cut): number for number, cut in enumerate(self.cuts)}
        seeds = CutSearch(self.frontiers, self.order, self.links, self._relaxed(pace)).seeds()
        if alone is not None:
            seeds.append(tuple(place[end] for end in alone.ends))
        fitting = self._fitting(dict.fromkeys(seeds)) or self._fitting(self._tight())
        best = self.local(fitting or ([] if alone is None else [alone]) or self._lean_ones())
        if best is None:
            return None, 0.0
        relaxed = CutSearch(self.frontiers, self.order, self.links, self._relaxed(best.seconds))
        bound = relaxed.bound(best.seconds)
        if self.few:
            least, found = relaxed.all_cuts(best, self.scoring)
            bound, best = max(bound, least), found or best
        return best, bound

    @cached_property
    def smallest(self) -> ScoredCuts:
        """The lowest peak with offload: some cuts are planned for ever less memory than is enough without."""
        best = CutSearch(self.frontiers, self.order, self.links, self.limits).smallest
        ends = dict.fromkeys([best.ends, *(tuple(int(self.cuts[e]) for e in each) for each in self._tight())])
        for each in ends:
            low, high = 0, max(best.run.peaks)
            for _ in range(_HALVINGS):
                middle = (low + high) // 2
                limited = OffloadCutSearch(
                    self.frontiers, self.order, self.links, [middle] * len(self.limits), self.transfers
                )
                found = limited.scoring.of(each)
                low, high = (middle, high) if found is None else (low, max(found.run.peaks))
                best = best if found is None else min(best, found, key=lambda scored: max(scored.run.peaks))
        return best

    def _relaxed(self, seconds: float) -> list[int | None]:
        """Return the memory of each rank and what it can have on the host at once in a step of so many seconds."""
        link = self.transfers.link
        rate = min(link.out.bandwidth, link.back.bandwidth)
        each = min(seconds * rate / self.order.microbatches, float(_MOST))
        found: list[int | None] = []
        for limit, load in zip(self.limits, self.scoring.loads, strict=True):
            away = min(each * int(load.away.max(initial=0)), self.transfers.host, float(_MOST))
            found.append(None if limit is None else limit + ceil(away))
        return found


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
        extra = np.array([point.temporary for point in self.points], np.int64)
        held: Ints = live_bytes(self.loads, self.points, self.waits) + extra[self.loads.runs]
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

    def chosen(self) -> tuple[Points, Moved]:
        """Return the choice with the shortest beginning of the order that is enough."""
        count = bisect_left(range(len(self.order)), True, key=lambda count: self._over(count) <= 0)
        moved: list[list[int]] = [[] for _ in self.points]
        for stage, storage in self.order[:count]:
            moved[stage].append(storage)
        return self.points, tuple(tuple(sorted(own)) for own in moved)


# Which saved values of a stage can go to the host, and how long their copies take beside its forward and backward.


class StageTransfers:
    """The values that stages of one joint graph can move, and their copies.

    Attributes:
        problems: the problems of all stages.
        link: the link of each rank to its host.
        host: the bytes that each rank may have there.
    """

    def __init__(self, problems: StageProblems, link: HostLink, host: float = inf) -> None:
        self.problems, self.link, self.host = problems, link, host
        flow, peaks = problems.flow, problems.peaks
        seconds = {node: problems.costs.seconds(node) for node in flow.nodes}
        self._seconds = [sum(seconds.get(node, 0.0) for node in ops) for ops in peaks.order.ops]
        self._fixed: dict[Node, bool] = {}
        self._returned = {r for n in output_nodes((*flow.outputs, *flow.gradients)) for r in flow.storages.under(n)}

    def movable(self, problem: StageProblem, choice: Choice) -> dict[int, Node]:
        """Return storage of the problem -> the saved value that fills it, for the storages that can go to the host."""
        savings, found = problem.savings, dict[int, Node]()
        saved = np.flatnonzero(choice.saved).tolist()
        storages = savings.storage[saved].tolist()
        for value, storage in zip(saved, storages, strict=True):
            if int(savings.nbytes[storage]) and storages.count(storage) == 1 and self._moves(savings.values[value]):
                found[storage] = savings.values[value]
        return found

    def _moves(self, value: Node) -> bool:
        if value not in self._fixed:
            flow = self.problems.flow
            returned = not self._returned.isdisjoint(flow.storages.under(value))
            self._fixed[value] = returned or bool(why_not_moved(flow, value))
        return not self._fixed[value]

    def copies(self, problem: StageProblem, choice: Choice, storages: Sequence[int]) -> StageCopies | None:
        """Return the copies of a microbatch of a stage that offloads these storages; ``None`` for none."""
        if not storages:
            return None
        start, end = problem.start, problem.end
        values = self.movable(problem, choice)
        order, flow = self.problems.peaks.order, self.problems.flow
        forward, backward = self.problems.members.of(start, end, choice)
        if self.problems.divided:
            late = self.problems.halves.weights(start, end)
            backward = [op for op in backward if op not in late]
        backward = order.backward_ops(backward)
        sizes = problem.savings.nbytes
        roots = {flow.storages.under(values[s])[0]: int(sizes[s]) for s in storages}
        costs = self.problems.seconds_of(problem, choice)
        made = _ends(forward, self._seconds)
        makers = {s: order.number[flow.producer(values[s])] for s in storages}
        leaving = [(made.get(op, costs.forward), int(sizes[s])) for s, op in makers.items()]
        rest = dict(zip(backward, suffix_sums([self._seconds[op] for op in backward]), strict=True))
        reads = {root: max((rest[op] for op in backward if root in order.held[op]), default=0.0) for root in roots}
        coming = [(reads[root], size) for root, size in roots.items()]
        return StageCopies.of(self.link, leaving, coming, costs.forward, costs.backward_input)


def _ends(ops: Sequence[int], seconds: Sequence[float]) -> dict[int, float]:
    """Return op -> when it ends, if they run one after the other."""
    return dict(zip(ops, accumulate(seconds[op] for op in ops), strict=True))
