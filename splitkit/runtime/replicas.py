"""The replicas of stages: which ranks run the same stages, and which microbatches each of them takes.

The replicas of a stage lie next to each other, so that a machine of several devices adds up gradients within itself::

                 replica 0    replica 1
    stage 0       rank 0       rank 1      the sum of both gradients of stage 0
    stage 1       rank 2       rank 3      the sum of both gradients of stage 1

Where all stages have as many, they are pipelines side by side; otherwise see `splitkit.runtime.uneven`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from splitkit import _torch
from splitkit.brief import brief
from splitkit.checks import is_whole, shown
from splitkit.errors import PipelineError, ScheduleError


@dataclass(frozen=True)
class Replicas:
    """Which ranks run the same stages, each with its share of the microbatches.

    Attributes:
        ranks: place in a pipeline -> replica -> rank in the group.
        place: of this rank.
        own: which of the replicas at its place this rank is.
        line: the ranks with which this one exchanges values: those of its pipeline, all where stages have different
            numbers of replicas.
        across: the ranks at this place; ``None`` where this is the only one.
        mesh: dimensions ``pp`` and ``dp``; ``None`` where there is one pipeline, or no number of whole ones.
    """

    ranks: tuple[tuple[int, ...], ...]
    place: int
    own: int
    line: dist.ProcessGroup | None
    across: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None

    __repr__ = brief

    @property
    def rank(self) -> int:
        """Of this process, in the group."""
        return self.ranks[self.place][self.own]

    @property
    def counts(self) -> tuple[int, ...]:
        """Place -> how many replicas there are."""
        return tuple(map(len, self.ranks))

    @property
    def are_even(self) -> bool:
        """Whether all places have as many, so that there are pipelines side by side."""
        return is_even(self.counts)

    @property
    def lines(self) -> int:
        """How many pipelines run side by side."""
        return self.counts[0] if self.are_even else 1

    def share(self, microbatches: int) -> range:
        """The microbatches of this rank, of all of a step."""
        count = self.counts[self.place]
        if not self.are_even:
            return range(self.own, microbatches, count)
        each = microbatches // count
        return range(self.own * each, (self.own + 1) * each)

    def rank_of(self, place: int, microbatch: int) -> int:
        """Who runs a microbatch of this rank at a place."""
        ranks = self.ranks[place]
        return ranks[self.own if self.are_even else microbatch % len(ranks)]

    def gathered(self, losses: torch.Tensor, microbatches: int) -> torch.Tensor:
        """The numbers that all replicas have, ``[microbatches]``, of those of each, ``[share]``."""
        if self.across is None:
            return losses
        every = losses.new_zeros(microbatches)
        every[list(self.share(microbatches))] = losses
        dist.all_reduce(every, group=self.across)
        return every


def is_even(counts: Sequence[int]) -> bool:
    """Whether all places have as many replicas."""
    return len(set(counts)) == 1


def require_ranks(counts: Sequence[int], ranks: int) -> None:
    """Refuse another number of processes than that of replicas, where stages have different numbers of them.

    Args:
        counts: stage -> how many replicas.
        ranks: how many processes.

    Raises:
        ScheduleError: SK330.
    """
    if not is_even(counts) and ranks != sum(counts):
        listed = ", ".join(map(str, counts))
        raise ScheduleError(
            "SK330", f"{shown(ranks)} ranks for stages with {listed} replicas", f"Start {sum(counts)} processes."
        )


def require_replicable(writes: Sequence[str], counts: Sequence[int], ranks: int, microbatches: int | None) -> None:
    """Refuse what cannot be shared out among replicas.

    Args:
        writes: the buffers that forward writes.
        counts: stage -> how many replicas.
        ranks: of all of them.
        microbatches: of all of them; ``None`` if that is not said.

    Raises:
        ScheduleError: SK330 for numbers that do not divide.
        PipelineError: SK801 for a buffer that forward writes: each replica would have another one.
    """
    most = max(counts)
    if most == 1:
        return
    require_ranks(counts, ranks)
    for what, number in (("ranks", ranks), ("microbatches", microbatches)) if is_even(counts) else ():
        if number is not None and (not is_whole(number, 1) or number % most):
            raise ScheduleError(
                "SK330", f"{shown(number)} {what} for {most} replicas of the pipeline", f"Use a multiple of {most}."
            )
    if microbatches is not None and not is_whole(microbatches, most):
        raise ScheduleError(
            "SK330", f"{shown(microbatches)} microbatches for {most} replicas of a stage", f"Use {most} or more."
        )
    if writes:
        raise PipelineError(
            "SK801",
            f"forward writes {min(writes)}, and each of {most} replicas would have another one",
            "Capture in eval mode (BatchNorm then writes nothing), or run one pipeline: --dp 1.",
            sorted(writes),
        )


def replicas(counts: Sequence[int], group: dist.ProcessGroup | None, device: torch.device) -> Replicas:
    """Share out the ranks of a group among the places of a pipeline; all ranks call it.

    Args:
        counts: place -> how many replicas; together they are all ranks.
        group: the ranks.
        device: of this rank.
    """
    ends = list(accumulate(counts))
    ranks = tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))
    own = dist.get_rank(group)
    place = next(i for i, end in enumerate(ends) if own < end)
    number = own - ranks[place][0]
    if max(counts) == 1:
        return Replicas(ranks, place, number, group)
    across = {row: subgroup(group, row) for row in ranks if len(row) > 1}
    if not is_even(counts):
        return Replicas(ranks, place, number, group, across.get(ranks[place]))
    lines = [subgroup(group, column) for column in zip(*ranks, strict=True)]
    whole = torch.tensor([[_global(group, rank) for rank in row] for row in ranks])
    line, row = lines[number], across[ranks[place]]
    mesh = DeviceMesh.from_group([line, row], device.type, mesh=whole, mesh_dim_names=("pp", "dp"))
    return Replicas(ranks, place, number, line, row, mesh)


def subgroup(group: dist.ProcessGroup | None, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Some ranks of a group, with its time limit; made by all ranks in one order, as torch asks."""
    made: dist.ProcessGroup = dist.new_group([_global(group, r) for r in ranks], timeout=_torch.timeout_of(group))
    return made


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
