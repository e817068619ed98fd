"""Makes torch's stages and schedule for a rank: one set for training, one for inference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splitkit.pipeline.order import PipelineOrder
from splitkit.runtime.ranks.last_stage import LastStage, require_loss
from splitkit.runtime.ranks.order_runner import torch_schedule
from splitkit.runtime.ranks.replicas import Replicas
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
        modules = [ChainStage(chain, s, last_stage, batch, device, shapes) for s in stages]
        require_support(order, tuple(modules))
        handed = handed_loss if last_stage.loss is not None else None
        group = replicas.pipeline_group
        self.stages = tuple(PartStage(m, s, chain.stages, group) for m, s in zip(modules, stages, strict=True))
        self._schedule = torch_schedule(order, self.stages, handed)
        self._last = any(m.last for m in modules)

    def step(self) -> None:
        """Run one step on the inputs in ``batch``."""
        number = torch.tensor(self.batch.share)
        self._schedule.step(microbatch=number, target=number if self._last else None, return_outputs=False)


def handed_loss(loss: torch.Tensor, target: object) -> torch.Tensor:
    """Return the loss, which the last stage has computed already, as torch's ``loss_fn``."""
    return loss
