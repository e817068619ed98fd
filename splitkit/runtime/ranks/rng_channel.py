"""Sends RNG states between ranks on accelerators through the memory of the hosts.

The state of an accelerator's generator is on the host. Sent with the values of a border, it would be copied to the
device and back, and each stage that draws random numbers would wait for its device::

    host     begin F0 ◀──state── wait for the state, not for the device; queue the kernels of F0; begin F1 ...
    device                                                       ...kernels of F0...

The host of a stage waits only until the host of the stage before has queued its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from splitkit import _torch
from splitkit.runtime.ranks.replicas import Replicas
from splitkit.runtime.ranks.stage_chain import Chain


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
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self._group: Any = dist.new_group(ranks, _torch.timeout_of(group), "gloo") if self._next else None
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


def rng_channel(
    chain: Chain, rank_of: Sequence[int], replicas: Replicas, group: dist.ProcessGroup | None, device: torch.device
) -> RngChannel | None:
    """Return the channel of a pipeline's ranks; ``None`` on the CPU, which waits for nothing. All ranks must call it.

    Args:
        chain: the stages.
        rank_of: stage -> its place in a pipeline.
        replicas: which ranks are at each place.
        group: the ranks.
        device: the device of this rank.
    """
    if device.type == "cpu":
        return None
    return RngChannel(chain.facts.draws, [*map(replicas.rank_at, rank_of)], replicas.rank, group)
