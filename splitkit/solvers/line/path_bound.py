"""Dynamic programs over the cuts of a line into stages of a pipeline, from the last stage to the first.

A step of m microbatches on stages of times t is at least ``max_j (m t_j + sum of t_i before j)``, if each device has
one stage: the first microbatch must get to stage j, and its last gradient back to the first stage. Both programs take
times that depend on the number of the stage, since earlier stages hold more microbatches.

For ``least_path``, with the seconds ``t`` of stage s from cut i to cut j, and ``link`` of the messages over a cut::

    after[p, end] = nothing
    after[s, i] = min over j of max(m t(s, i, j), t(s, i, j) + link(j) + after[s + 1, j])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from splitkit.solvers.placement.problem import Floats

_NOTHING = -1e300
"""What follows the last stage: below every sum, and finite, so that it can be added to an infinite time."""


@dataclass(frozen=True, eq=False)
class LineCuts:
    """The best cuts of a line.

    Attributes:
        value: the objective; infinite if there are no cuts.
        ends: (p,) the end of each stage, the last of which is the end of the line.
    """

    value: float
    ends: tuple[int, ...]


def least_path(times: Floats, links: Floats, microbatches: int, waits: Floats | None = None) -> LineCuts:
    """Return the cuts with the least ``max_j (m t_j + w_j + sum of t_i and links before j)``.

    Args:
        times: (p, n + 1, n + 1) seconds of stage k from i to j; infinite where it is not allowed, also where j <= i.
        links: (n + 1,) seconds of the messages of one microbatch over a cut.
        microbatches: m.
        waits: (p, n + 1, n + 1) w, seconds in which stage k from i to j is idle in any case; none by default.
    """
    alone = microbatches * times + (0.0 if waits is None else waits)
    return _best_cuts(times, links, _NOTHING, lambda stage, on: np.maximum(alone[stage], on))


def first_wait(forward: Floats, later: Floats, warm_up: int) -> Floats:
    """Return the seconds for which a stage is idle before its first backward, at least.

    Its first gradient belongs to one of the microbatches of its warm-up, which must go through all later stages and
    back. Until then the stage runs the other forwards of its warm-up, and nothing else.

    Args:
        forward: seconds of its forward.
        later: seconds of forward and backward of all later stages.
        warm_up: the forwards that it runs before its first backward.
    """
    return np.maximum(0.0, later - (warm_up - 1) * forward)


def least_sum(times: Floats, links: Floats, most: float) -> LineCuts:
    """Return the cuts with the least sum of times and links, none of whose times is above ``most``.

    Args:
        times: as in `least_path`.
        links: as in `least_path`.
        most: the limit of each time.
    """
    return _best_cuts(np.where(times <= most, times, np.inf), np.append(links[:-1], 0.0), 0.0, lambda _, on: on)


def _best_cuts(times: Floats, links: Floats, nothing: float, value: Callable[[int, Floats], Floats]) -> LineCuts:
    """Return the best cuts.

    Args:
        times: as in `least_path`.
        links: as in `least_path`.
        nothing: what follows the last stage.
        value: (stage, times with the link and what follows) -> the value of the stage and all after it.
    """
    stages, size, _ = times.shape
    after = np.full(size, np.inf)
    after[-1] = nothing
    chosen = np.zeros((stages, size), np.int64)
    for stage in reversed(range(stages)):
        found = value(stage, times[stage] + (links + after)[None, :])
        chosen[stage], after = found.argmin(axis=1), found.min(axis=1)
    ends = [0]
    for row in chosen:
        ends.append(int(row[ends[-1]]))
    return LineCuts(float(after[0]), tuple(ends[1:]))


def nearest_cuts(at: Floats, times: Sequence[float]) -> tuple[int, ...]:
    """Return the ends of stages whose cuts are nearest to given times, each after the one before.

    Args:
        at: (n + 1,) the time of each cut.
        times: (p,) the time at which each stage is to end; the last stage ends with the line in any case.
    """
    ends: list[int] = []
    last = len(at) - 1
    for i, time in enumerate(times):
        least = (ends[-1] if ends else 0) + 1
        most = last - (len(times) - 1 - i)
        ends.append(min(max(int(np.abs(at - time).argmin()), least), most))
    ends[-1] = last
    return tuple(ends)
