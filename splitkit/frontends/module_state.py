"""Save the buffers of a module before a run and restore them afterwards: values, shapes, dtypes and names.

A first call may change more than values: it may resize a buffer (the observers of quantisation-aware training), change
a dtype, or create the parameters and buffers of a lazy module. TorchScript modules hold their buffers in C++.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def write_back(tensor: Tensor, value: Tensor) -> None:
    """Restore value, shape and dtype of a tensor; its storage is kept if the dtype is the same."""
    with torch.no_grad():
        if tensor.dtype != value.dtype or (tensor.shape != value.shape and tensor.requires_grad):
            # neither copy_ nor resize_ can change a dtype, or the size of a tensor that requires grad
            tensor.data = value.clone()
            return
        if tensor.shape != value.shape:
            tensor.resize_(value.shape)
        if not torch.equal(tensor, value):
            tensor.data.copy_(value)


@contextmanager
def buffers_kept(model: nn.Module, sizes: bool = True) -> Iterator[None]:
    """Restore all buffers afterwards; those of lazy modules get the values that they were created with.

    Args:
        model: the module.
        sizes: whether to restore buffers that changed shape or dtype; otherwise these stay as the run left them.
    """
    buffers = ((m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None)
    held = [(m, name, b, b.detach().clone()) for m, name, b in buffers if not is_lazy(b)]
    with ExitStack() as hooks:
        made = [hooks.enter_context(_as_made(m)) for m in model.modules() if _is_uninitialised(m)]
        try:
            yield
        finally:
            for module, name, buffer, value in held:
                if buffer.grad_fn is not None:
                    buffer.detach_()
                if sizes or (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                    write_back(buffer, value)
                if not isinstance(module, torch.jit.ScriptModule):
                    module._buffers[name] = buffer
            for values in made:
                for buffer, value in values:
                    write_back(buffer, value)


def made_by_hooks(owner: nn.Module) -> set[str]:
    """Return the names of attributes that a torch hook recomputes from parameters before each forward."""
    hooks = owner._forward_pre_hooks.values()  # 2.11, 2.13, 2.15
    return {hook.name for hook in hooks if isinstance(hook, SpectralNorm | WeightNorm)}


def _is_uninitialised(module: nn.Module) -> bool:
    """Return whether a module is lazy and was never called."""
    return any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False))))


@contextmanager
def _as_made(module: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record the buffers of a lazy module with their values, once its own hook, which runs first, has created them."""
    found: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, args: Any) -> None:
        if not found:
            made = [b for b in module._buffers.values() if b is not None and not is_lazy(b)]
            found.extend((b, b.detach().clone()) for b in made)

    with module.register_forward_pre_hook(note):
        yield found
