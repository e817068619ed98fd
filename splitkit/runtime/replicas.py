"""Pipelines side by side: which ranks run one of them, and which run the same stages.

The replicas of a stage lie next to each other, so that a machine of several devices adds up gradients within itself::

                 replica 0    replica 1
    stage 0       rank 0       rank 1      the sum of both gradients of stage 0
    stage 1       rank 2       rank 3      the sum of both gradients of stage 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from splitkit import _torch
from splitkit.brief import brief
from splitkit.checks import is_whole, shown
from splitkit.errors import PipelineError, ScheduleError
from splitkit.plans.record import Plan


@dataclass(frozen=True)
class Replicas:
    """The pipelines that run side by side, each with its share of the microbatches.

    Attributes:
        ranks: place in a pipeline -> replica -> rank in the group.
        place: of this rank in its pipeline.
        own: which of the pipelines this rank is of.
        line: the ranks of this pipeline.
        across: the ranks at this place in all pipelines; ``None`` where there is one pipeline.
        mesh: dimensions ``pp`` and ``dp``; ``None`` where there is one pipeline.
    """

    ranks: tuple[tuple[int, ...], ...]
    place: int
    own: int
    line: dist.ProcessGroup | None
    across: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None

    __repr__ = brief

    @property
    def count(self) -> int:
        """How many pipelines there are."""
        return len(self.ranks[0])

    def share(self, microbatches: int) -> range:
        """The microbatches of this pipeline, of all of a step."""
        each = microbatches // self.count
        return range(self.own * each, (self.own + 1) * each)

    def gathered(self, losses: torch.Tensor) -> torch.Tensor:
        """The numbers that all replicas have, ``[microbatches]``, of those of each, ``[share, 1]``."""
        if self.across is None:
            return losses.flatten()
        every = [torch.empty_like(losses) for _ in range(self.count)]
        dist.all_gather(every, losses, group=self.across)
        return torch.cat(every).flatten()


def replicas_of(plan: Plan) -> int:
    """How many pipelines a plan asks for: the replicas of its parts.

    Raises:
        PipelineError: SK801 where some parts have more than others.
    """
    return same_replicas({key: part.replicas for key, part in plan.parts.items()})


def same_replicas(counts: Mapping[Any, int]) -> int:
    """The number of replicas that all parts have, see `replicas_of`."""
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{key}: {count}" for key, count in counts.items())
        raise PipelineError(
            "SK801",
            f"the parts have different numbers of replicas ({listed}), and torch's stages talk to one neighbour each",
            "Give all parts the same: plan with Stages(devices, replicas=(2,)), or splitkit train --dp 2.",
        )
    return next(iter(counts.values()), 1)


def require_replicable(writes: Sequence[str], count: int, ranks: int, microbatches: int | None) -> int | None:
    """Refuse what cannot be shared out among several pipelines.

    Args:
        writes: the buffers that forward writes.
        count: how many pipelines.
        ranks: of all of them.
        microbatches: of all of them; ``None`` if that is not said.

    Returns:
        How many microbatches each pipeline has.

    Raises:
        ScheduleError: SK330 for numbers that do not divide.
        PipelineError: SK801 for a buffer that forward writes: each pipeline would have another one.
    """
    if count == 1:
        return microbatches
    for what, number in (("ranks", ranks), ("microbatches", microbatches)):
        if number is not None and (not is_whole(number, 1) or number % count):
            raise ScheduleError(
                "SK330", f"{shown(number)} {what} for {count} replicas of the pipeline", f"Use a multiple of {count}."
            )
    if writes:
        raise PipelineError(
            "SK801",
            f"forward writes {min(writes)}, and each of {count} replicas would have another one",
            "Capture in eval mode (BatchNorm then writes nothing), or run one pipeline: --dp 1.",
            sorted(writes),
        )
    return None if microbatches is None else microbatches // count


def replicas(count: int, group: dist.ProcessGroup | None, device: torch.device) -> Replicas:
    """Share out the ranks of a group among so many pipelines; all ranks call it.

    Args:
        count: divides the number of ranks.
        group: the ranks.
        device: of this rank.
    """
    every = dist.get_world_size(group)
    ranks = tuple(tuple(range(first, first + count)) for first in range(0, every, count))
    place, own = divmod(dist.get_rank(group), count)
    if count == 1:
        return Replicas(ranks, place, own, group)
    across = [subgroup(group, row) for row in ranks]
    lines = [subgroup(group, column) for column in zip(*ranks, strict=True)]
    whole = torch.tensor([[_global(group, rank) for rank in row] for row in ranks])
    mesh = DeviceMesh.from_group(
        [lines[own], across[place]], device.type, mesh=whole, mesh_dim_names=("pp", "dp")
    )  # fmt: skip
    return Replicas(ranks, place, own, lines[own], across[place], mesh)


def subgroup(group: dist.ProcessGroup | None, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Some ranks of a group, with its time limit; made by all ranks in one order, as torch asks."""
    made: dist.ProcessGroup = dist.new_group([_global(group, r) for r in ranks], timeout=_torch.timeout_of(group))
    return made


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
