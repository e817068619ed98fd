"""Ops and a registered region that make the ambient state visible in values, for the fuzzer and the zoo."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from splitkit import _torch
from splitkit.graph.ambient import SETTINGS, register_region
from splitkit.graph.ops import declare

_level = 0


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


def close_all() -> None:
    """Leave every region that a failed graph has left open."""
    exit_level(0)
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_enabled("cpu", False)
    while _torch.TOP_HOOKS(True) is not None:
        _torch.POP_HOOKS()
    while _torch.functorch_depth():
        _torch.CLOSE_VMAP[0]()


class Divided(nn.Module):
    """A saved-tensor hook that divides a tensor, so that gradients show it."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x / by`` for floating-point tensors, and ``x`` for others."""
        return x / self.by if x.is_floating_point() else x


class Hidden(nn.Module):
    """A leaf module unknown to splitkit that reads, writes or returns a buffer, which it reaches through a list."""

    def __init__(self, held: list[Tensor], does: str) -> None:
        super().__init__()
        self.held, self.does = held, does

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (n, n) to the same shape."""
        (held,) = self.held
        if self.does == "lend":
            return held
        if self.does == "write":
            held.add_(x.detach().mean())
            return x * 1
        return x + held


register_region("level", enter_level, exit_level)
declare(observe)
