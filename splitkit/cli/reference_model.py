"""Compares a pipeline with the unsplit model for ``splitkit train --check``.

Rank 0 trains the unsplit model by the same batches; the other ranks send their gradients and weights to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from splitkit.runtime.ranks.fsdp import full_tensor
from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.testing.pipeline_check import UnsplitModel, gradient_of, relative_difference


class ReferenceModel:
    """The unsplit model, which rank 0 trains by the same steps.

    Attributes:
        whole: the model and its optimizer; on rank 0 only.
        apart: the largest relative difference in all steps, of losses, gradients, and weights with buffers; on rank 0.
        furthest: where that was, in words: ``"weight"`` -> ``"weight of h.0.attn.bias in step 2"``.
    """

    def __init__(self, pipe: Pipeline, gm: fx.GraphModule, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self._pipe, self._unsplit = pipe, UnsplitModel(pipe, gm) if pipe.rank == 0 else None
        self.whole: tuple[nn.Module, torch.optim.Optimizer] | None = None
        if self._unsplit is not None:
            self.whole = self._unsplit.model, optimizer(self._unsplit.model.parameters())
        self.apart = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
        self.furthest: dict[str, str] = {}
        known: list[Any] = [tuple(self._unsplit.held) if self._unsplit is not None else None]
        dist.broadcast_object_list(known, group=pipe.group, group_src=0)
        own = {name: t for name, t in pipe.named_tensors().items() if name in known[0] or isinstance(t, nn.Parameter)}
        rows = {name: (t.shape, t.dtype, isinstance(t, nn.Parameter)) for name, t in own.items()}
        self._held: list[Any] = [None] * dist.get_world_size(pipe.group)
        dist.all_gather_object(self._held, rows, group=pipe.group)

    def step(self, batch: tuple[Sequence[Any], Mapping[str, Any]], losses: torch.Tensor, optimizer: Any) -> None:
        """Run a step of the unsplit model and of both optimizers, and compare.

        Args:
            batch: the positional and keyword inputs.
            losses: the losses of the pipeline, ``[microbatches]``.
            optimizer: the optimizer of the pipeline's parameters.
        """
        if self._unsplit is not None:
            self._unsplit.steps = self._pipe.steps - 1
            others = self._unsplit.step(*batch[0], **batch[1])
            self._note("loss", "loss", relative_difference(losses, others))
        self._compare("gradient", gradient_of)
        optimizer.step()
        if self.whole is not None:
            self.whole[1].step()
        self._compare("weight", torch.Tensor.detach)
        if self.whole is not None:
            self.whole[1].zero_grad()

    def found(self) -> dict[str, Any]:
        """Return `apart` and `furthest` of rank 0 on all ranks."""
        found: list[Any] = [{**self.apart, "furthest": self.furthest}]
        dist.broadcast_object_list(found, group=self._pipe.group, group_src=0)
        return dict(found[0])

    def _note(self, what: str, words: str, apart: float) -> None:
        if apart > self.apart[what]:
            self.apart[what], self.furthest[what] = apart, f"{words} in step {self._pipe.steps - 1}"

    def _compare(self, what: str, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compare gradients or weights of the parameters of each rank; weights include buffers."""
        pipe, held = self._pipe, self._pipe.named_tensors()
        own = {name: full_tensor(of(held[name])) for name in self._compared(pipe.rank, what)}
        if self._unsplit is None:
            for tensor in own.values():
                dist.send(_bytes(tensor), group=pipe.group, group_dst=0)
            return
        for rank, held in enumerate(self._held):
            for name in self._compared(rank, what):
                mine = own[name] if rank == 0 else _received(pipe, rank, *held[name][:2])
                self._note(what, f"{what} of {name}", self._unsplit.relative_deviation(what, name, mine))

    def _compared(self, rank: int, what: str) -> list[str]:
        held = self._held[rank].items()
        return [name for name, (shape, _, trains) in held if shape.numel() and (trains or what == "weight")]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes: gloo and NCCL do not send every dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _received(pipe: Pipeline, rank: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device=pipe.device)
    dist.recv(_bytes(made), group=pipe.group, group_src=rank)
    return made
