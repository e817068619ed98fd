"""A pipeline beside the model itself: what each gives in the same steps, and how far that is apart.

Differences are relative to the largest number of a tensor; but of a gradient to `NOTHING` of the largest gradient at
least, and of a parameter to `RATE`: the bias of attention's keys has only rounding for a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from splitkit.engine.split import Split
from splitkit.frontends.joint_capture import sum_of_outputs
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime import pipeline
from splitkit.runtime.ranks.pipeline import Pipeline

NOTHING = 1e-2
RATE = 1e-3
SEED = 7
MICROBATCHES = 4
Inputs = Mapping[str, Any]


def batch_of(parts: list[Inputs]) -> Inputs:
    """Microbatches one behind the other."""
    flat = [pytree.tree_flatten(dict(part)) for part in parts]
    leaves = [
        torch.cat(values) if isinstance(values[0], torch.Tensor) and values[0].dim() else values[0]
        for values in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return pytree.tree_unflatten(leaves, flat[0][1])


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def apart(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest number of ``b``, or to ``least``."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel() or torch.equal(a, b):
        return 0.0
    a, b = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    same_infinite = (a == b) & a.isinf() if not a.is_complex() else torch.zeros_like(a, dtype=torch.bool)
    a, b = a.masked_fill(same_infinite, 0), b.masked_fill(same_infinite, 0)
    return float((a - b).abs().max() / b.abs().max().clamp(min=max(least, 1e-30)))


def loss_of(output: Any) -> torch.Tensor:
    """The model's own, else the sum of what it returns."""
    own = getattr(output, "loss", None)
    found = own if isinstance(own, torch.Tensor) else sum_of_outputs(output)
    assert found is not None
    return found


@dataclass(frozen=True)
class Step:
    """What a step of the model itself gives: losses, gradients, and then its state."""

    losses: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Alone:
    """The model itself, trained microbatch by microbatch from the pipeline's seeds.

    Attributes:
        saved: its ``state_dict`` before.
        steps: what each step gave.
        outputs: what it returned for each microbatch of the first batch then, without gradients.
        loss: whether it returns its loss.
    """

    saved: Mapping[str, torch.Tensor]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    loss: bool


def seed_of(step: int, number: int) -> int:
    """As `Pipeline.seed_of`, of a pipeline that is not made yet."""
    return (SEED * 1_000_003 + step * MICROBATCHES + number) % 2**63


def called(model: nn.Module, inputs: Inputs, step: int, number: int) -> Any:
    torch.manual_seed(seed_of(step, number))
    return model(**copy.deepcopy(dict(inputs)))


def trained(model: nn.Module, batches: list[list[Inputs]]) -> Alone:
    """See `Alone`."""
    saved = {name: t.detach().clone() for name, t in model.state_dict().items()}
    optimizer, steps, own = optimizer_of(list(model.parameters())), list[Step](), False
    for step, parts in enumerate(batches):
        losses = []
        for number, inputs in enumerate(parts):
            output = called(model, inputs, step, number)
            own = isinstance(getattr(output, "loss", None), torch.Tensor)
            loss = loss_of(output)
            (loss / len(parts)).sum().backward()
            losses.append(loss.detach().reshape(()))
        held = parameters_and_buffers(model)
        grads = {name: t.grad.clone() for name, t in held.items() if t.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(torch.stack(losses), grads, {name: t.detach().clone() for name, t in held.items()}))
    with torch.no_grad():
        outputs = tuple(called(model, inputs, len(steps), i) for i, inputs in enumerate(batches[0]))
    return Alone(saved, tuple(steps), outputs, own)


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, eps=1e-2)


class Worst(dict[str, tuple[float, str]]):
    """What was compared -> the largest difference, and of which tensor."""

    def note(self, what: str, found: float, name: str) -> None:
        if not found <= self.get(what, (-1.0, ""))[0]:
            self[what] = found, name


def compared(pipe: Pipeline, step: Step, losses: torch.Tensor | None, worst: Worst) -> None:
    """Losses and gradients."""
    if losses is not None:
        worst.note("loss", apart(losses, step.losses), "")
    least = NOTHING * max((float(g.abs().max()) for g in step.gradients.values() if g.numel()), default=0.0)
    for name, p in pipe.named_parameters().items():
        zero = torch.zeros_like(p)
        grad = zero if p.grad is None else p.grad
        worst.note("gradient", apart(grad, step.gradients.get(name, zero), least), name)


def run(split: Split, alone: Alone, schedule: str, batches: list[list[Inputs]]) -> dict[str, Any]:
    """A rank trains its stages, and compares."""
    loss = None if alone.loss else lambda out, _: loss_of(out)
    pipe = pipeline(split, schedule, MICROBATCHES, seed=SEED, loss=loss)
    assert pipe.seed_of(1, 1) == seed_of(1, 1)
    found: dict[str, Any] = {when: Worst() for when in ("first", "later", "infer")}
    pipe.load_state_dict(alone.saved)
    if others := pipe.state_dict().keys() - alone.saved.keys():
        found["first"].note("state", float("inf"), f"{min(others)} is not in the state of the model")
    optimizer = optimizer_of(pipe.parameters()) if pipe.parameters() else None
    for number, (parts, step) in enumerate(zip(batches, alone.steps, strict=True)):
        worst = found["later" if number else "first"]
        compared(pipe, step, pipe.step(**batch_of(parts)).losses, worst)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        for name, t in pipe.named_tensors().items():
            if name in step.state:  # else a constant that capture made an attribute of
                least = RATE if isinstance(t, nn.Parameter) else 0.0
                worst.note("state", apart(t.detach(), step.state[name], least), name)
    outputs = pipe.infer(**batch_of(batches[0]))
    for a, b in zip(outputs or (), alone.outputs if outputs else (), strict=True):
        mine, theirs = pytree.tree_structure(a), pytree.tree_structure(b)
        if mine != theirs:
            found["infer"].note("outputs", float("inf"), f"{mine}, not {theirs}"[:300])
        else:
            for x, y in zip(tensors(a), tensors(b), strict=True):
                found["infer"].note("outputs", apart(x, y), str(list(y.shape)))
    return found | {"borders": [len(names) for names in pipe.borders]}
