"""The number of microbatches that the stages of a pipeline hold, whatever the times of its actions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from splitkit.pipeline.order import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from splitkit.pipeline.run import ScheduleRun
from splitkit.solvers.placement.problem import Bools, Ints


class InFlight(NamedTuple):
    """The number of microbatches of each stage, by number of the stage.

    Attributes:
        forward: (k,) at most.
        backward: (k,) at most while a backward runs.
        handed: (k,) whether the gradient that backward starts with came from another rank and is held as well.
    """

    forward: Ints
    backward: Ints
    handed: Bools

    @classmethod
    def of(cls, run: ScheduleRun | None, stages: int, *, surely: bool = False) -> InFlight:
        """Return the numbers of a schedule for any times; without a schedule one microbatch and no messages.

        Where backward is divided, a microbatch counts until its weight part, since most of its memory waits for that.
        If ``surely``, it counts only until the end of its input part, when some stages free much. Torch's first stage
        has none.
        """
        ones = np.ones(stages, np.int64)
        if run is None:
            return cls(ones, ones, np.zeros(stages, np.bool_))
        _, stage, kind, _ = run.order.columns
        forward, backward = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
        now = np.zeros(stages, np.int64)
        for s, k in zip(stage.tolist(), kind.tolist(), strict=True):
            now[s] += k == FORWARD
            forward[s] = max(forward[s], now[s])
            if k in (BACKWARD, BACKWARD_INPUT):
                backward[s] = max(backward[s], now[s])
            now[s] -= k in (BACKWARD, BACKWARD_INPUT if surely and s else BACKWARD_WEIGHT)
        of = np.array(run.order.rank_of)
        return cls(forward, backward, np.append(of[1:] != of[:-1], False))
