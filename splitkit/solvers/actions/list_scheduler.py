"""Orders actions by list scheduling: a rank that is free takes an input part first, then a forward, then a weight part.

The zero-bubble schedules (Qi et al., ICLR 2024) follow from rules of this kind; the times decide which is best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from splitkit.solvers.actions.order_problem import F, I, OrderProblem, StepState, TimedRows, W

_GAPS = (0.75, 0.0, 1.0, 0.5, 0.9, 0.25)


@dataclass(frozen=True)
class ListRule:
    """How a rank chooses its next action.

    Attributes:
        most: stage -> the most microbatches between forward and the end of the input part.
        gap: how much of a weight part may be too long for the gap that it fills, from 0 to 1.
        yields: whether a weight part runs in place of a forward that would delay a known input part.
        deep: whether a rank prefers forward of its last stages.
    """

    most: tuple[int, ...]
    gap: float
    yields: bool
    deep: bool = True


def list_rules(problem: OrderProblem) -> Iterator[ListRule]:
    """Yield rules, the best ones on published times first.

    The first input part of a stage comes back after its microbatch has been to the last stage. ``most`` is the number
    of forwards that fit into this time, a few more or fewer; or as in 1F1B; or only memory limits it.
    """
    last, several = problem.stages, max(map(len, problem.of_rank), default=1) > 1
    around = [tuple(_in_time(problem, s, share) for s in range(last)) for share in ((1.0, 0.5) if several else (1.0,))]
    shifted = [tuple(max(1, one + add) for one in most) for add in (0, -1, 1, 2, -2) for most in around]
    limits = [tuple(range(last, 0, -1)), *shifted[: len(around) * 3], (problem.microbatches,) * last]
    limits += shifted[len(around) * 3 :]
    unique = dict.fromkeys(limits)
    for gap, most, yields, deep in product(_GAPS, unique, (False, True), (True, False) if several else (True,)):
        yield ListRule(most, gap, yields, deep)


def _in_time(problem: OrderProblem, stage: int, share: float) -> int:
    """Return how many forwards fit between the first one and its input part, with one more to begin with."""
    after = range(stage + 1, problem.stages)
    there = sum(problem.seconds[s][F] + problem.travel[s - 1][F] for s in after)
    back = sum(problem.seconds[s][I] + problem.travel[s][I] for s in after)
    own = problem.seconds[stage][F]
    fit = math.ceil(min(share * (there + back) / own, problem.microbatches)) if own else problem.microbatches
    return min(problem.microbatches, fit + 1)


def schedule_by_rule(problem: OrderProblem, rule: ListRule) -> TimedRows | None:
    """Return the order that a rule makes; ``None`` if memory lets it not go on."""
    return ListScheduler(problem, rule).schedule()


Choice = tuple[float, int, int]
"""(start, stage, kind) of an action."""


class ListScheduler:
    """Runs the actions in the order of their starts; a rank chooses again when a message arrives."""

    def __init__(self, problem: OrderProblem, rule: ListRule) -> None:
        self.problem, self.rule = problem, rule
        self.state = StepState(problem)
        self.versions = [0] * problem.ranks
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.reserve = [_later_bytes(problem, stage) for stage in range(problem.stages)]

    def schedule(self) -> TimedRows | None:
        """Return the order; ``None`` if memory lets no rank go on."""
        for rank in range(self.problem.ranks):
            self._choose(rank)
        for _ in range(3 * self.problem.microbatches * self.problem.stages):
            choice = self._next()
            if choice is None:
                return None
            start, stage, kind = choice
            target = self.state.run(stage, kind, start)
            rank = self.problem.rank_of[stage]
            self._choose(rank)
            if target >= 0 and self.problem.rank_of[target] != rank:
                self._choose(self.problem.rank_of[target])
        return self.state.timed()

    def _next(self) -> Choice | None:
        """Return the action that starts first; a weight part if memory lets no rank go on without."""
        while self.heap:
            start, rank, version, stage, kind = heapq.heappop(self.heap)
            if version == self.versions[rank]:
                return start, stage, kind
        state = self.state
        for stage in range(self.problem.stages):
            start_of = state.start(stage, W)
            if start_of is not None and state.fits(stage, W):
                return start_of, stage, W
        return None

    def _choose(self, rank: int) -> None:
        self.versions[rank] += 1
        choice = self.choice(rank)
        if choice is not None:
            start, stage, kind = choice
            heapq.heappush(self.heap, (start, rank, self.versions[rank], stage, kind))

    def choice(self, rank: int) -> Choice | None:
        """Return the next action of a rank; ``None`` if it must wait for a message that is not on its way."""
        now, rule = self.state.free[rank], self.rule
        inputs, forwards = self.first(rank, I), self.first(rank, F)
        if inputs is not None and inputs[0] <= now:
            return inputs
        weight = self.first(rank, W)
        spare = rule.gap * self.problem.seconds[weight[1]][W] if weight is not None else 0.0
        if forwards is not None and forwards[0] <= now:
            if inputs is not None and weight is not None and rule.yields:
                seconds = self.problem.seconds
                late = now + seconds[forwards[1]][F] - inputs[0] > rule.gap * seconds[inputs[1]][I]
                allowed = rule.gap * seconds[inputs[1]][I]
                if late and now + seconds[weight[1]][W] <= inputs[0] + allowed:
                    return weight
            return forwards
        known = min((one for one in (inputs, forwards) if one is not None), default=None)
        if weight is not None and (known is None or now + self.problem.seconds[weight[1]][W] <= known[0] + spare):
            return weight
        return known

    def first(self, rank: int, kind: int) -> Choice | None:
        """Return the action of a kind that can start first on a rank; of equally early ones, the preferred stage's."""
        found: list[Choice] = []
        for stage in self.problem.of_rank[rank]:
            start = self.state.start(stage, kind)
            if start is not None and self.allowed(stage, kind):
                found.append((start, stage, kind))
        last = (kind == F) == self.rule.deep
        return min(found, key=lambda one: (one[0], -one[1] if last else one[1]), default=None)

    def allowed(self, stage: int, kind: int) -> bool:
        """Return whether memory and the rule let an action run."""
        state, rank = self.state, self.problem.rank_of[stage]
        if kind != F:
            return state.fits(stage, kind)
        forwards, inputs, _ = state.counts[stage]
        use = self.problem.uses[stage][F]
        need = max(use.peak, use.change + self.reserve[stage])
        return forwards - inputs < self.rule.most[stage] and state.held[rank] + need <= self.problem.room[rank]


def _later_bytes(problem: OrderProblem, stage: int) -> int:
    """Return the bytes that must stay free after a forward, or its rank could not go on.

    They are those of the microbatch in later stages of the rank, and those that an input or weight part takes.
    """
    stages = problem.of_rank[problem.rank_of[stage]]
    backward = max(0, *(problem.uses[s][kind].peak for s in stages for kind in (I, W)))
    return backward + sum(problem.uses[s][F].change for s in stages if s > stage)
