"""Copy example inputs so that a model may write to the copies, which share memory as the originals do."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitkit import _torch
from splitkit._torch import FakeTensor, pytree
from splitkit.graph.storages import byte_range, overlapping, storage_key


def copy_inputs(inputs: Any) -> Any:
    """Copy the tensors among inputs; repeated tensors stay repeated, and views of one memory stay views."""
    copies: dict[int, Tensor] = {}
    for sharing in _by_memory(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)):
        alone = len(sharing) == 1
        copies |= {id(t): _copy(t) for t in sharing} if alone else _copies_of_one_memory(sharing)
    return pytree.tree_map_only(Tensor, lambda t: copies[id(t)], inputs)


class Copy(NamedTuple):
    """A copy of an input.

    Attributes:
        given: the tensor to pass to the model. It is not a leaf that requires grad, so that the model may write to it.
        leaf: the tensor that receives the gradient; for overlapping tensors, all of their memory as one flat tensor.
    """

    given: Tensor
    leaf: Tensor


def copies_with_leaves(tensors: Iterable[Tensor]) -> dict[int, Copy]:
    """Return ``id`` of a tensor -> its copy; copies share memory where the tensors overlap."""
    copies: dict[int, Copy] = {}
    groups = (overlapping(sharing) if len(sharing) > 1 else [sharing] for sharing in _by_memory(tensors))
    for group in chain.from_iterable(groups):
        if len(group) == 1:
            tensor = group[0]
            leaf = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            copies[id(tensor)] = Copy(leaf.clone() if tensor.requires_grad else leaf, leaf)
        elif len({t.dtype for t in group}) > 1:  # no leaf has two dtypes
            made = _copies_of_one_memory(group)
            copies |= {number: Copy(tensor, tensor) for number, tensor in made.items()}
        else:
            copies |= _views_of_a_leaf(group)
    return copies


def _views_of_a_leaf(tensors: list[Tensor]) -> dict[int, Copy]:
    """Return views, each at its own place, of one copy of the memory range that the tensors cover."""
    first = tensors[0]
    size = first.element_size()
    starts, stops = zip(*map(byte_range, tensors), strict=True)
    start, stop = min(starts) // size, max(stops) // size
    leaf = first.detach().as_strided((stop - start,), (1,), start).clone()
    leaf.requires_grad_(any(t.requires_grad for t in tensors))
    whole = leaf.clone() if leaf.requires_grad else leaf
    copies: dict[int, Copy] = {}
    for tensor in tensors:
        memory = whole if tensor.requires_grad else whole.detach()
        given = memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - start)
        copies[id(tensor)] = Copy(given, leaf)
    return copies


def has_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is a storage with sizes, strides and an offset, and nothing else."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    return plain and not (isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.is_mkldnn)


def _by_memory(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors, each once, by their storage; a tensor without plain memory is a group of its own."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        groups.setdefault(storage_key(tensor) if has_plain_memory(tensor) else id(tensor), []).append(tensor)
    return groups.values()


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copied.clone() if _is_computed(tensor) else copied


def _copies_of_one_memory(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Return views of one copy of the memory, each at its own place in it."""
    memo: dict[int, Any] = {}
    copies = {id(t): copy.deepcopy(t.detach(), memo) for t in tensors}
    if not any(map(_torch.is_view, tensors)) or len({t.dtype for t in tensors}) > 1:
        return {id(t): copies[id(t)].requires_grad_(t.requires_grad) for t in tensors}
    # Autograd and AOTAutograd treat views differently from other tensors that share memory: views must stay views.
    base = torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)
    base.set_(copies[id(tensors[0])].untyped_storage())
    base = base.requires_grad_().clone() if any(map(_is_computed, tensors)) else base
    return {id(t): base.as_strided(t.size(), t.stride(), t.storage_offset()) for t in tensors}


def _is_computed(tensor: Tensor) -> bool:
    """Return whether a tensor is no leaf of autograd, and may therefore be written in place."""
    return tensor.requires_grad and not tensor.is_leaf
