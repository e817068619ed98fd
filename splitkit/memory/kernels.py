"""What kernels do otherwise than the fake tensors of a graph say: whose memory a result is, and how much it takes.

The values of a captured graph come from decompositions in Python, which keep to shapes and dtypes and no more::

    op                     fake                      kernel
    dropout(x, p, False)   a copy                    x itself
    channel_shuffle(x, 1)  a view of x               a copy
    mse_loss(x, y)         one number                one number, in the memory of all the differences

A composite op is asked: its C++ code runs on fakes (`splitkit.memory.temporaries`). Of all others the schema says
whether they return memory of their own, and the table below which of them take more than they show. It was found by
running every op that torch has samples of, and compares by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.graph.fakecalls import value_in
from splitkit.graph.ops import effects_of
from splitkit.graph.sizes import storage_bytes, storage_nbytes
from splitkit.graph.storages import must_share, storage_key, tensors
from splitkit.graph.symbols import value_of

Bytes = int | torch.SymInt
Lender = tuple[Node, Hashable]
"""A node that is read, and which of its storages."""


Gives = Sequence[int | None] | None
"""For each tensor of a result, which of the tensors among the arguments shares memory with it: none for ``None``."""


@dataclass(frozen=True)
class Piece:
    """One storage of a result.

    Attributes:
        key: what its value knows it by.
        held: the number of the storage of an input that it is; ``None`` if it is new.
        nbytes: its bytes if it is new, perhaps symbolic.
        tensor: the first tensor of the result that lies in it.
    """

    key: Hashable
    held: int | None
    nbytes: Bytes
    tensor: torch.Tensor


def storages_of(
    root: nn.Module,
    node: Node,
    value: Sequence[torch.Tensor],
    read: Mapping[Node, Mapping[Hashable, int]],
    gives: Gives = None,
) -> list[Piece]:
    """The storages of a result, each once.

    Args:
        root: the module of the graph.
        node: what yields the result.
        value: the tensors of the result, as the graph has them.
        read: what the node reads -> the numbers of its storages, by what its value knows them by.
        gives: what was seen when the node ran on fakes; ``None`` if it did not.
    """
    found: dict[Hashable, Piece] = {}
    origins = _origins(root, node, gives)
    if origins is None or len(origins) != len(value):
        origins = [_AS_SHOWN] * len(value)
    for tensor, origin in zip(value, origins, strict=True):
        key = storage_key(tensor)
        shown = next((held[key] for held in read.values() if key in held), None)
        held = _viewed(node, read) if shown is None else shown
        if origin is None:
            held = None
        elif origin is not _AS_SHOWN:
            held = read.get(origin[0], {}).get(origin[1], shown)
        copied = held is None and shown is not None  # its value shows the storage of what it is a copy of
        nbytes = tensor.numel() * tensor.element_size() if copied else bytes_made(node, tensor)
        found.setdefault(key, Piece(key, held, nbytes, tensor))
    return list(found.values())


_AS_SHOWN: Any = object()


def _viewed(node: Node, read: Mapping[Node, Mapping[Hashable, int]]) -> int | None:
    """The storage that a view is of, where its value does not show it: of a constant, of which a fake was made anew."""
    if not node.all_input_nodes or not must_share(node.target):
        return None
    numbers = set(read.get(node.all_input_nodes[0], {}).values())
    return numbers.pop() if len(numbers) == 1 else None


def _origins(root: nn.Module, node: Node, gives: Gives) -> Sequence[Lender | None] | None:
    """Whose memory each tensor of a result is, ``None`` for its own; nothing if what its value shows is right."""
    target = node.target
    if not isinstance(target, _torch.OpOverload) or target.namespace != "aten":
        return None
    if not _torch.is_composite(target):
        return None if effects_of(node, root).aliases else [None] * len(list(tensors(value_of(node))))
    if gives is None or _open(node):
        return None
    read = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, Node)]
    given = [(n, storage_key(t)) for n in read for t in tensors(value_in(root, n))]
    return [None if i is None else given[i] for i in gives]


def _open(node: Node) -> bool:
    """Whether only the data decides a size: on fakes another one stood for it."""
    sizes = (s for n in (node, *node.all_input_nodes) for t in tensors(value_of(n)) for s in t.shape)
    return any(node_of.hint is None for s in sizes if (node_of := getattr(s, "node", None)))  # SymInt: 2.11, 2.13, 2.15


def bytes_made(node: Node, tensor: torch.Tensor) -> Bytes:
    """Bytes of the storage that a node makes for a result, perhaps symbolic."""
    if node.target not in _LARGER:
        return storage_nbytes(tensor)
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    return bytes_made_by(node.target, args, kwargs, tensor)


def bytes_made_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: torch.Tensor) -> Bytes:
    """The same of a call of an op."""
    rule = _LARGER.get(op)
    return storage_nbytes(tensor) if rule is None else rule(_bound(op, args, kwargs), tensor)


def shows_all(op: Any) -> bool:
    """Whether what an op makes is as large as the fakes show that it yields."""
    return op not in _LARGER


def hinted_bytes(node: Node, tensor: torch.Tensor) -> int:
    """`bytes_made`, as seen at capture."""
    return as_seen(bytes_made(node, tensor), tensor)


def as_seen(nbytes: Bytes, tensor: torch.Tensor) -> int:
    """Bytes of the storage of a tensor as a plain number: `storage_bytes` where only the data decides them."""
    try:
        return _torch.size_hint(nbytes)
    except TypeError:
        return storage_bytes(tensor)


def _bound(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name of a parameter -> what is given for it, or its default."""
    arguments = _torch.schema_of(op).arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**defaults, **dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}


