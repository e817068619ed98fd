"""Captures a model whose parameters are on ``meta``: inputs and buffers go there too, and buffers keep their values.

A checkpoint has no buffers that are in no state dict, such as the ``inv_freq`` of rotary embeddings, so their values
must be known when weights are loaded. A buffer that is still real when the model is captured keeps its value; the
models of transformers compute theirs again (``_init_weights``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from splitkit._torch import FakeTensor, attributes_of, pytree


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model has parameters, all on ``meta``."""
    found = list(model.parameters())
    return bool(found) and all(p.is_meta and not isinstance(p, FakeTensor) for p in found)


def inputs_on_meta(model: nn.Module, inputs: Any) -> Any:
    """Return inputs for a model, moved to ``meta`` if its parameters are there."""
    if not is_on_meta(model) or any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(inputs)):
        return inputs
    return pytree.tree_map_only(torch.Tensor, _on_meta, inputs)


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Move the buffers of a model to ``meta`` in a ``with`` block, if its parameters are there.

    Yields:
        Name of a buffer that is in no state dict -> its value on the CPU, as far as it is known.
    """
    values: dict[str, torch.Tensor] = {}
    if not is_on_meta(model):
        yield values
        return
    moved: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        held = attributes_of(module)
        again = None
        for name, buffer in held.buffers.items():
            if buffer is None or isinstance(buffer, FakeTensor):
                continue
            if name in held.unsaved:
                again = _computed_again(model, module) if again is None and buffer.is_meta else again
                known = (again or {}).get(name) if buffer.is_meta else buffer.detach().cpu().clone()
                if known is not None:
                    values[f"{path}.{name}".lstrip(".")] = known
            if not buffer.is_meta:
                moved.setdefault(id(buffer), _on_meta(buffer))
                replaced.append((held.buffers, name, buffer))
    try:
        for table, name, buffer in replaced:
            table[name] = moved[id(buffer)]
        yield values
    finally:
        for table, name, buffer in replaced:
            table[name] = buffer


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def _computed_again(model: nn.Module, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that the model's own initialization of a module fills, by name.

    It runs on two copies of the module filled with different numbers: what differs afterwards was not filled.
    """
    fill = next((m for m in _owners(model, module) if callable(getattr(m, "_init_weights", None))), None)
    if fill is None:
        return {}
    made: list[dict[str, torch.Tensor]] = []
    for number in (0, 1):
        copied = copy.copy(module)
        tables = attributes_of(copied)
        fresh = {
            name: torch.full(b.shape, number, dtype=b.dtype, device="cpu") if b is not None else None
            for name, b in tables.buffers.items()
        }
        copied.__dict__["_buffers"] = fresh
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
                fill._init_weights(copied)
        except Exception:
            # The initialization is the model's own code, which may need what a bare module lacks.
            return {}
        made.append({name: b for name, b in fresh.items() if b is not None})
    first, second = made
    return {name: b for name, b in first.items() if torch.equal(b, second[name])}


def _owners(model: nn.Module, module: nn.Module) -> Iterator[Any]:
    """Yield the modules that have a module inside, the innermost first."""
    around = [m for m in model.modules() if any(inner is module for inner in m.modules())]
    yield from reversed(around)
