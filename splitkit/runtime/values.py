"""What goes over a border: tensors that torch's stages can send, with what they must look like."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from splitkit import _torch
from splitkit.errors import PipelineError
from splitkit.graph.symbols import value_of
from splitkit.pipeline.together import SCALARS, unsendable


@dataclass(frozen=True)
class Carried:
    """A value that goes over a border.

    Attributes:
        name: of the node that makes it.
        like: a tensor on ``meta`` of the same shape, dtype and ``requires_grad``; of no dimension for a number.
        scalar: the type of a number.
        written: whether a stage may write its memory.
        odd: what it is if it cannot be sent; empty for what can.
        order: its dimensions as they lie in memory, where that is not the usual order: behind a ``transpose`` a
            ``view`` may take nothing else.
    """

    name: str
    like: torch.Tensor
    scalar: type | None = None
    written: bool = False
    odd: str = ""
    order: tuple[int, ...] = ()

    def sent(self, train: bool) -> Carried:
        """How it goes over a border, with a gradient that comes back or without.

        Raises:
            PipelineError: SK801 for what is neither a tensor nor a number.
        """
        if self.odd:
            raise PipelineError(
                "SK801",
                f"{self.name} is a {self.odd}, which cannot be sent to another process",
                "Put the ops that make it and read it into one stage.",
                [self.name],
            )
        return self if train or not self.like.requires_grad else replace(self, like=self.like.detach())

    @property
    def told(self) -> torch.Tensor:
        """What torch is told of it: ``like``, with its dimensions as they lie in memory."""
        if not self.order:
            return self.like
        return self.like.detach().permute(self.order).contiguous().requires_grad_(self.like.requires_grad)

    def packed(self, value: Any, device: torch.device, where: str) -> Any:
        """As it goes over the border: contiguous, with a history of its own.

        Raises:
            PipelineError: SK803 where it is not what was planned.
        """
        if self.scalar is not None:
            return torch.tensor(value, dtype=self.like.dtype, device=device)
        if self.written and self.like.requires_grad and isinstance(value, torch.Tensor) and not value.requires_grad:
            value = value.detach().requires_grad_()  # it is filled behind the border, and what comes back is for nobody
        self._require(value, where)
        value = value.permute(self.order) if self.order else value
        if not self.like.requires_grad:
            return value.detach().contiguous()
        return fresh(value.contiguous())

    def unpacked(self, value: torch.Tensor) -> Any:
        """As the stage behind the border reads it."""
        if self.scalar is not None:
            return self.scalar(value.item())
        value = fresh(value) if value.requires_grad else value  # so that the gradient can be sent
        if self.order:
            value = value.permute([self.order.index(i) for i in range(len(self.order))])
        return value.clone() if self.written else value  # what was received is a leaf, and torch's own

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
                f"{self.name} is {lacks} {where}; the stage behind waits for {asks}",
                "Capture the graph with inputs of the shape of one microbatch, in the mode in which it trains.",
                [self.name],
            )


class Fresh(torch.autograd.Function):
    """The same memory, as a tensor that is no view and that nobody saved: torch may ``detach_()`` it.

    Its gradient is contiguous, as what is sent must be.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The tensor, detached."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """The gradient as it is, but for its strides."""
        return grad.contiguous()


def fresh(x: torch.Tensor) -> Any:
    """See `Fresh`."""
    return Fresh.apply(x)  # type: ignore[no-untyped-call]


def carried(node: Node, needed: Set[Node], written: Set[Node]) -> Carried:
    """What the graph says of a value of it.

    Args:
        node: of the graph that was split.
        needed: nodes that may carry a gradient.
        written: nodes whose memory is written.
    """
    value = value_of(node)
    if odd := unsendable(value):
        return Carried(node.name, torch.empty((), device="meta"), odd=odd)
    if isinstance(value, torch.Tensor):
        like = torch.empty([_torch.size_hint(n) for n in value.shape], dtype=value.dtype, device="meta")
        like = like.requires_grad_(node in needed)
        return Carried(node.name, like, written=node in written, order=_order(value))
    value = _torch.size_hint(value) if isinstance(value, torch.SymInt) else value
    return Carried(node.name, torch.empty((), dtype=SCALARS[type(value)], device="meta"), type(value))


def _order(value: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor as they lie in memory; none where that is the usual order."""
    if value.layout is not torch.strided:
        return ()
    strides = [_torch.size_hint(n) for n in value.stride()]
    found = sorted(range(value.dim()), key=lambda i: -strides[i])
    return () if found == sorted(found) or value.is_contiguous() else tuple(found)


def _look(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
