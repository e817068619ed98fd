"""Ops that make the ambient state visible, and a region of our own: what the fuzzer and the zoo look through."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from splitkit import _torch
from splitkit.graph.ambient import SETTINGS, register_region
from splitkit.graph.ops import declare

_level = 0


def enter_level(level: int) -> int:
    """Open a region in which `observe` adds ``level``; yields what was before."""
    global _level
    before, _level = _level, level
    return before


def exit_level(before: int) -> None:
    """Close it."""
    global _level
    _level = before


def observe(x: Tensor) -> Tensor:
    """``x`` and a number that tells the ambient state in which this runs."""
    inside = [torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
    digits = [*inside, *(setting.get() not in (False, None, (False, False)) for setting in SETTINGS.values())]
    digits.append(torch.get_default_dtype() is torch.float64)
    return x + (_level + sum(2.0 ** -(1 + place) for place, digit in enumerate(digits) if digit))


def close_all() -> None:
    """Leave every region that a graph which raised has left open."""
    exit_level(0)
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_enabled("cpu", False)
    while _torch.TOP_HOOKS(True) is not None:
        _torch.POP_HOOKS()


class Divided(nn.Module):
    """What saved-tensors hooks do to a tensor so that its gradients show it."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        """A fraction of ``x``, if it is a number that has fractions."""
        return x / self.by if x.is_floating_point() else x


class Hidden(nn.Module):
    """A leaf that splitkit does not know, which reaches a buffer through a list: reads, writes or lends it."""

    def __init__(self, held: list[Tensor], does: str) -> None:
        super().__init__()
        self.held, self.does = held, does

    def forward(self, x: Tensor) -> Tensor:
        """Shape (n, n) -> the same."""
        (held,) = self.held
        if self.does == "lend":
            return held
        if self.does == "write":
            held.add_(x.detach().mean())
            return x * 1
        return x + held


register_region("level", enter_level, exit_level)
declare(observe)
