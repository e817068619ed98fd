"""Capture models that change at their first call: they hook submodules, or create buffers and parameters.

Tracing such a model traces the changes too, and fails. The model is then called once for real, and traced again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from splitkit._torch import FakeTensor, pytree
from splitkit.errors import SplitError
from splitkit.frontends.capture.forward_hooks import CONTAINERS, hook_state_restored, is_same, restorer
from splitkit.frontends.input_copies import copy_inputs
from splitkit.frontends.module_state import buffers_kept

Captured = TypeVar("Captured")


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Restore the attributes, hooks and children of all modules afterwards: tracing leaves fake tensors in them.

    What forward hooks of the user can reach is restored as well.
    """
    restorers = [*map(restorer, _contents(model))]
    with hook_state_restored(model):
        try:
            yield
        finally:
            for restore in restorers:
                restore()


def retry_after_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], capture: Callable[[], Captured]
) -> Captured:
    """Return ``capture()``; if it fails and a call of the model changes the model, try once more after that call."""
    try:
        with attributes_restored(model):
            return capture()
    except Exception as error:
        lost = isinstance(error, SplitError) and error.code == "SK410"  # a call would really do what was refused
        if lost or not _is_changed_by_a_call(model, args, kwargs):
            raise
    with attributes_restored(model):
        return capture()


def parameters_and_names(model: nn.Module) -> tuple[list[int], list[str]]:
    """Return ids of parameters and names of buffers, which stay the same where a run rebinds a buffer."""
    return [id(p) for p in model.parameters()], [name for name, _ in model.named_buffers()]


def are_real(model: nn.Module, inputs: Any) -> bool:
    """Return whether the model can run for real: no tensor is fake or on the meta device."""
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(inputs)]
    return not any(isinstance(t, FakeTensor) or (isinstance(t, torch.Tensor) and t.is_meta) for t in tensors)


def _is_changed_by_a_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if not are_real(model, (args, kwargs)):
        return False
    # Compare identities before and after one call: a new buffer, hook or child is a change, a new value is not.
    held, modules = [(now, copy.copy(now)) for now in _contents(model)], list(model.modules())
    sizes = _sizes(model)
    with buffers_kept(model, sizes=False):
        try:
            call_once(model, args, kwargs)
        except Exception:  # any error: that of the capture says more
            return False
    same = len(list(model.modules())) == len(modules) and sizes == _sizes(model)
    return not (same and all(is_same(now, before) for now, before in held))


def _sizes(model: nn.Module) -> list[tuple[object, ...]]:
    """Return shapes and dtypes of the buffers: a first call may resize them in place."""
    return [(tuple(b.shape), b.dtype) for b in model.buffers() if not is_lazy(b)]


def call_once(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run the model on copies of the inputs, and restore the RNG states of torch, NumPy and Python."""
    inputs, named = copy_inputs((args, dict(kwargs)))
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            model(*inputs, **named)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def outputs_of_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the model's output for copies of the inputs; its state and the RNG states are restored."""
    found: list[Any] = []
    handle = model.register_forward_hook(lambda module, given, output: found.append(output))
    try:
        with attributes_restored(model), buffers_kept(model), torch.enable_grad():
            call_once(model, args, kwargs)
    finally:
        handle.remove()
    return found[-1]


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and restore the mode of each module afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _contents(model: nn.Module) -> list[Any]:
    """Return the attribute dicts of all modules and the plain containers in them."""
    return [held for m in model.modules() for held in (vars(m), *vars(m).values()) if type(held) in CONTAINERS]
