"""Copies of example inputs that a model may write to, which share memory with each other as the examples do."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from splitkit import _torch
from splitkit._torch import FakeTensor, pytree
from splitkit.graph.storages import storage_key


def fresh(inputs: Any) -> Any:
    """The inputs with copies of their tensors: the same tensor twice, or views of one memory, stay so."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    distinct = {id(leaf): leaf for leaf in leaves}
    memory: dict[object, list[Tensor]] = {}
    for leaf in distinct.values():
        memory.setdefault(_memory_of(leaf), []).append(leaf)
    copies: dict[int, Tensor] = {}
    for sharing in memory.values():
        alone = len(sharing) == 1
        copies |= {id(t): _copy(t) for t in sharing} if alone else _copies_of_one_memory(sharing)
    return pytree.tree_map_only(Tensor, lambda t: copies[id(t)], inputs)


def _memory_of(tensor: Tensor) -> object:
    """What tensors over one storage have in common; a tensor without plain memory stands alone."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    if not plain or isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.is_mkldnn:
        return id(tensor)
    return storage_key(tensor)


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copied.clone() if _is_made(tensor) else copied


def _copies_of_one_memory(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Views of one copy of the memory, each at its own place in it."""
    memo: dict[int, Any] = {}
    copies = {id(t): copy.deepcopy(t.detach(), memo) for t in tensors}
    if not any(map(_torch.is_view, tensors)) or len({t.dtype for t in tensors}) > 1:
        return {id(t): copies[id(t)].requires_grad_(t.requires_grad) for t in tensors}
    # Autograd and AOTAutograd tell views from other tensors that share memory: views of one base stay so.
    base = torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)
    base.set_(copies[id(tensors[0])].untyped_storage())
    base = base.requires_grad_().clone() if any(map(_is_made, tensors)) else base
    return {id(t): base.as_strided(t.size(), t.stride(), t.storage_offset()) for t in tensors}


def _is_made(tensor: Tensor) -> bool:
    """Whether autograd made it of others: such a tensor may be written in place, a leaf that requires grad may not."""
    return tensor.requires_grad and not tensor.is_leaf
