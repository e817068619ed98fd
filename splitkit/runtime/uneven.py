"""Stages with more replicas than their neighbours: which microbatch each runs, when, and with whom it then talks.

The replicas of a stage take microbatches in turn, as in PipeDream (Narayanan et al., SOSP 2019), each one whole::

    stage 0, replica 0   F0 F2 B0 F4 B2 ...         on two ranks: microbatch m is on replica m mod 2
    stage 0, replica 1   F1 F3 B1 F5 B3 ...
    stage 1              F0 B0 F1 B1 F2 B2 ...      on one rank: it hears from both in turn

Under 1F1B a replica of stage s, one of d, has at most w = ceil(v / d) microbatches in flight, where v counts d, and
2 e - 1 for each stage behind with e replicas. PipeDream counts e: then a replica that has just begun another microbatch
keeps those waiting who have no more to do, and a step with 1, 4 and 1 replicas takes twice as long.

Nobody waits for ever: take the least microbatch m whose backward is not done. Before it, a replica at s runs forward
of m + (w - 1) d at most. A stage before s, with w', d' and v', reaches that forward without a backward of m or later,
since w' d' >= v' > v > (w - 1) d. So these forwards are done, and then backward of m, from the last stage to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from splitkit import _torch
from splitkit.pipeline.order import Action, PipelineOrder
from splitkit.runtime.replicas import Replicas
from splitkit.runtime.stage import ChainStage, PartStage


def row_of(order: PipelineOrder, replicas: Replicas) -> tuple[Action, ...]:
    """What this rank does in a step, by the numbers of the microbatches in the step."""
    if not replicas.are_even:
        return turns(order, replicas)[replicas.rank]
    first = replicas.own * order.microbatches
    return tuple(a._replace(microbatch=a.microbatch + first) for a in order.ranks[replicas.place])


def turns(order: PipelineOrder, replicas: Replicas) -> tuple[tuple[Action, ...], ...]:
    """Rank -> what it does, by the numbers of the microbatches in the step.

    Args:
        order: 1F1B or GPipe, as if each stage had one replica.
        replicas: of the stages, each of which has at least one microbatch.
    """
    found = list[tuple[Action, ...]]()
    for stage, count in enumerate(replicas.counts):
        for own in range(count):
            numbers = range(own, order.microbatches, count)
            window = len(numbers) if order.name == "GPipe" else min(len(numbers), in_flight(replicas.counts, stage))
            found.append(tuple(_row(stage, numbers, window)))
    return tuple(found)


def in_flight(counts: Sequence[int], stage: int) -> int:
    """How many microbatches a replica of a stage has in flight at most, under 1F1B.

    Args:
        counts: stage -> how many replicas.
        stage: whose.
    """
    return 1 + -(-sum(2 * count - 1 for count in counts[stage + 1 :]) // counts[stage])


def _row(stage: int, numbers: Sequence[int], window: int) -> list[Action]:
    """Forward and backward of these, with at most so many in flight."""
    row = list[Action]()
    for i in range(len(numbers) + window - 1):
        if i < len(numbers):
            row.append(Action(stage, "F", numbers[i]))
        if i >= window - 1:
            row.append(Action(stage, "B", numbers[i - window + 1]))
    return row


def with_messages(replicas: Replicas, rows: Sequence[Sequence[Action]]) -> tuple[list[str], ...]:
    """Rank -> its actions with what it sends and receives, as torch writes them, by its own count of microbatches.

    As torch does, all ranks are gone through step by step; who computes a value sends it at once, and who gets it
    receives it there and then, so that two ranks meet in one order.

    Args:
        replicas: of the stages.
        rows: what `turns` gave, or the forward actions of it.
    """
    last = len(replicas.counts) - 1
    made: tuple[list[str], ...] = tuple([] for _ in rows)
    done, got = [0] * len(rows), [set[tuple[str, int]]() for _ in rows]
    while any(at < len(row) for at, row in zip(done, rows, strict=True)):
        before = list(done)
        for rank, row in enumerate(rows):
            if done[rank] == len(row):
                continue
            stage, kind, number = row[done[rank]]
            end, step = (last, 1) if kind == "F" else (0, -1)
            if stage != last - end and (kind, number) not in got[rank]:
                continue
            done[rank] += 1
            made[rank].append(f"{stage}{kind}{_local(replicas, stage, number)}")
            if stage != end:
                made[rank].append(f"{stage}SEND_{kind}{_local(replicas, stage, number)}")
                peer = replicas.rank_of(stage + step, number)
                made[peer].append(f"{stage + step}RECV_{kind}{_local(replicas, stage + step, number)}")
                got[peer].add((kind, number))
        assert done != before, "see the proof above"
    return made


def _local(replicas: Replicas, stage: int, number: int) -> int:
    """The number of a microbatch among those of its replica."""
    return number // replicas.counts[stage]


class TurnStage(PartStage):
    """Torch's stage of a replica: whom it talks to changes with the microbatch."""

    def __init__(self, module: ChainStage, number: int, replicas: Replicas, share: Sequence[int]) -> None:
        count = len(replicas.counts)
        super().__init__(module, number, sum(replicas.counts), replicas.line)  # torch asks for a stage a rank at least
        self.num_stages, self._replicas, self._share = count, replicas, share
        _torch.skip_warm_up(self)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch."""
        self._turn(fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch."""
        self._turn(fwd_chunk_id)
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch."""
        self._turn(bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See torch."""
        self._turn(bwd_chunk_id)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def _turn(self, chunk: int) -> None:
        """Turn to those who run a microbatch of this rank before and behind."""
        self.turn_to(self._share[chunk])

    def turn_to(self, microbatch: int) -> None:
        """Turn to those who run a microbatch of the step."""
        stages = range(self.num_stages)
        self.stage_index_to_group_rank = {s: self._replicas.rank_of(s, microbatch) for s in stages}


def turn_schedule(stage: TurnStage, order: PipelineOrder, replicas: Replicas, loss: Any) -> Any:
    """Torch's interpreter with what this rank does.

    Args:
        stage: of this rank.
        order: 1F1B or GPipe, as if each stage had one replica.
        replicas: of the stages.
        loss: as torch's ``loss_fn``; ``None`` for forward only.
    """
    rows = turns(order, replicas)
    if loss is None:
        rows = tuple(tuple(a for a in row if a.kind == "F") for row in rows)
    own = with_messages(replicas, rows)[replicas.rank]
    made = _torch.message_schedule(stage, len(replicas.share(order.microbatches)), loss, own)
    stage.turn_to(0)  # 2.15 lets these ranks meet before the first step, so that all must name the same ones
    return made
