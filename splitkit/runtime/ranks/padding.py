"""Sends tensors of different sizes as flat tensors of one size, in forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


class FilledUp(torch.autograd.Function):
    """Copies a tensor into the first elements of a flat one; the others are zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> torch.Tensor:
        """Return a new tensor of shape (count,)."""
        ctx.shape = x.shape
        return _flat(x, count)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the first elements."""
        return grad[: math.prod(ctx.shape)].view(ctx.shape), None


class Shaped(torch.autograd.Function):
    """Takes a tensor from the first elements of a flat one, whose memory it shares; to autograd it is not a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor."""
        ctx.count = x.numel()
        return x.detach()[: math.prod(shape)].view(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient as a flat tensor, contiguous, so that it can be sent."""
        return _flat(grad, ctx.count), None


def filled_up(x: torch.Tensor, count: int) -> Any:
    """Return a flat tensor of ``count`` elements, the first of which are those of ``x``."""
    return FilledUp.apply(x, count)  # type: ignore[no-untyped-call]


def shaped(x: torch.Tensor, shape: Sequence[int]) -> Any:
    """Return the first elements of a flat tensor in a shape."""
    return Shaped.apply(x, shape)  # type: ignore[no-untyped-call]


def _flat(x: torch.Tensor, count: int) -> torch.Tensor:
    made = x.new_zeros(count)
    made[: x.numel()] = x.reshape(-1)
    return made
