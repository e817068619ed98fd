"""Classes of what may share memory, by union-find; and what objects that are no tensors hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import cast

import torch


class Classes:
    """Union-find with path halving over nodes, storages and tokens."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        """The class of an item: the same for all that are joined with it."""
        parent = self.parent
        if item not in parent:
            parent[item] = item
            return item
        while parent[item] is not item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, a: Hashable, b: Hashable) -> None:
        """Make two classes one."""
        self.parent[self.find(a)] = self.find(b)


_CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict, torch.Size)
_PLAIN = (
    *(torch.Tensor, torch.nn.Module, torch.Generator, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(int, float, complex, bool, str, bytes, type(None), slice, range, type(Ellipsis)),
)


def held_in(value: object) -> Iterable[torch.Tensor]:
    """The tensors in a list, tuple, set or dict, which may be attributes of the graph under another name."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def is_plain(value: object) -> bool:
    """Whether it shows which tensors it holds; an object of another class may hold some where nobody sees them."""
    return all(isinstance(leaf, _PLAIN) for leaf in _leaves(value))


def _leaves(value: object) -> Iterable[object]:
    """What a container holds, containers in it followed; or the value itself."""
    left, seen = [value], set[int]()
    while left:
        item = left.pop()
        if type(item) not in _CONTAINERS:
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            left += item.values() if isinstance(item, dict) else cast(Iterable[object], item)
