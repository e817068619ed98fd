"""Compare a pipeline with the unsplit model: losses, gradients and weights after each step."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from splitkit._torch import pytree
from splitkit.errors import PipelineError
from splitkit.graph.call_signature import bind_inputs
from splitkit.graph.shards import full_tensor
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.devices.accelerators import current, move_tensors
from splitkit.runtime.devices.device_map import captured_types, follow_device
from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.runtime.ranks.planned_chain import captured_model
from splitkit.runtime.ranks.step_losses import PipelineStep, scaled
from splitkit.short_repr import brief
from splitkit.testing.differences import flattened_output

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
        model: the graph or module, with weights of its own.
        pipe: the pipeline.
        held: name in the graph -> parameter or buffer of the model. Stages also have constants, which never change.
        steps: number of steps so far, from which seeds are derived.
        digests: microbatch -> output -> its digest, of the last step; see `digest`.
    """

    def __init__(self, pipe: Pipeline, whole: nn.Module | None = None, names: Mapping[str, str] | None = None) -> None:
        """Make the model.

        Args:
            pipe: the pipeline to compare with.
            whole: the graph that was split, of which a copy is made; or a module with weights of its own, which is
                trained itself, such as the module that was captured, made anew.
            names: name in the graph -> name in ``whole``; by default they are the same.
        """
        if whole is None:
            found = captured_model(pipe.split)
            if found is None:
                reason = "stages of a folder do not have the unsplit model"
                raise PipelineError("SK802", reason, "Capture the model, and pass the graph too.")
            whole = found if isinstance(found, fx.GraphModule) else copy.deepcopy(found)
        self.model: nn.Module = copy.deepcopy(whole) if isinstance(whole, fx.GraphModule) else whole
        # `nn.Module.to` makes two parameters of a tied one on some devices
        tensors = (*self.model.parameters(), *self.model.buffers())
        move_tensors(self.model, nn.Module(), {id(tensor): pipe.device for tensor in tensors})
        if isinstance(self.model, fx.GraphModule):
            follow_device(self.model, pipe.device, captured_types(whole.graph, whole))  # type: ignore[arg-type]
        held = parameters_and_buffers(self.model)
        self.held = held if names is None else {name: held[own] for name, own in names.items()}
        self.pipe, self.steps, self._largest = pipe, 0, 0.0
        self.digests: list[dict[str, tuple[float, float]]] = []

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of a batch, as `Pipeline.step` does; return the losses, shape (microbatches,)."""
        pipe, losses = self.pipe, []
        kwargs, target = pipe.with_target(kwargs, target)
        divided = pipe.divide(args, kwargs, target)
        self.digests = []
        outputs = self._outputs(divided.inputs, args, kwargs)
        for output, share, wanted in zip(outputs, divided.sizes.shares, divided.targets, strict=True):
            loss = pipe.loss_of(output, wanted)
            scaled(loss, share).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().reshape(()))
            self.digests.append(digest(output))
        self.steps += 1
        grads = [t.grad for t in self.held.values() if t.grad is not None and t.numel()]
        self._largest = max((float(grad.abs().max()) for grad in grads), default=0.0)
        return torch.stack(losses)

    def _outputs(
        self, cut: Sequence[Mapping[str, Any]], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[Any]:
        """Yield the output of each microbatch, drawn from the seed that the pipeline uses for it."""
        model, device = self.model, self.pipe.device
        calls = None if isinstance(model, fx.GraphModule) else module_calls(self.pipe, args, kwargs)
        for number, inputs in enumerate(cut):
            with _forked_rng(device), current(device):
                torch.manual_seed(self.pipe.seed_of(self.steps, number))
                if calls is not None:
                    output = model(*calls[number][0], **calls[number][1])
                else:
                    made = fx.Interpreter(model).run(*inputs.values(), enable_io_processing=False)
                    output = model.graph.process_outputs(made)  # type: ignore[union-attr, operator]
            yield output

    def deviation(self, found: PipelineStep, losses: torch.Tensor) -> Deviation:
        """Compare the tensors of this rank after a step of the pipeline and of this model."""
        own = self.pipe.named_tensors()
        trained = {name: t for name, t in own.items() if isinstance(t, nn.Parameter)}
        known = {name: full_tensor(t.detach()) for name, t in own.items() if name in self.held}
        weights = {name: self.relative_deviation("weight", name, t) for name, t in known.items()}
        grads = {name: self.relative_deviation("gradient", name, gradient_of(t)) for name, t in trained.items()}
        lost = relative_difference(found.losses, losses) if found.losses is not None else 0.0
        every = {**{f"gradient of {n}": d for n, d in grads.items()}, **weights}
        worst = max(every, key=every.__getitem__, default="")
        return Deviation(lost, max(grads.values(), default=0.0), max(weights.values(), default=0.0), worst)

    @property
    def least_gradient(self) -> float:
        """The least scale of a deviation of gradients, see `FLOOR`."""
        return FLOOR * self._largest

    def relative_deviation(self, what: str, name: str, found: torch.Tensor) -> float:
        """Return the relative deviation of a ``"gradient"`` or ``"weight"`` from this model's; see `FLOOR`."""
        own = self.held[name]
        if what == "gradient":
            return relative_difference(found, gradient_of(own), self.least_gradient)
        return relative_difference(found, own.detach(), FLOOR if isinstance(own, nn.Parameter) else 0.0)


def _forked_rng(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng()
    return torch.random.fork_rng([device.index], device_type=device.type)


def module_calls(pipe: Pipeline, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the positional and keyword arguments of the module that was captured, for each microbatch of a batch.

    Raises:
        PipelineError: SK802 if a tensor of the batch is not an input of the graph, so it is unclear how to split it.
    """
    if (given := kwargs.get("microbatches")) is not None:
        return [((), dict(inputs)) for inputs in given]
    kwargs = {name: value for name, value in kwargs.items() if name != "microbatches"}
    bound = bind_inputs(pipe.split.module, args, kwargs)
    parts = [
        {id(v): own for v, own in zip(bound, cut.values(), strict=True)}
        for cut in pipe.divide(args, kwargs, None).inputs
    ]
    if any(isinstance(v, torch.Tensor) and id(v) not in parts[0] for v in pytree.tree_leaves((args, kwargs))):
        reason = "the graph takes apart an object among the inputs, and the module takes it whole"
        raise PipelineError("SK802", reason, "Compare with the graph: UnsplitModel(pipe, gm).")
    call = tuple(args), dict(kwargs)
    return [pytree.tree_map(lambda value, own=own: own.get(id(value), value), call) for own in parts]


def digest(output: Any) -> dict[str, tuple[float, float]]:
    """Return output -> the sum of its entries and of their sizes, to find the first output that differs later."""
    leaves, _ = flattened_output(output)
    tensors = {name: leaf.detach() for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    wide = {name: t.abs().double() if t.is_complex() else t.double() for name, t in tensors.items()}
    return {name: (float(t.sum()), float(t.abs().sum())) for name, t in wide.items()}


def digest_difference(
    found: Sequence[Mapping[str, tuple[float, float]]],
    wanted: Sequence[Mapping[str, tuple[float, float]]],
    tolerance: float,
) -> tuple[int, str] | None:
    """Return the first microbatch and output whose digests differ by more than ``tolerance``, relative to the sizes."""
    for number, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        for name in dict.fromkeys([*mine, *other]):
            if name not in mine or name not in other:
                return number, name
            (a, _), (b, scale) = mine[name], other[name]
            if not abs(a - b) <= tolerance * scale:
                return number, name
    return None


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, or zeros if it has none."""
    return full_tensor(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad).detach()


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
