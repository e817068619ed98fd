"""Assigns ranks to the replicas of stages: which ranks run the same stages, and which microbatches each of them takes.

The replicas of a stage have consecutive ranks, so that the all-reduce of their gradients tends to stay in one machine::

                 replica 0    replica 1
    stage 0       rank 0       rank 1      the sum of both gradients of stage 0
    stage 1       rank 2       rank 3      the sum of both gradients of stage 1

If all stages have the same number of replicas, that many pipelines run side by side. Otherwise the replicas of a stage
take whole microbatches in turn, as in PipeDream (Narayanan et al., SOSP 2019)::

    stage 0, replica 0   F0 F2 B0 F4 B2 ...         on two ranks: microbatch m is on replica m mod 2
    stage 0, replica 1   F1 F3 B1 F5 B3 ...
    stage 1              F0 B0 F1 B1 F2 B2 ...      on one rank: it exchanges values with both in turn

The window of a stage limits how many microbatches a replica of it has in flight (`splitkit.pipeline.windowed`, with the
proof that no stages deadlock).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from splitkit import _torch
from splitkit.checks import is_whole, shown
from splitkit.errors import PipelineError, ScheduleError
from splitkit.pipeline.action import Action
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.schedules import schedule_of
from splitkit.pipeline.windowed import windowed_row
from splitkit.short_repr import brief


@dataclass(frozen=True)
class Replicas:
    """Which ranks run the same stages, each with its share of the microbatches.

    Attributes:
        ranks: place in a pipeline -> replica -> rank in the group.
        place: the place of this rank.
        own: the number of this rank among the replicas at its place.
        pipeline_group: the ranks with which this one exchanges values: the ranks of its pipeline, or all ranks if
            stages have different numbers of replicas.
        replica_group: the ranks at this place; ``None`` if this is the only one.
        mesh: a mesh with the dimensions ``pp`` and ``dp``; ``None`` if there is only one pipeline, or places have
            different numbers of replicas.
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
    def counts(self) -> tuple[int, ...]:
        """Place -> number of replicas."""
        return tuple(map(len, self.ranks))

    @property
    def are_even(self) -> bool:
        """Whether all places have the same number of replicas, so that pipelines run side by side."""
        return is_even(self.counts)

    @property
    def pipelines(self) -> int:
        """How many pipelines run side by side."""
        return self.counts[0] if self.are_even else 1

    def share(self, microbatches: int) -> range:
        """Return the microbatches of this rank, by their numbers in the step."""
        count = self.counts[self.place]
        if not self.are_even:
            return range(self.own, microbatches, count)
        each = microbatches // count
        return range(self.own * each, (self.own + 1) * each)

    def rank_of(self, place: int, microbatch: int) -> int:
        """Return the rank that runs a microbatch of this rank at another place."""
        ranks = self.ranks[place]
        return ranks[self.own if self.are_even else microbatch % len(ranks)]

    def gathered(self, losses: torch.Tensor, microbatches: int) -> torch.Tensor:
        """Gather the losses of all replicas, ``[microbatches]`` in the order of the step, from ``[share]`` of each."""
        if self.replica_group is None:
            return losses
        every = losses.new_zeros(microbatches)
        every[list(self.share(microbatches))] = losses
        dist.all_reduce(every, group=self.replica_group)
        return every


def is_even(counts: Sequence[int]) -> bool:
    """Whether all places have the same number of replicas."""
    return len(set(counts)) == 1


def require_ranks(counts: Sequence[int], ranks: int) -> None:
    """Refuse a number of processes other than the sum of replicas, if stages have different numbers of them.

    Args:
        counts: stage -> number of replicas.
        ranks: the number of processes.

    Raises:
        ScheduleError: SK330 if they differ.
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
        counts: stage -> number of replicas.
        ranks: the number of all ranks.
        microbatches: of all replicas together; ``None`` if unknown.

    Raises:
        ScheduleError: SK330 for numbers that the replicas do not divide evenly.
        PipelineError: SK801 for a buffer that forward writes, whose copies in the replicas would diverge.
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
            f"forward writes {min(writes)}, and the copies of it in {most} replicas would diverge",
            "Capture in eval mode (BatchNorm then writes nothing), or run one pipeline: --dp 1.",
            sorted(writes),
        )


def replicas(counts: Sequence[int], group: dist.ProcessGroup | None, device: torch.device) -> Replicas:
    """Assign the ranks of a group to the places of a pipeline. All ranks must call it.

    Args:
        counts: place -> number of replicas; their sum is the number of ranks.
        group: the ranks.
        device: the device of this rank.
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
    """Make a process group of some ranks of a group, with its timeout. All ranks must call it in the same order."""
    made: dist.ProcessGroup = dist.new_group([_global(group, r) for r in ranks], timeout=_torch.timeout_of(group))
    return made


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def row_of_rank(order: PipelineOrder, replicas: Replicas) -> tuple[Action, ...]:
    """Return the actions of this rank in a step, with the numbers that microbatches have in the step."""
    if not replicas.are_even:
        return replica_rows(order, replicas)[replicas.rank]
    first = replicas.own * order.microbatches
    return tuple(a._replace(microbatch=a.microbatch + first) for a in order.ranks[replicas.place])


def replica_rows(order: PipelineOrder, replicas: Replicas) -> tuple[tuple[Action, ...], ...]:
    """Return rank -> actions, with the numbers that microbatches have in the step.

    Args:
        order: the order of a schedule with windows, as if each stage had one replica.
        replicas: the replicas of the stages, each of which has at least one microbatch.

    Raises:
        ScheduleError: SK331 for windows under which stages could deadlock.
    """
    schedule = schedule_of(order)
    windows = None if schedule is None else schedule.windows(replicas.counts, order.microbatches)
    assert windows is not None, "placed_order refuses others"
    found = list[tuple[Action, ...]]()
    for stage, (count, window) in enumerate(zip(replicas.counts, windows, strict=True)):
        for own in range(count):
            found.append(tuple(windowed_row(stage, range(own, order.microbatches, count), window)))
    return tuple(found)


def with_messages(replicas: Replicas, rows: Sequence[Sequence[Action]]) -> tuple[list[str], ...]:
    """Return rank -> its actions with sends and receives in torch's notation; each rank numbers its own microbatches.

    As torch's ``_add_send_recv`` does, this goes through all ranks in rounds, one action each. A value is sent as soon
    as it is computed, and its receive is put into the receiver's row at that moment, so that any two ranks have their
    messages in the same order.

    Args:
        replicas: the replicas of the stages.
        rows: the result of `replica_rows`, or its forward actions.
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
        assert done != before, "see splitkit.pipeline.windowed.stalls"
    return made


def _local(replicas: Replicas, stage: int, number: int) -> int:
    """Return the number of a microbatch among the microbatches of its replica."""
    return number // replicas.counts[stage]