Rule = Callable[[Mapping[str, Any], torch.Tensor], Bytes]


def _reduced(*names: str) -> Rule:
    """A loss of which each element is computed into the result, which is shrunk to one number afterwards."""

    def rule(given: Mapping[str, Any], tensor: torch.Tensor) -> Bytes:
        shapes = [given[name].shape for name in names if isinstance(given[name], torch.Tensor)]
        if given["reduction"] == 0 or not shapes:
            return storage_nbytes(tensor)
        elements: Bytes = prod(_broadcast(shapes))
        return elements * tensor.element_size()

    return rule


def _whole(given: Mapping[str, Any], tensor: torch.Tensor) -> Bytes:
    """A tensor with some of its elements replaced: its whole storage is copied, if no two elements share memory."""
    copied = given["self"]
    if not isinstance(copied, torch.Tensor) or any(isinstance(s, int) and s == 0 for s in copied.stride()):
        return storage_nbytes(tensor)
    return storage_nbytes(copied)


def _as_large_as(name: str) -> Rule:
    """A kernel that makes a tensor like an argument and resizes it, which never gives memory back."""

    def rule(given: Mapping[str, Any], tensor: torch.Tensor) -> Bytes:
        argument, shown = given[name], storage_nbytes(tensor)
        most: Bytes = torch.sym_max(argument.numel() * tensor.element_size(), shown)  # type: ignore[no-untyped-call]
        return most

    return rule


def _bags(given: Mapping[str, Any], tensor: torch.Tensor) -> Bytes:
    """Of the results that say which bag an element is in, and how large bags are, some have one number more."""
    one_more = tensor.ndim == 1 and (tensor.shape == given["indices"].shape or given["include_last_offset"])
    return storage_nbytes(tensor) + (tensor.element_size() if one_more and tensor.dtype == torch.int64 else 0)


def _broadcast(shapes: Sequence[Sequence[Bytes]]) -> list[Bytes]:
    """The common shape; of two sizes one may be 1, and no symbol is asked whether it is."""
    found: list[Bytes] = []
    for i in range(1, max(map(len, shapes)) + 1):
        sizes = [shape[-i] for shape in shapes if len(shape) >= i]
        found.append(next((size for size in sizes if not (isinstance(size, int) and size == 1)), 1))
    return found


def _op(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


_aten = torch.ops.aten
_LARGER: Mapping[Any, Rule] = {
    _aten.mse_loss.default: _reduced("self", "target"),
    _aten.smooth_l1_loss.default: _reduced("self", "target"),
    _aten.binary_cross_entropy.default: _reduced("self"),
    _aten.soft_margin_loss.default: _reduced("target"),
    _aten.im2col.default: _as_large_as("self"),
    _aten.col2im.default: _as_large_as("self"),
    _op("_embedding_bag"): _bags,
    _op("_embedding_bag_forward_only"): _bags,
    _op("_efficientzerotensor"): lambda given, tensor: 0,
    _aten.slice_scatter.default: _whole,
    _aten.select_scatter.default: _whole,
    _aten.diagonal_scatter.default: _whole,
}
