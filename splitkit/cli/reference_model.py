"""Compares a pipeline with the unsplit model for ``splitkit train --check``.

Rank 0 runs the user's own module, made anew by its factory, on the same batches; the other ranks send it their
gradients and weights. Each step is compared from the same state: the module takes over the pipeline's gradients before
the optimizers step, and its weights and buffers after that, so a difference is never carried on into later steps. An
optimizer such as AdamW makes a whole step of a gradient that is only rounding, and would make a difference of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.optim import Optimizer

from splitkit.cli.common import CapturedModel, example_of
from splitkit.errors import PipelineError
from splitkit.graph.shards import full_tensor
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.folder.load import StageFolder
from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.runtime.ranks.planned_chain import captured_model
from splitkit.testing.pipeline_check import (
    UnsplitModel,
    digest_difference,
    gradient_of,
    module_calls,
    relative_difference,
)

Batch = tuple[Sequence[Any], Mapping[str, Any]]


class ReferenceModel:
    """The unsplit model, which rank 0 runs by the same steps.

    Attributes:
        kind: ``"module"``, or ``"graph"`` if the module takes other inputs than the graph; on rank 0.
        whole: the model and its optimizer; on rank 0 only.
        apart: the largest relative difference in all steps, of losses, gradients, and weights with buffers; on rank 0.
        furthest: where that was, in words: ``"weight"`` -> ``"weight of h.0.attn.bias in step 2"``.
        burnt_in: step, microbatch and output in which the module first differs from its graph, if that is why the
            pipeline differs from the module.
    """

    def __init__(
        self,
        pipe: Pipeline,
        work: CapturedModel,
        optimizer: Callable[[Any], Optimizer],
        tolerance: float,
        batch: Batch,
    ) -> None:
        self._pipe, self._work, self._tolerance = pipe, work, tolerance
        self._unsplit: UnsplitModel | None = None
        self.whole: tuple[nn.Module, Optimizer] | None = None
        self.kind = "module"
        if pipe.rank == 0:
            self.kind, self._unsplit = _unsplit(pipe, work, batch)
            held = list({id(p): p for p in self._unsplit.held.values() if isinstance(p, nn.Parameter)}.values())
            self.whole = self._unsplit.model, optimizer(held)
        self.apart = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
        self.furthest: dict[str, str] = {}
        self.burnt_in: dict[str, Any] | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        known: list[Any] = [tuple(self._unsplit.held) if self._unsplit is not None else None]
        dist.broadcast_object_list(known, group=pipe.group, group_src=0)
        own = {name: t for name, t in pipe.named_tensors().items() if name in known[0]}
        rows = {name: (t.shape, t.dtype, isinstance(t, nn.Parameter)) for name, t in own.items()}
        self._held: list[Any] = [None] * dist.get_world_size(pipe.group)
        dist.all_gather_object(self._held, rows, group=pipe.group)

    def begin(self, resumed: Optimizer | None) -> None:
        """Compare the weights with which training begins, and take them over.

        Args:
            resumed: the pipeline's optimizer after a resume, whose state is taken over too; the weights of a checkpoint
                are not compared.
        """
        self._exchange("weight", torch.Tensor.detach, "before step 0" if resumed is None else None)
        if resumed is not None:
            self._take_over_state(resumed)

    def step(self, batch: Batch, losses: torch.Tensor, optimizer: Optimizer) -> None:
        """Run a step of the unsplit model and of both optimizers, and compare.

        Args:
            batch: the positional and keyword inputs.
            losses: the losses of the pipeline, ``[microbatches]``.
            optimizer: the optimizer of the pipeline's parameters.
        """
        when, was_same = f"in step {self._pipe.steps - 1}", self._is_same("loss", "gradient")
        if self._unsplit is not None:
            held = self._unsplit.held.items()
            self._buffers = {n: t.detach().clone() for n, t in held if not isinstance(t, nn.Parameter)}
            self._unsplit.steps = self._pipe.steps - 1
            others = self._unsplit.step(*batch[0], **batch[1])
            self._note("loss", "loss", relative_difference(losses, others), when)
            self._note_lost_gradients(when)
        self._exchange("gradient", gradient_of, when)
        if self._unsplit is not None and was_same and not self._is_same("loss", "gradient"):
            self.burnt_in = self._burnt_in(self._unsplit, batch, losses)
        optimizer.step()
        if self.whole is not None:
            self.whole[1].step()
        self._exchange("weight", torch.Tensor.detach, when)
        if self._unsplit is not None:
            self._unsplit.model.zero_grad()

    def found(self) -> dict[str, Any]:
        """Return on all ranks what rank 0 found: `apart`, `furthest`, whether all is within the tolerance, and why."""
        same = self._is_same(*self.apart)
        found: list[Any] = [
            {
                **self.apart,
                "furthest": self.furthest,
                "reference": self.kind,
                "tolerance": self._tolerance,
                "same": same,
                "wrong_step": None if self._is_same("loss", "gradient") else "capture" if self.burnt_in else "split",
                "burnt_in": self.burnt_in,
            }
        ]
        dist.broadcast_object_list(found, group=self._pipe.group, group_src=0)
        return dict(found[0])

    def _is_same(self, *kinds: str) -> bool:
        return all(self.apart[what] <= self._tolerance for what in kinds)

    def _note(self, what: str, words: str, apart: float, when: str) -> None:
        if apart > self.apart[what]:
            self.apart[what], self.furthest[what] = apart, f"{words} {when}"

    def _note_lost_gradients(self, when: str) -> None:
        """Note parameters to which the module gives gradients, and which the pipeline does not have."""
        assert self._unsplit is not None
        held = {id(t) for t in self._unsplit.held.values()}
        for name, parameter in self._unsplit.model.named_parameters():
            if id(parameter) not in held and parameter.grad is not None:
                apart = relative_difference(torch.zeros_like(parameter), parameter.grad, self._unsplit.least_gradient)
                self._note("gradient", f"gradient of {name}, which the graph does not have,", apart, when)

    def _exchange(self, what: str, of: Callable[[torch.Tensor], torch.Tensor], when: str | None) -> None:
        """Compare gradients or weights of each rank, and let the unsplit model take them over; weights include buffers.

        Args:
            what: ``"gradient"`` or ``"weight"``.
            of: returns it from a tensor of a rank.
            when: the words that tell when this is; ``None`` to compare nothing.
        """
        pipe, held = self._pipe, self._pipe.named_tensors()
        own = {name: full_tensor(of(held[name])) for name in self._compared(pipe.rank, what)}
        if self._unsplit is None:
            for tensor in own.values():
                dist.send(_bytes(tensor), group=pipe.group, group_dst=0)
            return
        rows = [(rank, name) for rank in range(len(self._held)) for name in self._compared(rank, what)]
        last = {name: rank for rank, name in rows}
        for rank, name in rows:
            mine = own[name] if rank == 0 else _received(pipe, rank, *self._held[rank][name][:2])
            if when is not None:
                self._note(what, f"{what} of {name}", self._unsplit.relative_deviation(what, name, mine), when)
            if rank == last[name]:
                _take_over(what, self._unsplit.held[name], mine)

    def _compared(self, rank: int, what: str) -> list[str]:
        held = self._held[rank].items()
        return [name for name, (shape, _, trains) in held if shape.numel() and (trains or what == "weight")]

    def _take_over_state(self, optimizer: Optimizer) -> None:
        """Give the unsplit model's optimizer the state of the pipeline's."""
        pipe, held = self._pipe, self._pipe.named_parameters()
        names = [name for name in held if name in self._held[pipe.rank]]
        state = {name: _whole_state(optimizer.state.get(held[name], {})) for name in names}
        every: list[Any] | None = [None] * len(self._held) if pipe.rank == 0 else None
        dist.gather_object(state, every, group=pipe.group, group_dst=0)
        if self._unsplit is not None and self.whole is not None and every is not None:
            for name, values in ((n, v) for rank in every for n, v in rank.items()):
                self.whole[1].state[self._unsplit.held[name]] = {
                    key: v.to(pipe.device) if isinstance(v, torch.Tensor) and v.dim() else v
                    for key, v in values.items()
                }

    def _burnt_in(self, module: UnsplitModel, batch: Batch, losses: torch.Tensor) -> dict[str, Any] | None:
        """Run the captured graph from the same state; say where the module differs from it, if the pipeline does not.

        The module has taken over the gradients of the pipeline by now.
        """
        whole = _captured(self._pipe, self._work)
        if self.kind != "module" or not isinstance(whole, fx.GraphModule):
            return None
        graph = UnsplitModel(self._pipe, whole)
        with torch.no_grad():
            for name, tensor in graph.held.items():
                if name in module.held:
                    tensor.copy_(self._buffers.get(name, module.held[name]))
        graph.model.zero_grad()
        graph.steps = self._pipe.steps - 1
        found = graph.step(*batch[0], **batch[1])
        trained = {name: t for name, t in module.held.items() if isinstance(t, nn.Parameter) and name in graph.held}
        apart = [graph.relative_deviation("gradient", name, gradient_of(t)) for name, t in trained.items()]
        if not max([relative_difference(losses, found), *apart]) <= self._tolerance:
            return None
        where = digest_difference(module.digests, graph.digests, self._tolerance)
        microbatch, output = where if where is not None else (None, None)
        return {"step": self._pipe.steps - 1, "microbatch": microbatch, "output": output}


def _unsplit(pipe: Pipeline, work: CapturedModel, batch: Batch) -> tuple[str, UnsplitModel]:
    """Return the user's module, made anew; the captured graph if the module has other inputs or parameters."""
    whole = _captured(pipe, work)
    try:
        module_calls(pipe, *batch)
    except PipelineError:
        return "graph", UnsplitModel(pipe, whole)
    model, captured = example_of(work.source).model, work.example.model
    if {id(t) for t in model.parameters()} & {id(t) for t in captured.parameters()} or model is captured:
        # a factory that returns the same module each time: the pipeline trains its weights
        model = copy.deepcopy(model)
        model.zero_grad()
    of_graph, of_captured, held = (parameters_and_buffers(m) for m in (whole, captured, model))
    named = {id(tensor): name for name, tensor in of_captured.items()}
    names = {name: named.get(id(tensor), name) for name, tensor in of_graph.items()}
    if any(names[name] not in held for name, tensor in of_graph.items() if isinstance(tensor, nn.Parameter)):
        return "graph", UnsplitModel(pipe, whole)
    names = {name: own for name, own in names.items() if own in held}
    if isinstance(pipe.split, StageFolder):
        with torch.no_grad():
            for name, own in names.items():
                held[own].copy_(of_graph[name])
    return "module", UnsplitModel(pipe, model, names)


def _captured(pipe: Pipeline, work: CapturedModel) -> nn.Module:
    """Return the module with the weights that the pipeline trains: the captured graph, or the model of a step."""
    found = captured_model(pipe.split)
    return work.gm if found is None else found


def _take_over(what: str, own: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a gradient or weight of the pipeline; a gradient that neither has stays away, as optimizers skip it."""
    if what == "weight":
        with torch.no_grad():
            own.copy_(value)
    elif own.grad is not None or bool(value.any()):
        own.grad = value.detach().clone()


def _whole_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: full_tensor(v).cpu() if isinstance(v, torch.Tensor) else v for key, v in state.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes: gloo and NCCL do not send every dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _received(pipe: Pipeline, rank: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device=pipe.device)
    dist.recv(_bytes(made), group=pipe.group, group_src=rank)
    return made
