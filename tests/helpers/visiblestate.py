"""Ops and a registered region that make the ambient state visible in values, for graphs of tests and for fuzzers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from splitkit.graph.ambient import SETTINGS, register_region
from splitkit.graph.ops import declare

_level = 0  # what `observe` adds: changed by `enter_level` and `exit_level` alone


def enter_level(level: int) -> int:
    """Open a region in which `observe` adds ``level``; return the level before."""
    global _level
    before, _level = _level, level
    return before


def exit_level(before: int) -> None:
    """Close a region: set the level to what it was before."""
    global _level
    _level = before


def observe(x: Tensor) -> Tensor:
    """Return ``x`` plus a number that encodes the current ambient state, one binary digit per setting."""
    inside = [torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
    digits = [*inside, *(setting.get() not in (False, None, (False, False)) for setting in SETTINGS.values())]
    digits.append(torch.get_default_dtype() is torch.float64)
    return x + (_level + sum(2.0 ** -(1 + place) for place, digit in enumerate(digits) if digit))


class Divided(nn.Module):
    """A saved-tensor hook that divides a tensor, so that gradients show it."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x / by`` for floating-point tensors, and ``x`` for others."""
        return x / self.by if x.is_floating_point() else x


register_region("level", enter_level, exit_level)
declare(observe)
