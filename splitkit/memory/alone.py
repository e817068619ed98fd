"""One call of an op on fakes of its own: where what autograd saves for it lies, and which result keeps it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.fx import Node

from splitkit._torch import FakeTensor
from splitkit.graph.sizes import storage_nbytes
from splitkit.graph.storages import storage_key
from splitkit.memory.kernels import hinted_bytes

T = TypeVar("T")


class Unlike(Exception):
    """The graph holds what a call alone does not show."""


class Layout(NamedTuple):
    """All that an op can see of a tensor but its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    requires_grad: bool


class _Kept:
    """Stands in the graph of autograd for a tensor that a call saves; it lives as long as it is kept."""

    __slots__ = ("__weakref__",)


class Alone:
    """A call on fakes of its own.

    Attributes:
        nbytes: of the storages that it makes, as far as they are saved or yielded.
    """

    def __init__(self, node: Node, fakes: Sequence[torch.Tensor], args: Any, kwargs: Any) -> None:
        self.nbytes: list[int] = []
        self._node, self._fakes, self._args, self._kwargs = node, fakes, args, kwargs
        self._places: dict[Hashable, int] = {storage_key(fake): i for i, fake in enumerate(fakes)}

    def run(self) -> tuple[Any, list[tuple[int, weakref.ref[_Kept]]]]:
        """What it yields, and where what it saves lies, in order, and whether that is still kept."""
        return self._run(self.place)

    def _run(self, place: Callable[[torch.Tensor], int]) -> tuple[Any, list[tuple[int, weakref.ref[_Kept]]]]:
        saved: list[tuple[int, weakref.ref[_Kept]]] = []

        def pack(tensor: torch.Tensor) -> _Kept:
            kept = _Kept()
            saved.append((place(tensor), weakref.ref(kept)))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, _never):
            return self._node.target(*self._args, **self._kwargs), saved  # type: ignore[operator]

    def kept_by(self, which: int) -> list[bool]:
        """For each tensor that it saves whether the tensor ``which`` of its results alone keeps it."""
        result, saved = self._run(lambda tensor: 0)
        tensor = tensors(result)[which]
        del result
        alive = [kept() is not None for _, kept in saved]
        del tensor
        return alive

    def place(self, tensor: torch.Tensor, made_by: Node | None = None) -> int:
        """The argument in whose storage a tensor lies, ``~i`` for the new storage i."""
        key = storage_key(tensor)
        if key not in self._places:
            shown = layout_of(tensor).nbytes
            self._places[key] = ~len(self.nbytes)
            self.nbytes.append(shown if made_by is None else max(shown, hinted_bytes(made_by, tensor)))
        return self._places[key]

    def which(self, tensor: torch.Tensor) -> int | None:
        """The argument that a tensor is."""
        return next((i for i, fake in enumerate(self._fakes) if fake is tensor), None)

    def reached(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The arguments that backward reaches from a tensor."""
        todo: list[Any] = [tensor.grad_fn] if tensor.grad_fn is not None else []
        seen, found = set(todo), set[int]()
        while todo:
            step = todo.pop()
            if getattr(step, "__dict__", None):
                raise Unlike  # a function in Python, which may keep tensors as attributes
            if (leaf := getattr(step, "variable", None)) is not None:
                found.update(i for i, fake in enumerate(self._fakes) if fake is leaf)
            fresh = {after for after, _ in step.next_functions if after is not None} - seen
            seen |= fresh
            todo += fresh
        return tuple(sorted(found))


def _never(kept: _Kept) -> torch.Tensor:
    raise NotImplementedError("a call reads in forward what it has saved for backward")


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))
CONSTANTS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def mapped(tree: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """A tree with the leaves of a kind changed.

    Raises:
        Unlike: if other leaves than these are no constants.
    """
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, tuple | list):
        found = [mapped(leaf, change, kind) for leaf in tree]
        return tuple(found) if isinstance(tree, tuple) else found
    if isinstance(tree, dict):
        return {key: mapped(leaf, change, kind) for key, leaf in tree.items()}
    if type(tree) not in CONSTANTS:
        raise Unlike
    return tree


def leaves(tree: Any, kind: type[T]) -> list[T]:
    """The leaves of a kind."""
    if isinstance(tree, kind):
        return [tree]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [leaf for member in inside for leaf in leaves(member, kind)]


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree, in order."""
    return leaves(tree, torch.Tensor)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a fake tensor."""
    if type(tensor) is not FakeTensor or tensor.is_conj() or tensor.is_neg():
        raise Unlike
    return _layout(tensor, tensor.storage_offset(), storage_nbytes(tensor))


def dense_layout_of(tensor: Any) -> Layout:
    """The layout of what is like a tensor in a storage of its own, that begins with it."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        raise Unlike
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return _layout(tensor, 0, (steps + 1) * tensor.element_size() if tensor.numel() else 0)


def _layout(tensor: torch.Tensor, offset: int | torch.SymInt, nbytes: int | torch.SymInt) -> Layout:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.layout is not torch.strided or not all(isinstance(n, int) for n in (*shape, *stride, offset, nbytes)):
        raise Unlike
    return Layout(shape, stride, int(offset), tensor.dtype, tensor.device, int(nbytes), tensor.requires_grad)


def fake(layout: Layout) -> torch.Tensor:
    """A tensor of that layout, in a storage of its own."""
    made = torch.empty(layout.nbytes // layout.dtype.itemsize, dtype=layout.dtype, device=layout.device)
    placed = made.as_strided(layout.shape, layout.stride, layout.offset).detach()
    if layout_of(placed.requires_grad_(layout.requires_grad)) != layout:
        raise Unlike
    return placed
