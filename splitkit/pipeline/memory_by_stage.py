"""Divides the memory of each rank over time by stage and kind: how many microbatches each stage holds, and what runs.

All that a stage holds is a multiple of bytes that are the same for each microbatch, so counts tell its memory::

    time      0      1      2      3             rank 0 has stage 0: 100 bytes of weights and state, 10 saved for each
    rank 0    F0     F1     B0     B1            microbatch, 3 more while an action runs
    saved     1      2      2      1             microbatches in flight
    running   1      1      1      1             100 + 10 * 2 + 3 * 1 bytes at time 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from splitkit.pipeline.memory import (
    MESSAGES,
    Changes,
    Ints,
    accumulated,
    host_changes,
    message_changes,
    static_bytes,
    units_of,
)
from splitkit.pipeline.order import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from splitkit.pipeline.trace import Floats, StepTrace

UNITS = ("saved", "running", "captured", "left")
"""What is counted of each stage: microbatches whose saved values are held, actions that run, and microbatches that wait
for the weight part of backward: what its input part has captured for it, and what it leaves of the saved values."""


@dataclass(frozen=True)
class MemoryByStage:
    """The memory of each rank over time.

    Attributes:
        units: for each stage the bytes held throughout the step, then the bytes of one of each of `UNITS`.
        owned: the stages of each rank.
        points: for each rank ``(seconds, bytes of messages, counts)`` from then on; the counts are those of `UNITS` for
            each of its stages. At each time the state of most bytes comes first, as in
            `splitkit.pipeline.memory.memory_over_time`.
    """

    units: tuple[tuple[int, int, int, int, int], ...]
    owned: tuple[tuple[int, ...], ...]
    points: tuple[tuple[tuple[float, ...], ...], ...]

    def nbytes(self, rank: int) -> list[tuple[float, int]]:
        """Return ``(seconds, bytes)`` at each of the rank's points."""
        fixed, weights = self._weights(rank)
        return [
            (time, fixed + sum(n * w for n, w in zip(counts, weights, strict=True)))  # type: ignore[misc]
            for time, *counts in self.points[rank]
        ]

    def _weights(self, rank: int) -> tuple[int, list[int]]:
        """Return the bytes that a rank holds throughout, and the bytes for one count of each column of its points."""
        own = [self.units[stage] for stage in self.owned[rank]]
        return sum(unit[0] for unit in own), [1, *(nbytes for unit in own for nbytes in unit[1:])]


def memory_by_stage(run: StepTrace) -> MemoryByStage:
    """Return the memory of each rank over time, by stage and kind."""
    units = []
    for stage, costs in enumerate(run.stages):
        saved, left, captured = units_of(run, stage)
        units.append((costs.fixed_bytes, saved, costs.temporary_bytes, captured, left))
    of = run.order.rank_of
    owned = tuple(tuple(stage for stage, rank in enumerate(of) if rank == own) for own in range(run.ranks))
    place = np.array([owned[rank].index(stage) for stage, rank in enumerate(of)])
    columns = 1 + len(UNITS) * max(map(len, owned))
    bytes_too = [*message_changes(run), *host_changes(run, MESSAGES)]
    live = accumulated([*bytes_too, *_counts(run, 1 + len(UNITS) * place)], columns, run.ranks)
    bare, static = MemoryByStage(tuple(units), owned, ()), static_bytes(run)
    points = []
    for rank, (counts, seconds) in enumerate(live):
        held = counts[:, : 1 + len(UNITS) * len(owned[rank])]
        held[:, MESSAGES] += static[rank]
        points.append(_points(held, seconds, held @ np.array(bare._weights(rank)[1]), static[rank]))
    return MemoryByStage(tuple(units), owned, tuple(points))


def _counts(run: StepTrace, first: Ints) -> Iterator[Changes]:
    """Yield the changes of the counts of `UNITS`.

    Args:
        run: the step.
        first: the first column of each stage.
    """
    rank, stage, kind, _ = run.order.columns
    start, end = 2 * np.arange(len(rank)), 2 * np.arange(len(rank)) + 1
    saved, running, captured, left = (first[stage] + i for i in range(len(UNITS)))

    def changes(begin: Ints | bool, stop: Ints | bool, column: Ints) -> Iterator[Changes]:
        """Yield one more at the start of actions, and one at their end."""
        yield Changes(rank, run.starts, start, np.broadcast_to(begin, len(rank)).astype(np.int64), column)
        yield Changes(rank, run.ends, end, np.broadcast_to(stop, len(rank)).astype(np.int64), column)

    none = np.zeros(len(rank), np.int64)
    over = (kind == BACKWARD) | (kind == BACKWARD_INPUT)
    last = kind == BACKWARD_WEIGHT
    yield from changes(kind == FORWARD, -1 * over, saved)
    yield from changes(none + 1, none - 1, running)
    yield from changes(kind == BACKWARD_INPUT, -1 * last, captured)
    yield from changes(none, (kind == BACKWARD_INPUT) - 1 * last, left)


def _points(counts: Ints, seconds: Floats, nbytes: Ints, static: int) -> tuple[tuple[float, ...], ...]:
    """Return, for each time, the state with the most bytes and the last state; equal states in a row are one."""
    nothing = (static, *[0] * (counts.shape[1] - 1))
    most: dict[float, tuple[int, tuple[int, ...]]] = {0.0: (static, nothing)}
    after = dict.fromkeys((0.0,), nothing)
    for row, time, held in zip(map(tuple, counts.tolist()), seconds.tolist(), nbytes.tolist(), strict=True):
        if time not in most or held > most[time][0]:
            most[time] = held, row
        after[time] = row
    found: list[tuple[float, ...]] = []
    for time, (_, row) in most.items():
        for state in (row, after[time]):
            if not found or found[-1][1:] != state:
                found.append((time, *state))
    return tuple(found)
