"""Require that a pipeline is the same as the unsplit model."""

from __future__ import annotations

import torch

from splitkit.runtime.ranks.step_losses import PipelineStep
from splitkit.testing.pipeline_check import Deviation, UnsplitModel

TOLERANCE = 1e-6
"""Largest deviation that counts as rounding in a first step, relative to the largest entry of a tensor."""


def require_same(
    whole: UnsplitModel, found: PipelineStep, losses: torch.Tensor, tolerance: float = TOLERANCE
) -> Deviation:
    """Return how far a step is from the unsplit model's; fail if any deviation is larger than ``tolerance``."""
    seen = whole.deviation(found, losses)
    assert max(seen.loss, seen.gradient, seen.weight) <= tolerance, seen  # fails for nan as well
    return seen
