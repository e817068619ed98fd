"""Keeps torch's stages of a rank for the sizes of the last steps, and makes new ones for other sizes.

Torch's stages receive into tensors of fixed shapes, so each set of shapes needs stages of its own. They are made when a
step first has these shapes. Up to torch 2.14 they hold a tensor for every value and gradient that they receive in a
step, so only `KEPT` sets are kept. All ranks see the same batches, so they make and forget the same sets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from splitkit.runtime.ranks.last_stage import LastStage
from splitkit.runtime.ranks.rank_stages import RankStages
from splitkit.runtime.ranks.stage import Batch
from splitkit.runtime.ranks.stage_chain import Chain
from splitkit.runtime.ranks.step_sizes import MessageShapes, StepSizes, message_shapes

KEPT = 2
"""How many sets of stages are kept, for training and for inference each: the usual sizes, and a smaller last batch."""


class StagesBySizes:
    """The stages of a rank, for training or for inference.

    Attributes:
        last_stage: what the last stage does.
        batch: the batch that the stages work on.
        latest: the stages of the latest step; ``None`` before the first one.
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
        self._kept: dict[Hashable, RankStages] = {}

    def of(self, step: StepSizes) -> RankStages:
        """Return the stages for a step. All ranks call it with the same sizes."""
        shapes = message_shapes(self._chain, self.last_stage.wanted, step)
        found = self._kept.pop(shapes.key, None)
        while found is None and len(self._kept) >= KEPT:
            self._kept.pop(next(iter(self._kept))).release()
        self.latest = self._kept[shapes.key] = found or self._make(self.last_stage, self.batch, shapes)
        return self.latest
