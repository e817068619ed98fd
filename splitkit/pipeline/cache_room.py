"""How many tokens of cache fit beside what the stages of a pipeline hold for inference."""

from __future__ import annotations

from collections.abc import Sequence

from splitkit.pipeline.byte_breakdown import ByteBreakdown
from splitkit.pipeline.stage_costs import StageCosts

UNLIMITED = 2**53
"""The tokens of a stage that keeps no cache."""


def cache_room(stages: Sequence[StageCosts], cache: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Return the tokens for which each stage has room beside its weights and activations.

    The pipeline has room for the least of them. A stage that does not fit at all has room for less than 0 tokens.

    Args:
        stages: their costs for inference (``optimizer=None``).
        cache: bytes of cache per token of each stage.
        limits: the memory of each stage in bytes.
    """
    found = []
    for stage, per_token, limit in zip(stages, cache, limits, strict=True):
        spare = limit - ByteBreakdown.of_stage(stage).total
        found.append(-1 if spare < 0 else spare // per_token if per_token else UNLIMITED)
    return found
