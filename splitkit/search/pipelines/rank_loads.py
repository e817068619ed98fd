"""Counts the microbatches of each stage that a rank holds at once.

The order of a rank's actions says what it holds after each, whatever their times: so many microbatches of a stage
between forward and backward, and so many between the input part and the weight part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitkit.pipeline.action import Action
from splitkit.pipeline.host_windows import host_windows
from splitkit.pipeline.order import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PipelineOrder

Ints = NDArray[np.int64]


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
