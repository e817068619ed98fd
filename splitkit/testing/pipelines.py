"""The unsplit model beside a pipeline: the same losses, gradients and weights, step by step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from splitkit.brief import brief
from splitkit.engine.split import Split
from splitkit.errors import CheckError, PipelineError
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime import sharded
from splitkit.runtime.pipeline import Pipeline, PipelineStep

TOLERANCE = 1e-6
"""Relative to the largest number of a tensor, in a first step."""
FLOOR = 1e-3
"""Gradients are relative to this times the model's largest gradient at least, parameters to this: the gradient of the
bias of attention's keys is mere rounding, 1e-10 of the largest one, and so is what an optimizer makes of it."""
DRIFT = 100
"""How many times more weights that were rounded differently may differ in the steps after it."""


@dataclass(frozen=True)
class Deviation:
    """How far a pipeline is from the unsplit model on one rank.

    Attributes:
        loss: of the losses, relative; 0 on ranks without the last stage.
        gradient: the largest of all gradients, relative.
        weight: the largest of all parameters and buffers, relative.
        worst: the name of the tensor that deviates most.
    """

    loss: float
    gradient: float
    weight: float
    worst: str

    __repr__ = brief


class Unsplit:
    """The graph that was split, with weights of its own, run microbatch by microbatch from the pipeline's seeds.

    Make it before the pipeline's first step, on each rank; of stages from a folder, which do not have the graph that
    was split, with that graph.

    Attributes:
        model: the graph.
        pipe: the pipeline.
        held: its parameters and buffers by name; stages have constants of the graph besides, which nobody changes.
        steps: how many were run: seeds go by it.
    """

    def __init__(self, pipe: Pipeline, whole: fx.GraphModule | None = None) -> None:
        if whole is None:
            if not isinstance(pipe.split, Split):
                reason = "stages of a folder do not have the unsplit model"
                raise PipelineError("SK802", reason, "Capture it, and give it too.")
            whole = pipe.split.flow.root
        self.model: fx.GraphModule = copy.deepcopy(whole).to(pipe.device)
        self.held = parameters_and_buffers(self.model)
        self.pipe, self.steps, self._largest = pipe, 0, 0.0

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a batch, as `Pipeline.step`; the losses, ``[microbatches]``."""
        pipe, losses = self.pipe, []
        if pipe.takes_target:
            kwargs, target = {**kwargs, "target": target}, None
        targets = pipe.cut_target(target)
        for number, inputs in enumerate(pipe.cut(*args, **kwargs)):
            with torch.random.fork_rng():
                torch.manual_seed(pipe.seed_of(self.steps, number))
                made = fx.Interpreter(self.model).run(*inputs.values(), enable_io_processing=False)
            loss = pipe.loss_of(self.model.graph.process_outputs(made), targets[number])
            (loss / pipe.microbatches).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().reshape(()))
        self.steps += 1
        grads = [t.grad for t in self.held.values() if t.grad is not None and t.numel()]
        self._largest = max((float(grad.abs().max()) for grad in grads), default=0.0)
        return torch.stack(losses)

    def deviation(self, found: PipelineStep, losses: torch.Tensor) -> Deviation:
        """Compare what this rank holds after a step of both."""
        own = self.pipe.named_tensors()
        trained = {name: t for name, t in own.items() if isinstance(t, nn.Parameter)}
        known = {name: sharded.whole(t.detach()) for name, t in own.items() if name in self.held}
        weights = {name: self.apart_in("weight", name, t) for name, t in known.items()}
        grads = {name: self.apart_in("gradient", name, gradient_of(t)) for name, t in trained.items()}
        lost = relative_difference(found.losses, losses) if found.losses is not None else 0.0
        every = {**{f"gradient of {n}": d for n, d in grads.items()}, **weights}
        worst = max(every, key=every.__getitem__, default="")
        return Deviation(lost, max(grads.values(), default=0.0), max(weights.values(), default=0.0), worst)

    def apart_in(self, what: str, name: str, found: torch.Tensor) -> float:
        """How far a ``"gradient"`` or ``"weight"`` is from that of this model, relative, see `FLOOR`."""
        own = self.held[name]
        if what == "gradient":
            return relative_difference(found, gradient_of(own), FLOOR * self._largest)
        return relative_difference(found, own.detach(), FLOOR if isinstance(own, nn.Parameter) else 0.0)

    def require_same(self, found: PipelineStep, losses: torch.Tensor, tolerance: float = TOLERANCE) -> Deviation:
        """Raise `CheckError` SK701 where they differ by more."""
        seen = self.deviation(found, losses)
        if not max(seen.loss, seen.gradient, seen.weight) <= tolerance:  # also where it is nan
            raise CheckError(
                "SK701",
                f"rank {self.pipe.rank} differs from the unsplit model: loss {seen.loss:.1e}, gradients "
                f"{seen.gradient:.1e}, weights {seen.weight:.1e}, most {seen.worst}",
                "Please report it with the plan.",
            )
        return seen


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
        whole: as of `Unsplit`.

    Returns:
        How far they were apart after each step on this rank.

    Raises:
        CheckError: SK701 where they differ by more than ``tolerance``, after the first step by `DRIFT` times as much.
    """
    unsplit = Unsplit(pipe, whole)
    mine, theirs = optimizer(pipe.parameters()), optimizer(list(unsplit.model.parameters()))
    seen: list[Deviation] = []
    for batch in batches:
        found, losses = pipe.step(**batch), unsplit.step(**batch)
        unsplit.require_same(found, losses, tolerance * (DRIFT if seen else 1))
        for each in (mine, theirs):
            each.step()
        seen.append(unsplit.require_same(found, losses, tolerance * DRIFT))
        for each in (mine, theirs):
            each.zero_grad()
    return seen


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter; zeros where there is none."""
    return sharded.whole(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad).detach()


def relative_difference(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest number of ``b``, or to ``least``; infinite for other shapes and
    nan."""
    if a.shape != b.shape or a.is_complex() != b.is_complex():
        return float("inf")
    if not a.numel():
        return 0.0
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    found = float((a - b).abs().max() / b.abs().max().clamp(min=max(least, 1e-12)))
    return float("inf") if math.isnan(found) else found
