"""Packs the values that cross a border between stages into tensors that torch's stages can send, and unpacks them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from splitkit import _torch
from splitkit.errors import PipelineError
from splitkit.graph.size_expressions import Expression, evaluated
from splitkit.graph.symbols import is_symbolic, value_of
from splitkit.pipeline.inseparable_nodes import SCALARS, unsendable
from splitkit.runtime.ranks.graph_sizes import Sizes, shape_of
from splitkit.runtime.ranks.padding import filled_up, shaped


@dataclass(frozen=True)
class BorderValue:
    """A value that crosses a border between stages.

    Attributes:
        name: the name of the node that computes it.
        like: a tensor on ``meta`` of the same shape, dtype and ``requires_grad``; zero-dimensional for a number.
        scalar: the Python type of a number; ``None`` for a tensor.
        written: whether a stage may write its memory.
        unsendable: the kind of a value that cannot be sent; empty if it can.
        order: the dimensions from the largest stride to the smallest, if that is not the usual order. It must survive
            the transfer: a ``view`` after a ``transpose`` may work with these strides only.
        shape: the shape of ``like`` where it has symbolic sizes; empty if no size is symbolic.
        padded: the number of elements that are sent, if the value is sent as a flat tensor that may be longer.
    """

    name: str
    like: torch.Tensor
    scalar: type | None = None
    written: bool = False
    unsendable: str = ""
    order: tuple[int, ...] = ()
    shape: tuple[Expression, ...] = ()
    padded: int | None = None

    def at(self, sizes: Sizes) -> BorderValue:
        """Return the value in a microbatch whose inputs have these sizes."""
        wanted = [evaluated(size, sizes) for size in self.shape]
        if not self.shape or wanted == list(self.like.shape):
            return self
        like = torch.empty(wanted, dtype=self.like.dtype, device="meta", requires_grad=self.like.requires_grad)
        return replace(self, like=like)

    def padded_to(self, count: int) -> BorderValue:
        """Return the value, to be sent as a flat tensor of ``count`` elements that it may not fill."""
        return replace(self, padded=count)

    def sent(self, train: bool) -> BorderValue:
        """Return the value as it is sent: in training with a gradient that comes back, otherwise without.

        Raises:
            PipelineError: SK801 for a value that is neither a tensor nor a number.
        """
        if self.unsendable:
            raise PipelineError(
                "SK801",
                f"{self.name} is a {self.unsendable}, which cannot be sent to another process",
                "Put the ops that make it and read it into one stage.",
                [self.name],
            )
        return self if train or not self.like.requires_grad else replace(self, like=self.like.detach())

    @property
    def meta_tensor(self) -> torch.Tensor:
        """The tensor on ``meta`` that torch's stage is told to expect: ``like`` with its dimensions in memory order."""
        if self.padded is not None:
            grad = self.like.requires_grad
            return torch.empty(self.padded, dtype=self.like.dtype, device="meta", requires_grad=grad)
        if not self.order:
            return self.like
        return self.like.detach().permute(self.order).contiguous().requires_grad_(self.like.requires_grad)

    def packed(self, value: Any, device: torch.device, where: str) -> Any:
        """Return the tensor to send: contiguous, and with an autograd node of its own.

        Raises:
            PipelineError: SK803 if the value does not have the planned dtype, shape or ``requires_grad``.
        """
        if self.scalar is not None:
            return torch.tensor(value, dtype=self.like.dtype, device=device)
        if self.written and self.like.requires_grad and isinstance(value, torch.Tensor) and not value.requires_grad:
            # A later stage fills this buffer, so it gets a gradient there; what comes back is not used.
            value = value.detach().requires_grad_()
        self._require(value, where)
        value = value.permute(self.order) if self.order else value
        if not self.like.requires_grad:
            value = value.detach()
        if self.padded is not None:
            return filled_up(value, self.padded)
        return non_view(value.contiguous()) if self.like.requires_grad else value.contiguous()

    def unpacked(self, value: torch.Tensor) -> Any:
        """Return the value as the receiving stage reads it."""
        if self.scalar is not None:
            return self.scalar(value.item())
        if self.padded is not None:
            value = shaped(value, [self.like.shape[i] for i in self.order or range(self.like.dim())])
        elif value.requires_grad:
            # This makes the gradient contiguous, so that it can be sent.
            value = non_view(value)
        if self.order:
            value = value.permute([self.order.index(i) for i in range(len(self.order))])
        return value.clone() if self.written else value  # torch owns the received leaf

    def _require(self, value: Any, where: str) -> None:
        like, tensor = self.like, isinstance(value, torch.Tensor)
        if (
            tensor
            and (value.shape, value.dtype) == (like.shape, like.dtype)
            and value.requires_grad >= like.requires_grad
        ):
            return
        found = _look(value)
        wants = _look(self.like)
        grad = isinstance(value, torch.Tensor) and value.requires_grad
        if found != wants or (self.like.requires_grad and not grad):
            lacks = f"{found}{', without gradient' if found == wants else ''}"
            asks = f"{wants}{', with a gradient' if found == wants else ''}"
            raise PipelineError(
                "SK803",
                f"{self.name} is {lacks} {where}; the next stage expects {asks}",
                "Capture with inputs that have the shape of one microbatch, in the mode and the autocast of training.",
                [self.name],
            )


class NonView(torch.autograd.Function):
    """The identity, whose result shares memory with its argument but is not a view to autograd.

    Torch's schedules call ``detach_()`` on what a stage returns, which autograd refuses for views. The gradient is made
    contiguous, since only contiguous tensors can be sent.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor, detached."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient, made contiguous."""
        return grad.contiguous()


def non_view(x: torch.Tensor) -> Any:
    """Return the same memory as a tensor that is not a view: see `NonView`."""
    return NonView.apply(x)  # type: ignore[no-untyped-call]


def border_value(node: Node, needed: Set[Node], written: Set[Node]) -> BorderValue:
    """Describe how the value of a node crosses a border.

    Args:
        node: a node of the graph that was split.
        needed: nodes that may carry a gradient.
        written: nodes whose memory is written.
    """
    value = value_of(node)
    if kind := unsendable(value):
        return BorderValue(node.name, torch.empty((), device="meta"), unsendable=kind)
    if isinstance(value, torch.Tensor):
        like = torch.empty([_torch.size_hint(n) for n in value.shape], dtype=value.dtype, device="meta")
        like = like.requires_grad_(node in needed)
        shape = shape_of(value) if is_symbolic(value) else ()
        return BorderValue(node.name, like, written=node in written, order=_order(value), shape=shape)
    value = _torch.size_hint(value) if isinstance(value, torch.SymInt) else value
    return BorderValue(node.name, torch.empty((), dtype=SCALARS[type(value)], device="meta"), type(value))


def _order(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions by decreasing stride; empty if that is the usual order."""
    if value.layout is not torch.strided:
        return ()
    strides = [_torch.size_hint(n) for n in value.stride()]
    found = sorted(range(value.dim()), key=lambda i: -strides[i])
    return () if found == sorted(found) or value.is_contiguous() else tuple(found)


def _look(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
