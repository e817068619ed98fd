"""Makes V-Min and V-Half (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024), which hold less.

Rank r of p has the stages r and 2 p - 1 - r, so that a microbatch goes from the first rank to the last and back. The
actions of one microbatch, each one time slot long, form a building block that repeats every six slots, once for each
microbatch. The memory of a rank is proportional to the duration of a block on it. The weight parts fill the gaps::

    V-Min, 2 ranks    rank 0    F0 . . F3 I3 W3 ..  I0 W0      stage 3 is on the way back
                      rank 1    .  F1 F2 . .  I2 I1 W2 W1

With equal times of F, I and W a rank holds at its peak about a third of what it holds under 1F1B (V-Min), or half of it
(V-Half).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitkit.pipeline.action import Action

_INTERVAL = 6
"""Time slots from one microbatch to the next: F, I and W of the two stages of a rank."""

_Block = list[tuple[int, str, int]]
"""The actions of a rank for one microbatch without weight parts: (time slot, kind, stage)."""


def v_min(stages: int, microbatches: int, ranks: int) -> list[list[Action]]:
    """Return V-Min: each action of the block directly follows the previous one."""
    blocks = []
    # Without the delay, F of a rank's first stage and I of its second one would fall into the same slot (mod 6).
    late = 2 if ranks % 3 == 0 else 0
    for rank in range(ranks):
        times = rank, 2 * ranks - 1 - rank, 2 * ranks + late + rank, 4 * ranks + late - 1 - rank
        blocks.append(_block(times, rank, stages - 1 - rank))
    return [_row(block, microbatches) for block in blocks]


def v_half(stages: int, microbatches: int, ranks: int) -> list[list[Action]]:
    """Return V-Half: forward on the way to the last rank, and the input part there, wait one slot per rank."""
    blocks = []
    late = 3 if ranks % 2 == 0 else 0
    for rank in range(ranks):
        times = 2 * rank, 3 * ranks - 2 - rank, 3 * ranks - 1 + late + 2 * rank, 6 * ranks - 2 + late - rank
        blocks.append(_block(times, rank, stages - 1 - rank))
    return [_row(block, microbatches) for block in blocks]


def _block(times: Sequence[int], first: int, second: int) -> _Block:
    return list(zip(times, "FFII", (first, second, second, first), strict=True))


def _row(block: _Block, microbatches: int) -> list[Action]:
    """Merge the blocks of all microbatches by time, with a weight part in each slot in which nothing else runs."""
    at = {t + _INTERVAL * m: Action(stage, kind, m) for m in range(microbatches) for t, kind, stage in block}
    assert len(at) == len(block) * microbatches, "two actions of a rank at one time"
    return list(_with_weight_parts(at))


def _with_weight_parts(at: dict[int, Action]) -> Iterator[Action]:
    waiting: list[Action] = []
    for time in range(max(at) + 1):
        if time in at:
            yield at[time]
            waiting += [at[time]._replace(kind="W")] * (at[time].kind == "I")
        elif waiting:
            yield waiting.pop(0)
    yield from waiting
