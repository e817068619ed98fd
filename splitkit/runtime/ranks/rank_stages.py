"""Makes torch's stages and schedule for a rank: one set for training, one for inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from splitkit import _torch
from splitkit.pipeline.order import PipelineOrder
from splitkit.runtime.ranks.last_stage import LastStage, require_loss
from splitkit.runtime.ranks.order_runner import torch_schedule
from splitkit.runtime.ranks.replicas import Replicas, replica_rows, with_messages
from splitkit.runtime.ranks.stage import Batch, ChainStage, PartStage
from splitkit.runtime.ranks.stage_chain import Chain
from splitkit.runtime.ranks.step_sizes import MessageShapes
from splitkit.runtime.ranks.torch_limits import require_support


class RankStages:
    """The stages of a rank and their schedule.

    Attributes:
        batch: the batch that the stages work on.
        outputs: whether every output reaches the last stage.
        stages: torch's stages.
    """

    def __init__(
        self,
        chain: Chain,
        last_stage: LastStage,
        batch: Batch,
        order: PipelineOrder,
        stages: Sequence[int],
        device: torch.device,
        replicas: Replicas,
        shapes: MessageShapes,
    ) -> None:
        require_loss(chain, last_stage)
        self.batch, self.outputs = batch, last_stage.own is None
        self.stages: tuple[PartStage, ...]
        modules = [ChainStage(chain, s, last_stage, batch, device, shapes) for s in stages]
        require_support(order, tuple(modules))
        handed = handed_loss if last_stage.loss is not None else None
        if replicas.are_even:
            group = replicas.pipeline_group
            self.stages = tuple(PartStage(m, s, chain.stages, group) for m, s in zip(modules, stages, strict=True))
            self._schedule = torch_schedule(order, self.stages, handed)
        else:
            own = ReplicaStage(modules[0], stages[0], replicas, batch.share)
            self.stages, self._schedule = (own,), replica_schedule(own, order, replicas, handed)
        self._last = any(m.last for m in modules)

    def step(self) -> None:
        """Run one step on the inputs in ``batch``."""
        number = torch.tensor(self.batch.share)
        self._schedule.step(microbatch=number, target=number if self._last else None, return_outputs=False)


def handed_loss(loss: torch.Tensor, target: object) -> torch.Tensor:
    """Return the loss, which the last stage has computed already, as torch's ``loss_fn``."""
    return loss


class ReplicaStage(PartStage):
    """Torch's stage of a replica, whose peers change with the microbatch."""

    def __init__(self, module: ChainStage, number: int, replicas: Replicas, share: Sequence[int]) -> None:
        count = len(replicas.counts)
        # Torch refuses fewer stages than ranks, so it is first told that each replica is a stage.
        super().__init__(module, number, sum(replicas.counts), replicas.pipeline_group)
        self.num_stages, self._replicas, self._share = count, replicas, share
        _torch.skip_warm_up(self)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's operations that receive activations, with the peers of this microbatch."""
        self._set_peers_for(fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's operations that send activations, with the peers of this microbatch."""
        self._set_peers_for(fwd_chunk_id)
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's operations that receive gradients, with the peers of this microbatch."""
        self._set_peers_for(bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's operations that send gradients, with the peers of this microbatch."""
        self._set_peers_for(bwd_chunk_id)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def _set_peers_for(self, chunk: int) -> None:
        """Set the peers for a microbatch of this rank, by its number on this rank."""
        self.set_peers(self._share[chunk])

    def set_peers(self, microbatch: int) -> None:
        """Set the peers to the ranks that run a microbatch of the step in the other stages."""
        stages = range(self.num_stages)
        self.stage_index_to_group_rank = {s: self._replicas.rank_of(s, microbatch) for s in stages}


def replica_schedule(stage: ReplicaStage, order: PipelineOrder, replicas: Replicas, loss: Any) -> Any:
    """Return torch's action interpreter with the actions of this rank.

    Args:
        stage: the stage of this rank.
        order: the order of a schedule with windows, as if each stage had one replica.
        replicas: the replicas of the stages.
        loss: torch's ``loss_fn``; ``None`` for forward only.
    """
    rows = replica_rows(order, replicas)
    if loss is None:
        rows = tuple(tuple(a for a in row if a.kind == "F") for row in rows)
    own = with_messages(replicas, rows)[replicas.rank]
    made = _torch.message_schedule(stage, len(replicas.share(order.microbatches)), loss, own)
    stage.set_peers(0)  # torch 2.15 connects the peers before the first step, so all ranks must name the same ones
    return made
