"""What goes over a border: tensors that torch's stages can send, with what they must look like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from splitkit import _torch
from splitkit.errors import PipelineError
from splitkit.graph.gradients import Gradients
from splitkit.graph.symbols import value_of
from splitkit.runtime.chain import Chain

_SCALARS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Carried:
    """A value that goes over a border.

    Attributes:
        name: of the node that makes it.
        like: a tensor on ``meta`` of the same shape, dtype and ``requires_grad``; of no dimension for a number.
        scalar: the type of a number.
        written: whether a stage may write its memory.
    """

    name: str
    like: torch.Tensor
    scalar: type | None = None
    written: bool = False

    def packed(self, value: Any, device: torch.device, where: str) -> Any:
        """As it goes over the border: contiguous, with a history of its own.

        Raises:
            PipelineError: SK803 where it is not what was planned.
        """
        if self.scalar is not None:
            return torch.tensor(value, dtype=self.like.dtype, device=device)
        self._require(value, where)
        if not self.like.requires_grad:
            return value.detach().contiguous()
        return fresh(value.contiguous())

    def unpacked(self, value: torch.Tensor) -> Any:
        """As the stage behind the border reads it."""
        if self.scalar is not None:
            return self.scalar(value.item())
        if value.requires_grad:
            value = fresh(value)  # for a gradient that can be sent
        return value.clone() if self.written else value  # what was received is a leaf, and torch's own

    def _require(self, value: Any, where: str) -> None:
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
    """The same memory, as a tensor that is no view and that nobody saved: torch may ``detach_()`` it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The tensor, detached."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """The gradient, as gloo and NCCL send it: that of a value that is read transposed is not contiguous."""
        return grad.contiguous()


def fresh(x: torch.Tensor) -> Any:
    """See `Fresh`."""
    return Fresh.apply(x)  # type: ignore[no-untyped-call]


def carried(chain: Chain, values: Iterable[Node], train: bool) -> tuple[Carried, ...]:
    """How values of the parent go over a border, by what the graph says of them.

    Args:
        train: whether gradients come back.

    Raises:
        PipelineError: SK801 for what is neither a tensor nor a number.
    """
    needed = chain.split.flow.fact(Gradients).needed if train else set()
    return tuple(_carried(chain.original(node), needed, chain.written) for node in values)


def _carried(node: Node, needed: set[Node], written: Set[Node]) -> Carried:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        like = torch.empty([_torch.size_hint(n) for n in value.shape], dtype=value.dtype, device="meta")
        return Carried(node.name, like.requires_grad_(node in needed), written=node in written)
    value = _torch.size_hint(value) if isinstance(value, torch.SymInt) else value
    if type(value) in _SCALARS:
        return Carried(node.name, torch.empty((), dtype=_SCALARS[type(value)], device="meta"), type(value))
    raise PipelineError(
        "SK801",
        f"{node.name} is a {type(value).__name__}, which cannot be sent to another process",
        "Put the ops that make it and read it into one stage.",
        [node],
    )


def _look(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
