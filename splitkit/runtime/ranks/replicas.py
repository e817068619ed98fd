"""Assigns ranks to the replicas of stages: which ranks run the same stages, and which microbatches each of them takes.

The replicas of a stage have consecutive ranks, so that the all-reduce of their gradients tends to stay in one machine::

                 replica 0    replica 1
    stage 0       rank 0       rank 1      the sum of both gradients of stage 0
    stage 1       rank 2       rank 3      the sum of both gradients of stage 1

All stages have the same number of replicas, so that as many pipelines run side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from splitkit import _torch
from splitkit.checks import is_whole, shown
from splitkit.errors import PipelineError, ScheduleError
from splitkit.graph.shards import is_sharded_over, local_tensor, sharded_as
from splitkit.pipeline.order import Action, PipelineOrder
from splitkit.runtime.devices.accelerators import DeviceRng
from splitkit.runtime.ranks.rank_agreement import from_every
from splitkit.runtime.ranks.stage_chain import Chain
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
    of_group = dist.get_process_group_ranks(group)
    whole = torch.tensor([[of_group[rank] for rank in row] for row in ranks])
    line, row = lines[number], across[place]
    mesh = DeviceMesh.from_group([line, row], device.type, mesh=whole, mesh_dim_names=("pp", "dp"))
    return Replicas(ranks, place, number, line, row, mesh)


def subgroup(group: dist.ProcessGroup | None, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group of some ranks of a group, with its timeout. All its ranks must call it in the same order."""
    of_group = dist.get_process_group_ranks(group)
    # the ranks outside of the group may be in another pipeline meanwhile
    made: dist.ProcessGroup = dist.new_group(
        [of_group[rank] for rank in ranks],
        _torch.timeout_of(group),
        backend,
        use_local_synchronization=group is not None,
    )
    return made


def with_ranks_across(group: dist.ProcessGroup | None, across: Iterable[dist.ProcessGroup]) -> Any:
    """Return a group of the ranks of a group, and of those that share its stages along dimensions of a mesh.

    All of them must call it.

    Args:
        group: the ranks of one pipeline; ``None`` for all.
        across: the groups of this rank along each dimension.
    """
    ranks = set(dist.get_process_group_ranks(group))
    for beside in (along := list(across)):
        ranks = set().union(*from_every(ranks, beside))
    if not along:
        return group
    return dist.group.WORLD if len(ranks) == dist.get_world_size() else subgroup(dist.group.WORLD, sorted(ranks))


def row_of_rank(order: PipelineOrder, replicas: Replicas) -> tuple[Action, ...]:
    """Return the actions of this rank in a step, with the numbers that microbatches have in the step."""
    first = replicas.own * order.microbatches
    return tuple(a._replace(microbatch=a.microbatch + first) for a in order.ranks[replicas.place])


# Sums the gradients of parameters of which several ranks have a copy.
#
# Stages on several ranks may read the same parameter, and each replica has all parameters of its stages.


BUCKET = 25 * 2**20
"""Bytes of gradients in one all-reduce of replicas: the default of torch's DDP (25 MiB), not tuned here."""


def owners_of_shared(chain: Chain) -> list[dict[str, int]]:
    """Return for each parameter that several stages read: its name in the split -> the stage that reads it by it."""
    split = chain.split
    stage_of = {split.names[key]: stage for stage, key in enumerate(chain.keys)}
    groups = [[(name, name.split(".")[0]) for name in names] for names in split.shared]
    return [{name: stage_of[child] for name, child in group if child in stage_of} for group in groups]


