"""Orders actions by list scheduling within windows: of the ready actions, that with the earliest deadline runs.

A weight part runs only if it keeps no action of its rank from its latest start, or fills a gap whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from splitkit.solvers.actions.list_scheduler import Choice, ListRule, ListScheduler
from splitkit.solvers.actions.order_problem import F, I, OrderProblem, TimedRows, W
from splitkit.solvers.actions.stage_windows import Windows


@dataclass(frozen=True)
class DeadlineRule:
    """How a rank chooses within windows.

    Attributes:
        most: stage -> the most microbatches between forward and the end of the input part.
        late: how much of itself a weight part may keep others from their latest starts, from 0 to 1.
        inputs_first: whether a ready input part runs before a forward with an earlier deadline that can still be met.
    """

    most: tuple[int, ...]
    late: float
    inputs_first: bool


def schedule_in_windows(problem: OrderProblem, windows: Windows, rule: DeadlineRule) -> TimedRows | None:
    """Return the order that a rule makes; ``None`` if memory lets it not go on. It need not keep within the windows."""
    return _DeadlineScheduler(problem, windows, rule).schedule()


class _DeadlineScheduler(ListScheduler):
    def __init__(self, problem: OrderProblem, windows: Windows, rule: DeadlineRule) -> None:
        super().__init__(problem, ListRule(rule.most, 0.0, False))
        self.due = windows.forward_to.tolist(), windows.input_to.tolist()
        self.deadlines = rule

    def choice(self, rank: int) -> Choice | None:
        now, ready, known = self.state.free[rank], list[Choice](), list[Choice]()
        next_due = math.inf
        for stage in self.problem.of_rank[rank]:
            for kind in (I, F):
                latest = self._latest_start(stage, kind)
                next_due = min(next_due, latest)
                start = self.state.start(stage, kind)
                if start is not None and self.allowed(stage, kind):
                    (ready if start <= now else known).append((latest if start <= now else start, stage, kind))
        if ready:
            _, stage, kind = self._first_due(ready, now)
            return now, stage, kind
        soonest, weight = min(known, default=None), self.first(rank, W)
        if weight is None:
            return soonest
        seconds = self.problem.seconds[weight[1]][W]
        fills = soonest is not None and now + seconds <= soonest[0]
        return weight if fills or now + seconds <= next_due + self.deadlines.late * seconds else soonest

    def _first_due(self, ready: list[Choice], now: float) -> Choice:
        if self.deadlines.inputs_first:
            inputs = min((one for one in ready if one[2] == I), default=None)
            forward = min((one for one in ready if one[2] == F), default=None)
            if inputs and (forward is None or forward[0] >= now + self.problem.seconds[inputs[1]][I]):
                return inputs
        return min(ready)

    def _latest_start(self, stage: int, kind: int) -> float:
        """Return the latest start of the next action of a stage; infinity if there is none yet."""
        counts = self.state.counts[stage]
        number = counts[kind]
        if number == self.problem.microbatches or (kind == I and number == counts[F]):
            return math.inf
        due: float = self.due[kind][stage][number]
        return due - self.problem.seconds[stage][kind]
