"""Holds torch's stages of a rank for the sizes of the last step, and makes new ones when a step has other sizes.

Torch's stages receive into tensors of fixed shapes, which up to torch 2.14 they hold from one step to the next. So only
the stages of the last step are kept; new ones take 3 to 15 ms. All ranks see the same batches, so they make new stages
in the same steps.
"""

from __future__ import annotations

from collections.abc import Callable

from splitkit.runtime.ranks.last_stage import LastStage
from splitkit.runtime.ranks.rank_stages import RankStages
from splitkit.runtime.ranks.stage import Batch
from splitkit.runtime.ranks.stage_chain import Chain
from splitkit.runtime.ranks.step_sizes import MessageShapes, StepSizes, message_shapes


class SizedStages:
    """The stages of a rank, for training or for inference.

    Attributes:
        last_stage: what the last stage does.
        batch: the batch that the stages work on.
        latest: the stages of the last step; ``None`` before the first one.
    """

    def __init__(
        self,
        chain: Chain,
        last_stage: LastStage,
        batch: Batch,
        make: Callable[[LastStage, Batch, MessageShapes], RankStages],
    ) -> None:
        self._chain, self._make = chain, make
        self.last_stage, self.batch = last_stage, batch
        self.latest: RankStages | None = None
        self._shapes: MessageShapes | None = None

    def of(self, step: StepSizes) -> RankStages:
        """Return the stages for a step. All ranks call it with the same sizes."""
        shapes = message_shapes(self._chain, self.last_stage.wanted, step)
        if self.latest is None or shapes != self._shapes:
            # The old stages are freed before new ones are made.
            self.latest = None
            self.latest, self._shapes = self._make(self.last_stage, self.batch, shapes), shapes
        return self.latest