class SharedParameters:
    """The parameters that this rank shares with other ranks.

    Stages of one rank share the parameter object, so that autograd sums their gradients.

    Attributes:
        tied: the parameters of this rank that several stages have, on this rank or on others. They cannot be sharded
            with a stage.
    """

    def __init__(
        self,
        chain: Chain,
        rank_of: Sequence[int],
        replicas: Replicas,
        group: dist.ProcessGroup | None,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        split = chain.split
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        elsewhere, here = set[int](), list[nn.Parameter]()
        for owners in owners_of_shared(chain):
            places = tuple(sorted({rank_of[stage] for stage in owners.values()}))
            if len(places) < 2:
                if replicas.place in places and len(set(owners.values())) > 1:
                    here.append(split.module.get_parameter(next(iter(owners))))
                continue
            if places not in groups:
                groups[places] = subgroup(group, [rank for place in places for rank in replicas.ranks[place]])
            if replicas.place in places:
                name = next(name for name, stage in owners.items() if rank_of[stage] == replicas.place)
                self._shared.append((split.module.get_parameter(name), groups[places]))
                if replicas.place != places[0]:
                    elsewhere.add(id(self._shared[-1][0]))
        shared = {id(parameter) for parameter, _ in self._shared}
        self.tied = (*(parameter for parameter, _ in self._shared), *here)
        self._counted_elsewhere, self._is_first = frozenset(elsewhere), replicas.own == 0
        self._across = replicas.replica_group
        self._replicated = [p for p in parameters if id(p) not in shared] if self._across is not None else []

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether a sum over all parameters of the model takes this one from this rank: one copy, or every shard."""
        if self._across is not None and is_sharded_over(parameter, dist.get_process_group_ranks(self._across)):
            return True
        return self._is_first and id(parameter) not in self._counted_elsewhere

    @contextmanager
    def added_up(self) -> Iterator[None]:
        """Wrap a step: what it adds to the gradient of one copy is added to the gradients of all copies."""
        with gradients_aside([*(parameter for parameter, _ in self._shared), *self._replicated]):
            yield
            for parameter, group in self._shared:
                if parameter.requires_grad:
                    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    # Gloo sums memory element by element, and strides may differ between ranks.
                    total = local_tensor(found).contiguous()
                    dist.all_reduce(total, group=group)
                    parameter.grad = sharded_as(total, parameter)
            _add_up([p for p in self._replicated if p.grad is not None], self._across)


@contextmanager
def gradients_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters have no gradients when the block begins; add the earlier ones to what it makes."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in before.items():
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def _add_up(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """All-reduce gradients over a group whose ranks have the same parameters in the same order."""
    for bucket in _buckets(parameters):
        pieces = [local_tensor(p.grad) for p in bucket if p.grad is not None]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        dist.all_reduce(flat, group=group)
        totals = torch.split(flat, [piece.numel() for piece in pieces])
        for parameter, piece, total in zip(bucket, pieces, totals, strict=True):
            # the old gradient may be expanded, or alias another
            parameter.grad = sharded_as(total.view(piece.shape), parameter)


def _buckets(tensors: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield runs of consecutive tensors of one dtype with at most `BUCKET` bytes, or a single larger tensor."""
    bucket: list[nn.Parameter] = []
    held = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or held + tensor.nbytes > BUCKET):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    if bucket:
        yield bucket


# Hands the RNG state from stage to stage, so that random numbers do not depend on the number of stages.
#
# Each microbatch begins with a seed of its own. If several stages draw random numbers, the RNG state travels with the
# microbatch from the first of them to the last::
#
#     seed ─▶ stage 0 (dropout) ──state──▶ stage 1 ──state──▶ stage 2 (dropout)
#
# so that a microbatch sees the numbers that the unsplit model draws after ``torch.manual_seed(seed)``. On accelerators
# a pipeline hands it over between the hosts.


