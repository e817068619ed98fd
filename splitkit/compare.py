"""Run two modules on the same input, seed and state, and say whether values, gradients and buffers are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from splitkit._torch import pytree
from splitkit.errors import CheckError

GRADIENT_TOLERANCE = 1e-4
"""Largest difference of a gradient, relative to its own largest entry, that counts as rounding: sums of the same terms
in another order."""

NOISE = 1e-7
"""Beside that, what is smaller than this share of the largest gradient of the model counts as rounding. Gradients that
are zero but for rounding (the key bias of an attention) have no scale of their own."""

_AUTOCAST_DEVICES = ("cpu", "cuda")


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
        state: every buffer, parameter and input as the run leaves it.
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


@dataclass
class _Run:
    outputs: dict[str, Any]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    changed: frozenset[str]
    loss: float | None
    loss_is_models: bool = field(default=False)


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

    Both runs start from the same buffers and leave parameters, gradients, buffers, inputs, random state and grad mode
    as they were.

    Args:
        reference: the original: a module.
        candidate: a module or a `Split`, sharing the parameters of the reference or holding equal ones.
        args: inputs, each run gets copies.
        seed: random seed of both runs.
        loss: from the output to a scalar; by default the output's own ``loss``, else a weighted sum of its tensors.
        names: parameter names of the candidate -> of the reference, where they are not the same objects; taken from a
            `Split` by itself.
        tolerance: what counts as rounding for gradients, relative to the largest entry of the gradient.
        kwargs: keyword inputs.
    """
    original, other = _module(reference), _module(candidate)
    renamed = names if names is not None else getattr(candidate, "qualified_names", {})
    first = _run(original, args, kwargs, seed, loss, _names(original, original, {}))
    second = _run(other, args, kwargs, seed, loss, _names(original, other, renamed))
    # A split need not hold buffers that its graph never reads; what either run changed must be in both.
    state = (first.state.keys() & second.state.keys()) | first.changed | second.changed
    return Comparison(
        _differences(first.outputs, second.outputs, "output{}"),
        _differences(first.gradients, second.gradients, "gradient of {}"),
        _differences(
            {n: v for n, v in first.state.items() if n in state},
            {n: v for n, v in second.state.items() if n in state},
            "{}",
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
    for name, tensor in _tensors(original):
        canonical[name] = first.setdefault(tensor, name)
    return {n: first.get(t) or canonical.get(renamed.get(n, n), renamed.get(n, n)) for n, t in _tensors(other)}


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _run(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int,
    loss: Callable[[Any], Tensor] | None,
    names: Mapping[str, str],
) -> _Run:
    with _untouched(module), torch.random.fork_rng():
        torch.manual_seed(seed)
        inputs = _Inputs((args, kwargs))
        args, kwargs = inputs.rebuilt
        before = _state(module, inputs.passed, names)
        ambient = _ambient()
        output = module(*args, **kwargs)
        left = _ambient()
        _set_ambient(ambient)
        leaves = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(output)[0]}
        outputs = {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in leaves.items()}
        own = loss is None and isinstance(getattr(output, "loss", None), Tensor)
        value = output.loss if own else loss(output) if loss else _weighted_sum(leaves)
        if isinstance(value, Tensor) and value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
        after = _state(module, inputs.passed, names)
        return _Run(
            {**outputs, **{f", {name} afterwards": value for name, value in left.items()}},
            _gradients(module, inputs.leaves, names),
            after,
            frozenset(n for n, v in after.items() if not _bitwise(before[n], v)),
            float(value.detach()) if isinstance(value, Tensor) else None,
            own,
        )


class _Inputs:
    """Copies of the inputs.

    One that requires grad is passed on as a non-leaf, so that models which write to their inputs still run.

    Attributes:
        leaves: the tensors that receive gradients, by name.
        passed: the tensors that the model sees, by name.
        rebuilt: the inputs in their original structure.
    """

    def __init__(self, inputs: Any) -> None:
        flat, spec = pytree.tree_flatten_with_path(inputs)
        self.leaves: dict[str, Tensor] = {}
        self.passed: dict[str, Tensor] = {}
        values: list[Any] = []
        for path, value in flat:
            if isinstance(value, Tensor):
                name = f"input {pytree.keystr(path)}"
                self.leaves[name] = value.detach().clone().requires_grad_(value.requires_grad)
                value = self.leaves[name].clone() if value.requires_grad else self.leaves[name]
                self.passed[name] = value
            values.append(value)
        self.rebuilt = pytree.tree_unflatten(values, spec)


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Run with empty gradients; put gradients, parameters and buffers back afterwards."""
    gradients = {p: p.grad for p in module.parameters()}
    values = {t: t.detach().clone() for t in (*module.parameters(), *module.buffers())}
    ambient = _ambient()
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        _set_ambient(ambient)
        with torch.no_grad():
            for tensor, value in values.items():
                if tensor.grad_fn is not None and not tensor._is_view():
                    tensor.detach_()  # a buffer that the model wrote a differentiable value into
                if not _bitwise(tensor, value):
                    tensor.data.copy_(value)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _ambient() -> dict[str, Any]:
    """The state that a graph may leave changed for its caller."""
    state: dict[str, Any] = {"grad mode": torch.is_grad_enabled()}
    for device in _AUTOCAST_DEVICES:
        state[f"autocast on {device}"] = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return state


def _set_ambient(state: Mapping[str, Any]) -> None:
    torch.set_grad_enabled(state["grad mode"])
    for device in _AUTOCAST_DEVICES:
        enabled, dtype = state[f"autocast on {device}"]
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _weighted_sum(leaves: Mapping[str, Any]) -> Tensor | None:
    """A scalar that gives every entry of every output its own weight, so that no gradient cancels."""
    total: Tensor | None = None
    for value in leaves.values():
        if isinstance(value, Tensor) and value.requires_grad:
            real = torch.view_as_real(value) if value.is_complex() else value
            wide = real.float() if real.dtype.itemsize < 4 else real
            weights = torch.cos(torch.arange(real.numel(), dtype=wide.dtype, device=real.device))
            term = (wide.flatten() * weights).sum()
            total = term if total is None else total + term
    return total


def _gradients(module: nn.Module, inputs: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor | None]:
    """By the name in the original; a parameter with several names or places counts once, its gradient is one."""
    found: dict[str, Tensor | None] = {name: t.grad for name, t in inputs.items() if t.is_leaf and t.requires_grad}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found[names[name]] = parameter.grad
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def _state(module: nn.Module, inputs: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    own = {f"value of {names[name]}": tensor for name, tensor in _tensors(module)}
    return {name: t.detach().clone() for name, t in {**own, **inputs}.items()}


def _differences(first: Mapping[str, Any], second: Mapping[str, Any], title: str) -> tuple[Difference, ...]:
    names = dict.fromkeys([*first, *second])
    return tuple(_difference(title.format(n), first.get(n), second.get(n)) for n in names)


def _difference(name: str, a: Any, b: Any) -> Difference:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        equal = type(a) is type(b) and a == b
        return Difference(name, 0.0 if equal else math.inf, 0.0, equal)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return Difference(name, math.inf, 0.0, False)
    bitwise = _bitwise(a, b)
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    largest = float((x - y).abs().nan_to_num(math.inf).max()) if a.numel() and not bitwise else 0.0
    return Difference(name, largest, float(x.abs().max()) if a.numel() else 0.0, bitwise)


def _bitwise(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, so that equal NaNs are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)
