"""Assigns ranks to the replicas of stages: which ranks run the same stages, and which microbatches each of them takes.

The replicas of a stage have consecutive ranks, so that the all-reduce of their gradients tends to stay in one machine::

                 replica 0    replica 1
    stage 0       rank 0       rank 1      the sum of both gradients of stage 0
    stage 1       rank 2       rank 3      the sum of both gradients of stage 1

All stages have the same number of replicas, so that as many pipelines run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from splitkit import _torch
from splitkit.checks import is_whole, shown
from splitkit.errors import PipelineError, ScheduleError
from splitkit.pipeline.action import Action
from splitkit.pipeline.order import PipelineOrder
from splitkit.short_repr import brief


@dataclass(frozen=True)
class Replicas:
    """Which ranks run the same stages, each with its share of the microbatches.

    Attributes:
        ranks: place in a pipeline -> replica -> rank in the group.
        place: the place of this rank.
        own: the number of this rank among the replicas at its place.
        pipeline_group: the ranks of this pipeline, with which this one exchanges values.
        replica_group: the ranks at this place; ``None`` if this is the only one.
        mesh: a mesh with the dimensions ``pp`` and ``dp``; ``None`` if there is only one pipeline.
    """

    ranks: tuple[tuple[int, ...], ...]
    place: int
    own: int
    pipeline_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None

    __repr__ = brief

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self.ranks[self.place][self.own]

    @property
    def pipelines(self) -> int:
        """How many pipelines run side by side: the number of replicas at each place."""
        return len(self.ranks[0])

    def share(self, microbatches: int) -> range:
        """Return the microbatches of this rank, by their numbers in the step."""
        each = microbatches // self.pipelines
        return range(self.own * each, (self.own + 1) * each)

    def rank_at(self, place: int) -> int:
        """Return the rank at another place of this pipeline."""
        return self.ranks[place][self.own]

    def gathered(self, losses: torch.Tensor, microbatches: int) -> torch.Tensor:
        """Gather the losses of all replicas, ``[microbatches]`` in the order of the step, from ``[share]`` of each."""
        if self.replica_group is None:
            return losses
        every = losses.new_zeros(microbatches)
        every[list(self.share(microbatches))] = losses
        dist.all_reduce(every, group=self.replica_group)
        return every


def require_replicable(writes: Sequence[str], counts: Sequence[int], ranks: int, microbatches: int | None) -> None:
    """Refuse what cannot be shared out among replicas.

    Args:
        writes: the buffers that forward writes.
        counts: stage -> number of replicas.
        ranks: the number of all ranks.
        microbatches: of all replicas together; ``None`` if unknown.

    Raises:
        ScheduleError: SK330 for stages with different numbers of replicas, and for numbers that the replicas do not
            divide evenly.
        PipelineError: SK801 for a buffer that forward writes, whose copies in the replicas would diverge.
    """
    most = max(counts)
    if most == 1:
        return
    if min(counts) < most:
        raise ScheduleError(
            "SK330",
            f"stages with {', '.join(map(str, counts))} replicas, and all stages of a pipeline have the same number",
            "Plan with one number of replicas, such as Stages(4, replicas=(2,)), or give splitkit train --dp 2.",
        )
    for what, number in (("ranks", ranks), ("microbatches", microbatches)):
        if number is not None and (not is_whole(number, 1) or number % most):
            raise ScheduleError(
                "SK330", f"{shown(number)} {what} for {most} replicas of the pipeline", f"Use a multiple of {most}."
            )
    if writes:
        raise PipelineError(
            "SK801",
            f"forward writes {min(writes)}, and the copies of it in {most} replicas would diverge",
            "Capture in eval mode (BatchNorm then writes nothing), or run one pipeline: --dp 1.",
            sorted(writes),
        )


def replicas(pipelines: int, group: dist.ProcessGroup | None, device: torch.device) -> Replicas:
    """Assign the ranks of a group to the places of pipelines. All ranks must call it.

    Args:
        pipelines: how many run side by side; it divides the number of ranks.
        group: the ranks.
        device: the device of this rank.
    """
    starts = range(0, dist.get_world_size(group), pipelines)
    ranks = tuple(tuple(range(start, start + pipelines)) for start in starts)
    place, number = divmod(dist.get_rank(group), pipelines)
    if pipelines == 1:
        return Replicas(ranks, place, number, group)
    across = [subgroup(group, row) for row in ranks]
    lines = [subgroup(group, column) for column in zip(*ranks, strict=True)]
    whole = torch.tensor([[_global(group, rank) for rank in row] for row in ranks])
    line, row = lines[number], across[place]
    mesh = DeviceMesh.from_group([line, row], device.type, mesh=whole, mesh_dim_names=("pp", "dp"))
    return Replicas(ranks, place, number, line, row, mesh)


def subgroup(group: dist.ProcessGroup | None, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make a process group of some ranks of a group, with its timeout. All ranks must call it in the same order."""
    made: dist.ProcessGroup = dist.new_group([_global(group, r) for r in ranks], timeout=_torch.timeout_of(group))
    return made


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def row_of_rank(order: PipelineOrder, replicas: Replicas) -> tuple[Action, ...]:
    """Return the actions of this rank in a step, with the numbers that microbatches have in the step."""
    first = replicas.own * order.microbatches
    return tuple(a._replace(microbatch=a.microbatch + first) for a in order.ranks[replicas.place])
