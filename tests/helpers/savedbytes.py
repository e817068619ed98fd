"""What eager autograd really keeps: storages seen by hooks in a real run, for the tests of memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class _Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history, in the same memory."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


class Parts(torch.fx.Interpreter):
    """Runs a split module, and measures each part on its own while it is at it: ``measure(part, arguments)``."""

    def __init__(self, gm: torch.fx.GraphModule, measure: Callable[[Any, Any], Any]) -> None:
        super().__init__(gm)
        self.rows: list[Any] = []
        self._measure = measure

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        part = self.fetch_attr(target)
        self.rows.append(self._measure(part, pytree.tree_map_only(torch.Tensor, alone, args)))
        return pytree.tree_map_only(torch.Tensor, alone, part(*args, **kwargs))


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes."""
    found = (t.untyped_storage() for t in tensors)
    return {s.data_ptr(): s.nbytes() for s in found if s.nbytes()}


def kept_by_autograd(
    module: nn.Module, run: Callable[[], Any], held: Iterable[torch.Tensor] = (), outputs: bool = False
) -> int:
    """Bytes that a run keeps for backward, and of what is held besides; no parameters and buffers of the module."""
    kept: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _Kept:
        made = _Kept(tensor)
        kept.add(made)
        return made

    gc.disable()  # then all that the run makes is of the youngest generation, which takes no time to collect
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: k.tensor):
            result = run()
        gc.collect(0)
    finally:
        gc.enable()
    found = storages([*(k.tensor for k in kept), *held, *(tensors_of(result) if outputs else ())])
    own = storages([*module.parameters(), *module.buffers()])
    return sum(nbytes for place, nbytes in found.items() if place not in own)
