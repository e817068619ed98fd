"""Run a module once, forward and backward, from a known state; keep what came of it and put everything back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from splitkit._torch import pytree

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Trial:
    """What came of a run.

    Attributes:
        outputs: every leaf of the output, by its path.
        gradients: of parameters and inputs, by name, where there is one.
        changed: parameters, buffers and inputs that the run wrote to, as it left them.
        state: all of them: the changed ones as the run left them, the others as they are.
        ambient: the grad mode and autocast state that it left its caller.
        loss: what backward started from.
        loss_is_models: whether that is the model's own loss.
    """

    outputs: Mapping[str, Any]
    gradients: Mapping[str, Tensor]
    changed: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    ambient: Mapping[str, Any]
    loss: float | None
    loss_is_models: bool


def trial(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int,
    loss: Callable[[Any], Tensor] | None,
    names: Mapping[str, str],
) -> Trial:
    """Run ``module`` on copies of the inputs; ``names`` says what its parameters and buffers are called."""
    inputs = _Inputs((args, kwargs))
    with _untouched(module) as values, torch.random.fork_rng():
        torch.manual_seed(seed)
        ambient = _ambient()
        output = module(*inputs.rebuilt[0], **inputs.rebuilt[1])
        left = _ambient()
        _set_ambient(ambient)
        leaves = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(output)[0]}
        outputs = {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in leaves.items()}
        own = loss is None and isinstance(getattr(output, "loss", None), Tensor)
        value = output.loss if own else loss(output) if loss else _weighted_sum(leaves)
        if isinstance(value, Tensor) and value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
        gradients = _gradients(module, inputs.leaves, names)
        tensors = {f"value of {names[name]}": t for name, t in named_tensors(module)}
        before = {name: values[t] for name, t in tensors.items()} | inputs.values
        tensors |= inputs.passed
        changed = {name: t.detach().clone() for name, t in tensors.items() if not bitwise(before[name], t)}
    state = {**tensors, **changed}
    return Trial(outputs, gradients, changed, state, left, None if value is None else float(value.detach()), own)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def bitwise(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, so that equal NaNs are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)


class _Inputs:
    """Copies of the inputs.

    One that requires grad is passed on as a non-leaf, so that models which write to their inputs still run.

    Attributes:
        leaves: the tensors that receive gradients, by name.
        passed: the tensors that the model sees, by name.
        values: what these hold before the run: the caller's own tensors.
        rebuilt: the inputs in their original structure.
    """

    def __init__(self, inputs: Any) -> None:
        flat, spec = pytree.tree_flatten_with_path(inputs)
        self.leaves: dict[str, Tensor] = {}
        self.passed: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        rebuilt: list[Any] = []
        for path, value in flat:
            if isinstance(value, Tensor):
                name = f"input {pytree.keystr(path)}"
                self.values[name] = value
                self.leaves[name] = value.detach().clone().requires_grad_(value.requires_grad)
                value = self.leaves[name].clone() if value.requires_grad else self.leaves[name]
                self.passed[name] = value
            rebuilt.append(value)
        self.rebuilt = pytree.tree_unflatten(rebuilt, spec)


@contextmanager
def _untouched(module: nn.Module) -> Iterator[dict[Tensor, Tensor]]:
    """Run with empty gradients; gives the values of all parameters and buffers, and puts them back afterwards."""
    gradients = {p: p.grad for p in module.parameters()}
    values = {t: t.detach().clone() for t in (*module.parameters(), *module.buffers())}
    ambient = _ambient()
    for parameter in gradients:
        parameter.grad = None
    try:
        yield values
    finally:
        _set_ambient(ambient)
        with torch.no_grad():
            for tensor, value in values.items():
                if tensor.grad_fn is not None and not tensor._is_view():
                    tensor.detach_()  # a buffer that the model wrote a differentiable value into
                if not bitwise(tensor, value):
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


def _gradients(module: nn.Module, inputs: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """A parameter with several names or places counts once: its gradient is one."""
    found = {name: t.grad for name, t in inputs.items() if t.is_leaf and t.requires_grad}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found[names[name]] = parameter.grad
    return {name: gradient for name, gradient in found.items() if gradient is not None}