class RngHandover:
    """The RNG hand-over of one stage.

    Attributes:
        draws: whether the stage draws random numbers.
        receives: whether the RNG state comes from the previous stage, among the values that cross the border.
        sends: whether the RNG state goes to the next stage, among the values that cross the border.
        like: a tensor on ``meta`` like an RNG state.
    """

    def __init__(self, chain: Chain, stage: int, device: torch.device, channel: RngChannel | None) -> None:
        """Make the hand-over.

        Args:
            chain: all stages.
            stage: the stage.
            device: its device.
            channel: hands the state over between hosts; ``None`` to send it with the values of the border.
        """
        who = [s for s, draws in enumerate(chain.facts.draws) if draws] or [0]
        self.draws, self._device, self._stage, self._channel = chain.facts.draws[stage], device, stage, channel
        self.receives = channel is None and who[0] < stage <= who[-1]
        self.sends = channel is None and who[0] <= stage < who[-1]
        self._rng = DeviceRng(device)
        self._before: torch.Tensor | None = None
        self._passed: torch.Tensor | None = None
        self.like = torch.empty_like(self._rng.state(), device="meta")

    def begin(self, received: Sequence[torch.Tensor], seed: int, microbatch: int) -> Sequence[torch.Tensor]:
        """Set the RNG state for a microbatch, and return the received values without the state.

        Args:
            received: the values that crossed the border.
            seed: the seed of the microbatch.
            microbatch: its number in the step.
        """
        state, rest = (received[0], received[1:]) if self.receives else (None, received)
        if self._channel is not None and self._channel.receives(self._stage):
            state = self._channel.receive(self._stage, microbatch, self.like)
        self._passed = state
        if self.draws:
            self._before = self._rng.state()
            if state is None:
                self._rng.seed(seed)
            else:
                self._rng.set_state(state)
        return rest

    def end(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        """Restore the caller's RNG state, and return the state to send to the next stage with other values, if any."""
        if self._before is not None:
            self._passed = self._rng.state()
            self._rng.set_state(self._before)
            self._before = None
            if self._channel is not None:
                self._channel.send(self._stage, microbatch, self._passed)
        passed, self._passed = self._passed, None
        return (passed.to(self._device),) if self.sends and passed is not None else ()


# Sends RNG states between ranks on accelerators through the memory of the hosts.
#
# The state of an accelerator's generator is on the host. Sent with the values of a border, it would be copied to the
# device and back, and each stage that draws random numbers would wait for its device::
#
#     host     begin F0 ◀──state── wait for the state, not for the device; queue the kernels of F0; begin F1 ...
#     device                                                       ...kernels of F0...
#
# The host of a stage waits only until the host of the stage before has queued its kernels.


class RngChannel:
    """The RNG states that the stages of this rank exchange in a step.

    A state goes from each stage that draws random numbers to the next one that does.
    """

    def __init__(
        self, draws: Sequence[bool], rank_of: Sequence[int], rank: int, group: dist.ProcessGroup | None
    ) -> None:
        """Make the channel; all ranks of the group must.

        Args:
            draws: stage -> whether it draws random numbers.
            rank_of: stage -> the rank in the group that runs it for this one.
            rank: this rank.
            group: the ranks.
        """
        drawing = [stage for stage, does in enumerate(draws) if does]
        self._next = dict(pairwise(drawing))
        self._before = {after: stage for stage, after in self._next.items()}
        self._stages, self._rank_of, self._rank = len(draws), rank_of, rank
        every = range(dist.get_world_size(group))
        self._group: Any = subgroup(group, every, "gloo") if self._next else None
        self._kept: dict[tuple[int, int], torch.Tensor] = {}
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def receives(self, stage: int) -> bool:
        """Whether a stage gets its RNG state from an earlier one."""
        return stage in self._before

    def send(self, stage: int, microbatch: int, state: torch.Tensor) -> None:
        """Hand the state after a stage to the next stage that draws, if there is one.

        Args:
            stage: the stage that has drawn.
            microbatch: its number in the step.
            state: the state, on the CPU.
        """
        to = self._next.get(stage)
        if to is None:
            return
        rank = self._rank_of[to]
        if rank == self._rank:
            self._kept[to, microbatch] = state
        else:
            work: Any = dist.isend(state, group=self._group, group_dst=rank, tag=self._tag(to, microbatch))
            self._sent.append((work, state))

    def receive(self, stage: int, microbatch: int, like: torch.Tensor) -> torch.Tensor:
        """Return the state with which a stage begins a microbatch; wait for it.

        Args:
            stage: a stage of which `receives` is true.
            microbatch: its number in the step.
            like: a tensor of the shape and dtype of a state.
        """
        rank = self._rank_of[self._before[stage]]
        if rank == self._rank:
            return self._kept.pop((stage, microbatch))
        state = torch.empty_like(like, device="cpu")
        dist.recv(state, group=self._group, group_src=rank, tag=self._tag(stage, microbatch))
        return state

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wrap a step: in the end, wait until what was sent in it has been received."""
        # what a step that failed has left
        self._kept.clear()
        self._sent.clear()
        yield
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _tag(self, stage: int, microbatch: int) -> int:
        """Return the tag of a message; two ranks with several stages may send in another order than they receive."""
        return 1 + microbatch * self._stages + stage
