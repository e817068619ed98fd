"""Run two modules on the same input, seed and state, and say whether values, gradients and buffers are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from splitkit.errors import CheckError
from splitkit.trial import bitwise, named_tensors, trial

GRADIENT_TOLERANCE = 1e-4
"""Largest difference of a gradient, relative to its own largest entry, that counts as rounding: sums of the same terms
in another order."""

NOISE = 1e-7
"""Beside that, what is smaller than this share of the largest gradient of the model counts as rounding. Gradients that
are zero but for rounding (the key bias of an attention) have no scale of their own."""


@dataclass(frozen=True)
class Difference:
    """One tensor of the reference beside the same one of the candidate.

    Attributes:
        name: ``output[0]``, ``gradient of transformer.wte.weight``, ``buffer running_mean`` ...
        largest: largest absolute difference; ``inf`` where one is missing or has another shape or dtype.
        scale: largest absolute entry of the reference.
        bitwise: whether every bit is equal.
    """

    name: str
    largest: float
    scale: float
    bitwise: bool

    @property
    def relative(self) -> float:
        """``largest`` in units of ``scale``."""
        return self.largest / self.scale if self.scale else self.largest


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        outputs: every leaf of the output.
        gradients: every parameter that has a gradient in either run, and every input that takes one.
        state: every buffer, parameter and input as the run leaves it, and the caller's grad mode and autocast.
        loss: the loss of reference and candidate.
        loss_is_models: whether the loss is the model's own, or a weighted sum of its outputs.
        tolerance: what counts as rounding for a gradient, relative to its scale.
    """

    outputs: tuple[Difference, ...]
    gradients: tuple[Difference, ...]
    state: tuple[Difference, ...]
    loss: tuple[float | None, float | None]
    loss_is_models: bool = False
    tolerance: float = GRADIENT_TOLERANCE

    @property
    def same(self) -> bool:
        """Outputs, buffers and inputs bitwise, gradients to rounding."""
        return not self.failures

    @property
    def failures(self) -> tuple[Difference, ...]:
        """What is not the same."""
        exact = [d for d in (*self.outputs, *self.state) if not d.bitwise]
        noise = NOISE * max((d.scale for d in self.gradients), default=0.0)
        return (*exact, *(d for d in self.gradients if not d.largest <= self.tolerance * d.scale + noise))

    def worst(self, which: str) -> Difference | None:
        """The entry of ``outputs``, ``gradients`` or ``state`` with the largest relative difference."""
        entries: tuple[Difference, ...] = getattr(self, which)
        return max(entries, key=lambda d: (not d.bitwise, d.relative), default=None)

    def raise_if_different(self) -> None:
        """Raise CheckError (SK701) naming the tensors that differ."""
        if self.failures:
            lines = [f"    {d.name}: differs by {d.largest:.3g} (scale {d.scale:.3g})" for d in self.failures[:8]]
            more = f"\n    and {len(self.failures) - 8} more" if len(self.failures) > 8 else ""
            raise CheckError("SK701", "the candidate differs from the reference in\n" + "\n".join(lines) + more)


def compare(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *args: Any,
    seed: int = 0,
    loss: Callable[[Any], Tensor] | None = None,
    names: Mapping[str, str] | None = None,
    tolerance: float = GRADIENT_TOLERANCE,
    **kwargs: Any,
) -> Comparison:
    """Run both on the same inputs from the same random state, forward and backward, and compare everything.

    Both runs start from the same buffers, and leave parameters, gradients, buffers, inputs, random state and grad mode
    as they were. Memory: one copy of all parameters and buffers, and two sets of gradients.

    Args:
        reference: the original: a module.
        candidate: a module or a `Split`, sharing the parameters of the reference or holding equal ones.
        args: inputs, each run gets copies.
        seed: random seed of both runs.
        loss: from the output to a scalar; by default the output's own ``loss``, else a weighted sum of its tensors.
        names: names of the candidate's parameters and buffers -> the reference's, where they are not the same objects;
            taken from a `Split` by itself.
        tolerance: what counts as rounding for gradients, relative to the largest entry of the gradient.
        kwargs: keyword inputs.
    """
    original, other = _module(reference), _module(candidate)
    renamed = names if names is not None else getattr(candidate, "qualified_names", {})
    first = trial(original, args, kwargs, seed, loss, _names(original, original, {}))
    second = trial(other, args, kwargs, seed, loss, _names(original, other, renamed))
    # A split need not hold buffers that its graph never reads; what either run changed must be in both.
    state = sorted((first.state.keys() & second.state.keys()) | first.changed.keys() | second.changed.keys())
    return Comparison(
        _differences(first.outputs, second.outputs, "output{}"),
        _differences(first.gradients, second.gradients, "gradient of {}"),
        (
            *_differences({n: first.state.get(n) for n in state}, {n: second.state.get(n) for n in state}, "{}"),
            *_differences(first.ambient, second.ambient, "{} afterwards"),
        ),
        (first.loss, second.loss),
        first.loss_is_models,
        tolerance,
    )


def _module(model: Any) -> nn.Module:
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if not isinstance(module, nn.Module):
        raise TypeError(f"compare takes modules and splits, not {type(model).__name__}")
    return module


def _names(original: nn.Module, other: nn.Module, renamed: Mapping[str, str]) -> dict[str, str]:
    """Names in ``other`` -> one name each in ``original``: of the same tensor, else of the same or the renamed name.

    A tensor with several names (tied weights) goes by the first.
    """
    first: dict[Tensor, str] = {}
    canonical: dict[str, str] = {}
    for name, tensor in named_tensors(original):
        canonical[name] = first.setdefault(tensor, name)
    return {n: first.get(t) or canonical.get(renamed.get(n, n), renamed.get(n, n)) for n, t in named_tensors(other)}


def _differences(first: Mapping[str, Any], second: Mapping[str, Any], title: str) -> tuple[Difference, ...]:
    names = dict.fromkeys([*first, *second])
    return tuple(_difference(title.format(n), first.get(n), second.get(n)) for n in names)


def _difference(name: str, a: Any, b: Any) -> Difference:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        equal = type(a) is type(b) and a == b
        return Difference(name, 0.0 if equal else math.inf, 0.0, equal)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return Difference(name, math.inf, 0.0, False)
    equal = bitwise(a, b)
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.detach().to(wide), b.detach().to(wide)
    largest = float((x - y).abs().nan_to_num(math.inf).max()) if a.numel() and not equal else 0.0
    return Difference(name, largest, float(x.abs().max()) if a.numel() else 0.0, equal)
