"""Compare a pipeline with the unsplit model: losses, gradients and weights after each step."""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from splitkit.engine.split import Split
from splitkit.errors import CheckError, PipelineError
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.devices.accelerators import current
from splitkit.runtime.devices.device_map import captured_types
from splitkit.runtime.devices.hardcoded_devices import follow_device
from splitkit.runtime.ranks import fsdp
from splitkit.runtime.ranks.pipeline import Pipeline, PipelineStep
from splitkit.short_repr import brief

TOLERANCE = 1e-6
"""Largest deviation that counts as rounding in a first step, relative to the largest entry of a tensor."""
FLOOR = 1e-3
"""Least scale of a deviation: this times the largest gradient of the model for gradients, and this for parameters. The
gradient of the key bias of attention is mere rounding, 1e-10 of the largest one, and so is its optimizer step."""


@dataclass(frozen=True)
class Deviation:
    """Deviations of a pipeline from the unsplit model on one rank.

    Attributes:
        loss: relative deviation of the losses; 0 on ranks without the last stage.
        gradient: largest relative deviation of a gradient.
        weight: largest relative deviation of a parameter or buffer.
        worst: name of the tensor that deviates most.
    """

    loss: float
    gradient: float
    weight: float
    worst: str

    __repr__ = brief


class UnsplitModel:
    """A copy of the graph that was split, which runs microbatch by microbatch with the pipeline's seeds.

    Make it before the pipeline's first step, on each rank. Stages from a folder do not have the graph that was split:
    pass it as ``whole``.

    Attributes:
        model: the graph, with weights of its own.
        pipe: the pipeline.
        held: name -> parameter or buffer of the graph. Stages also have constants of the graph, which never change.
        steps: number of steps so far, from which seeds are derived.
    """

    def __init__(self, pipe: Pipeline, whole: fx.GraphModule | None = None) -> None:
        if whole is None:
            if not isinstance(pipe.split, Split):
                reason = "stages of a folder do not have the unsplit model"
                raise PipelineError("SK802", reason, "Capture the model, and pass the graph too.")
            whole = pipe.split.flow.root
        self.model: fx.GraphModule = copy.deepcopy(whole).to(pipe.device)
        follow_device(self.model, pipe.device, captured_types(whole.graph, whole))
        self.held = parameters_and_buffers(self.model)
        self.pipe, self.steps, self._largest = pipe, 0, 0.0

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of a batch, as `Pipeline.step` does; return the losses, shape (microbatches,)."""
        pipe, losses = self.pipe, []
        kwargs, target = pipe.with_target(kwargs, target)
        made = pipe.cut(*args, **kwargs)
        sizes = pipe.sizes(made)
        targets = pipe.cut_target(target, sizes, kwargs.get("microbatches") is not None)
        for number, (inputs, share) in enumerate(zip(made, sizes.shares, strict=True)):
            with _forked_rng(pipe.device), current(pipe.device):
                torch.manual_seed(pipe.seed_of(self.steps, number))
                output = fx.Interpreter(self.model).run(*inputs.values(), enable_io_processing=False)
            loss = pipe.loss_of(self.model.graph.process_outputs(output), targets[number])
            (loss * share.numerator / share.denominator).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().reshape(()))
        self.steps += 1
        grads = [t.grad for t in self.held.values() if t.grad is not None and t.numel()]
        self._largest = max((float(grad.abs().max()) for grad in grads), default=0.0)
        return torch.stack(losses)

    def deviation(self, found: PipelineStep, losses: torch.Tensor) -> Deviation:
        """Compare the tensors of this rank after a step of the pipeline and of this model."""
        own = self.pipe.named_tensors()
        trained = {name: t for name, t in own.items() if isinstance(t, nn.Parameter)}
        known = {name: fsdp.full_tensor(t.detach()) for name, t in own.items() if name in self.held}
        weights = {name: self.relative_deviation("weight", name, t) for name, t in known.items()}
        grads = {name: self.relative_deviation("gradient", name, gradient_of(t)) for name, t in trained.items()}
        lost = relative_difference(found.losses, losses) if found.losses is not None else 0.0
        every = {**{f"gradient of {n}": d for n, d in grads.items()}, **weights}
        worst = max(every, key=every.__getitem__, default="")
        return Deviation(lost, max(grads.values(), default=0.0), max(weights.values(), default=0.0), worst)

    def relative_deviation(self, what: str, name: str, found: torch.Tensor) -> float:
        """Return the relative deviation of a ``"gradient"`` or ``"weight"`` from this model's; see `FLOOR`."""
        own = self.held[name]
        if what == "gradient":
            return relative_difference(found, gradient_of(own), FLOOR * self._largest)
        return relative_difference(found, own.detach(), FLOOR if isinstance(own, nn.Parameter) else 0.0)

    def require_same(self, found: PipelineStep, losses: torch.Tensor, tolerance: float = TOLERANCE) -> Deviation:
        """Raise a `CheckError` (SK701) if any deviation is larger than ``tolerance``."""
        seen = self.deviation(found, losses)
        if not max(seen.loss, seen.gradient, seen.weight) <= tolerance:  # true for nan as well
            raise CheckError(
                "SK701",
                f"rank {self.pipe.rank} differs from the unsplit model: loss {seen.loss:.1e}, gradients "
                f"{seen.gradient:.1e}, weights {seen.weight:.1e}, largest in {seen.worst}",
                "This is a bug of splitkit: please report it with the plan.",
            )
        return seen


def _forked_rng(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng()
    return torch.random.fork_rng([device.index], device_type=device.type)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, or zeros if it has none."""
    return fsdp.full_tensor(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad).detach()


def relative_difference(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest entry of ``b`` or to ``least``, whichever is larger.

    It is infinite for different shapes and for nan.
    """
    if a.shape != b.shape or a.is_complex() != b.is_complex():
        return float("inf")
    if not a.numel():
        return 0.0
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    found = float((a - b).abs().max() / b.abs().max().clamp(min=max(least, 1e-12)))
    return float("inf") if math.isnan(found) else found
