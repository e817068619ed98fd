"""Count the bytes that a node's kernel reads and writes, if every byte is moved once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from math import prod

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.costs.formulas.flop_count import Count, only_written
from splitkit.graph.byte_sizes import elements, storage_bytes, tensor_bytes
from splitkit.graph.fake_calls import hints, op_name, target_of, value_in
from splitkit.graph.storages import registered_tensors, storage_key, tensors
from splitkit.graph.symbols import value_of

GATHERS = frozenset(("embedding", "index_select", "gather", "index", "_unsafe_index", "take", "take_along_dim"))
"""Ops that read as many bytes of their table as they yield."""

SCATTERS = frozenset(
    ("index_put_", "_index_put_impl_", "_unsafe_index_put_", "index_copy_", "index_add_", "scatter_", "scatter_add_")
)
"""Ops that touch as many bytes of their target as their source has."""

OVERWRITES = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"))
"""Ops that write their first argument without reading it."""

_SHAPED = ("_like", "_strided")  # zeros_like(x) takes the shape of x


def operands(root: fx.GraphModule, node: Node) -> list[torch.Tensor]:
    """Return the tensors that ``node`` takes: arguments in order, then its module's parameters and buffers."""
    args = fx.map_arg((node.args, node.kwargs), lambda n: value_in(root, n))
    given = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return [*given, *(registered_tensors(target_of(root, node)) if node.op == "call_module" else ())]


def written_bytes(root: fx.GraphModule, node: Node, count: Count) -> int:
    """Return the bytes of written results (no views, no uninitialized memory), or of arguments written instead."""
    made, fresh = list(tensors(value_of(node))), count.fresh
    if not made and count.written:
        written = fx.map_arg(only_written(node.target, node.args, node.kwargs), partial(value_in, root))
        return sum(map(tensor_bytes, tensors(written)))
    if fresh == ():
        return 0
    if fresh is None or len(fresh) != len(made):  # it could not be run: all of it
        return sum(map(tensor_bytes, made))
    return sum(tensor_bytes(t) for t, own in zip(made, fresh, strict=True) if own)


def moved_bytes(root: fx.GraphModule, node: Node, count: Count) -> int:
    """Return the bytes read and written. Memory that arguments share, or that an expanded tensor repeats, counts once.

    A gather reads the rows that it yields, and an in-place scatter touches the rows that it is given.
    """
    written = written_bytes(root, node, count)
    read = operands(root, node)
    name = _name(root, node)
    if not read:
        return written
    if name in SCATTERS:
        return _scattered(read)
    if name in GATHERS or name == "embedding_bag":
        table = _table(node, read)
        others = [t for t in read if t is not table]
        needed = written if name != "embedding_bag" else _rows(table, others)
        return distinct_bytes(others) + min(_touched(table), needed) + written
    if name in OVERWRITES or name.endswith(_SHAPED) or name.startswith("new_"):
        read = read[1:]
    return distinct_bytes(read) + written


def _name(root: fx.GraphModule, node: Node) -> str:
    """Return the name of a node's op, the same for op, function and module: ``"embedding"``."""
    target = target_of(root, node)
    if isinstance(target, nn.Module):
        return {nn.Embedding: "embedding", nn.EmbeddingBag: "embedding_bag"}.get(type(target), "")
    return op_name(target).removeprefix("_") if op_name(target) == "_embedding_bag" else op_name(target)


def _table(node: Node, read: list[torch.Tensor]) -> torch.Tensor:
    """Return the table of a gather: the largest tensor of the result's dtype that it reads."""
    made = next(tensors(value_of(node)), None)
    return max(read, key=lambda t: (made is not None and t.dtype == made.dtype, tensor_bytes(t)))


def _rows(table: torch.Tensor, others: list[torch.Tensor]) -> int:
    """Return the bytes of the table's rows that the indices in ``others[0]`` select."""
    named = elements(others[0]) if others else 0
    return named * (tensor_bytes(table) // max(1, hints(table.shape[:1])[0]))


def _scattered(read: list[torch.Tensor]) -> int:
    changed, *given = read
    source = max((elements(t) for t in given), default=0) * changed.element_size()
    return distinct_bytes(given) + min(tensor_bytes(changed), source)


def distinct_bytes(read: Iterable[torch.Tensor]) -> int:
    """Return the bytes that tensors cover: equal views count once, overlapping ones at most as their storage."""
    views: dict[Hashable, dict[Hashable, torch.Tensor]] = {}
    for tensor in read:
        place = hints((*tensor.shape, *tensor.stride(), tensor.storage_offset())) if _strided(tensor) else id(tensor)
        views.setdefault(storage_key(tensor), {})[place] = tensor
    return sum(min(sum(map(_touched, same.values())), *map(storage_bytes, same.values())) for same in views.values())


def _strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


def _touched(tensor: torch.Tensor) -> int:
    """Return the bytes of distinct memory, as a dimension of stride 0 repeats the same elements."""
    if not _strided(tensor):
        return tensor_bytes(tensor)
    sizes, strides = hints(tensor.shape), hints(tensor.stride())
    return prod(n for n, step in zip(sizes, strides, strict=True) if step or not n) * tensor.element_size()
