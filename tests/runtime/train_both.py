"""Trains a pipeline and the unsplit model side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from besidewhole import TOLERANCE, require_same
from torch import fx, nn

from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.testing.pipeline_check import Deviation, UnsplitModel

DRIFT = 100
"""How many times more weights that were rounded differently may differ in the steps after the first."""


def train_both(
    pipe: Pipeline,
    batches: Iterable[Mapping[str, Any]],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    tolerance: float = TOLERANCE,
    whole: fx.GraphModule | None = None,
) -> list[Deviation]:
    """Train a pipeline and the unsplit model with the same optimizer on the same batches.

    Args:
        pipe: the pipeline.
        batches: keyword inputs of each step, and a ``target`` where there is one.
        optimizer: makes that of some parameters.
        tolerance: relative.
        whole: as of `UnsplitModel`.

    Returns:
        How far they were apart after each step on this rank.

    Raises:
        AssertionError: where they differ by more than ``tolerance``, after the first step by `DRIFT` times as much.
    """
    unsplit = UnsplitModel(pipe, whole)
    mine, theirs = optimizer(pipe.parameters()), optimizer(list(unsplit.model.parameters()))
    seen: list[Deviation] = []
    for batch in batches:
        found, losses = pipe.step(**batch), unsplit.step(**batch)
        require_same(unsplit, found, losses, tolerance * (DRIFT if seen else 1))
        for each in (mine, theirs):
            each.step()
        seen.append(require_same(unsplit, found, losses, tolerance * DRIFT))
        for each in (mine, theirs):
            each.zero_grad()
    return seen
