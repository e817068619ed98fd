"""Divides a model into the blocks between which it may be cut, and says which memory holds the weights of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

_SCALED = 128
"""Narrow weights have one scale for so many values in a row (4 bits) or for a square of that side (8 bits)."""


@dataclass(frozen=True)
class Weight:
    """The memory of one parameter or buffer; tied weights share one.

    Attributes:
        nbytes: its bytes.
        trained: the bytes of its gradient, 0 if it is not trained.
        narrow: bits -> bytes if it were stored with 8 or 4 bits a value; only for matrices in the
            items of lists: embeddings and heads stay as they are.
    """

    nbytes: int
    trained: int
    narrow: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class ModelBlock:
    """A module that stays whole.

    Attributes:
        name: its dotted path in the model, ``""`` for the model itself.
        module: the module.
        weights: identity of memory -> what it holds.
    """

    name: str
    module: nn.Module
    weights: Mapping[int, Weight]


def blocks_of(model: nn.Module, stored: Mapping[int, int] = MappingProxyType({})) -> list[ModelBlock]:
    """Return the blocks of a model in the order in which they are defined.

    These are the items of the outermost lists of modules (`ModuleList` and `Sequential` of several modules), and the
    modules that stand beside these lists or their parents. A model without such a list is one block. Parameters that
    a parent itself holds belong to its first block.

    Args:
        model: the model.
        stored: identity of memory -> bytes of it if these differ from the model's.
    """
    return [ModelBlock(name, module, _weights(own, listed, stored)) for name, module, own, listed in _found(model, "")]


_Tensors = list[tuple[nn.Module, Tensor]]


def _found(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, _Tensors, bool]]:
    """Yield path, module and weights of each block below a module, and whether it is the item of a list."""
    if not any(map(_is_list, module.modules())):
        yield path, module, list(_tensors(module, deep=True)), False
        return
    own = list(_tensors(module, deep=False))
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        below = [(at, child, list(_tensors(child, deep=True)), True)] if _is_list(module) else _found(child, at)
        for where, block, tensors, listed in below:
            yield where, block, own + tensors, listed
            own = []


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1


def _tensors(module: nn.Module, deep: bool) -> Iterator[tuple[nn.Module, Tensor]]:
    for owner in module.modules() if deep else (module,):
        held = (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
        yield from ((owner, tensor) for tensor in held)


def _weights(tensors: Iterable[tuple[nn.Module, Tensor]], listed: bool, stored: Mapping[int, int]) -> dict[int, Weight]:
    found: dict[int, Weight] = {}
    for owner, tensor in tensors:
        nbytes = stored.get(memory_key(tensor), tensor.untyped_storage().nbytes())
        trained = tensor.numel() * tensor.element_size() if tensor.requires_grad else 0
        found[memory_key(tensor)] = Weight(nbytes, trained, _narrow(owner, tensor, nbytes) if listed else {})
    return found


def memory_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, while the tensor lives."""
    return id(tensor.untyped_storage())


def _narrow(owner: nn.Module, tensor: Tensor, nbytes: int) -> dict[int, int]:
    """Return the bytes of a matrix, or a stack of them, with 8 bits and 4 bits a value, with scales."""
    values = tensor.numel()
    if tensor.ndim < 2 or isinstance(owner, nn.Embedding) or not tensor.is_floating_point():
        return {}
    rows, columns = tensor.shape[-2:]
    squares = values // (rows * columns) * -(-rows // _SCALED) * -(-columns // _SCALED) if values else 0
    groups = -(-columns // _SCALED) * (values // columns) if values else 0
    eight, four = values + 4 * squares, -(-values // 2) + 2 * groups
    return {bits: wanted for bits, wanted in ((8, eight), (4, four)) if wanted < nbytes}
