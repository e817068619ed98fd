"""The stages of a rank under a schedule: one set for training, one for inference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splitkit.pipeline.order import PipelineOrder
from splitkit.runtime.actions import schedule_of
from splitkit.runtime.chain import Chain
from splitkit.runtime.ends import Ends, require_loss
from splitkit.runtime.replicas import Replicas
from splitkit.runtime.stage import Batch, ChainStage, PartStage
from splitkit.runtime.support import require_support
from splitkit.runtime.uneven import TurnStage, turn_schedule


class Runs:
    """The stages of a rank and their schedule.

    Attributes:
        batch: what they work on.
        outputs: whether every output reaches the last stage.
        stages: torch's stages.
    """

    def __init__(
        self,
        chain: Chain,
        ends: Ends,
        batch: Batch,
        order: PipelineOrder,
        stages: Sequence[int],
        device: torch.device,
        replicas: Replicas,
    ) -> None:
        require_loss(chain, ends)
        self.batch, self.outputs = batch, ends.own is None
        self.stages: tuple[PartStage, ...]
        modules = [ChainStage(chain, s, ends, batch, device) for s in stages]
        require_support(order, tuple(modules))
        handed = _handed if ends.loss is not None else None
        if replicas.are_even:
            group = replicas.line
            self.stages = tuple(PartStage(m, s, chain.stages, group) for m, s in zip(modules, stages, strict=True))
            self._schedule = schedule_of(order, self.stages, handed)
        else:
            own = TurnStage(modules[0], stages[0], replicas, batch.share)
            self.stages, self._schedule = (own,), turn_schedule(own, order, replicas, handed)
        self._last = any(m.last for m in modules)

    def step(self) -> None:
        """One step on what lies in the batch."""
        number = torch.tensor(self.batch.share)
        self._schedule.step(microbatch=number, target=number if self._last else None, return_outputs=False)


def _handed(loss: torch.Tensor, target: object) -> torch.Tensor:
    """The loss as the last stage gave it."""
    return loss
