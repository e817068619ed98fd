"""Counts the microbatches that a rank holds at once, and chooses what its stages save so that they fit its memory.

The order of a rank's actions says what it holds after each, whatever their times: so many microbatches of a stage
between forward and backward, and so many between the input part and the weight part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitkit.pipeline.order import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PipelineOrder
from splitkit.pipeline.stage_costs import StageCosts

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankLoads:
    """What a rank holds at once.

    Attributes:
        stages: the stages of the rank.
        saved: (v, s) for each moment and stage, the microbatches that hold all that is saved.
        waiting: (v, s) the microbatches that wait for their weight part.
        runs: (v,) the index of the stage that computes at the moment.
    """

    stages: tuple[int, ...]
    saved: Ints
    waiting: Ints
    runs: Ints

    def need(self, costs: Sequence[StageCosts]) -> int:
        """Return the bytes that the rank needs at most, without messages.

        Args:
            costs: what its stages cost, in order.
        """
        fixed = sum(stage.fixed_bytes for stage in costs)
        saved = np.array([stage.saved_bytes for stage in costs], np.int64)
        given = [stage.deferred_bytes for stage in costs]
        waits = np.array([s if w is None else w for s, w in zip(saved.tolist(), given, strict=True)], np.int64)
        temporary = np.array([stage.temporary_bytes for stage in costs], np.int64)
        live = self.saved @ saved + self.waiting @ waits + temporary[self.runs]
        return fixed + int(live.max(initial=0))

    def surely(self) -> Ints:
        """Return (s,) the most microbatches that each stage holds while its backward runs, taken alone."""
        most: Ints = self.saved.max(axis=0, initial=0)
        return most


def rank_loads(order: PipelineOrder) -> list[RankLoads]:
    """Return the loads of each rank of an order; moments at which another one holds at least as much are left out."""
    found = []
    for rank in range(len(order.ranks)):
        stages = tuple(s for s, r in enumerate(order.rank_of) if r == rank)
        moments = list(dict.fromkeys(_moments(order, rank, stages)))
        kept = _undominated(np.array(moments, np.int64).reshape(-1, 2 * len(stages) + 1))
        found.append(RankLoads(stages, kept[:, : len(stages)], kept[:, len(stages) : -1], kept[:, -1]))
    return found


def warm_up(order: PipelineOrder) -> list[int]:
    """Return the number of forwards that each rank runs before its first backward."""
    rank, _, kind, _ = order.columns
    return [int(np.argmax(kind[rank == r] != FORWARD)) for r in range(len(order.ranks))]


def _moments(order: PipelineOrder, rank: int, stages: Sequence[int]) -> Iterator[tuple[int, ...]]:
    place = {stage: i for i, stage in enumerate(stages)}
    saved, waiting = [0] * len(stages), [0] * len(stages)
    columns = order.columns
    here = columns.rank == rank
    for stage, kind in zip(columns.stage[here].tolist(), columns.kind[here].tolist(), strict=True):
        at = place[stage]
        saved[at] += kind == FORWARD
        yield (*saved, *waiting, at)
        if kind in (BACKWARD, BACKWARD_INPUT):
            saved[at] -= 1
        waiting[at] += kind == BACKWARD_INPUT
        if kind == BACKWARD_INPUT:
            yield (*saved, *waiting, at)
        waiting[at] -= kind == BACKWARD_WEIGHT


def _undominated(moments: Ints) -> Ints:
    """Return the moments of which none is below another with the same stage running."""
    order = np.argsort(-moments[:, :-1].sum(axis=1), kind="stable")
    kept: list[Ints] = []
    for row in moments[order]:
        if not any(other[-1] == row[-1] and (other[:-1] >= row[:-1]).all() for other in kept):
            kept.append(row)
    return np.array(kept, np.int64).reshape(-1, moments.shape[1])
