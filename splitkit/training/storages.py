"""The storages of a joint graph, numbered once for all who ask which bytes are alive, saved or made again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node

from splitkit import _torch
from splitkit.errors import GraphError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.fakeruns import values_again
from splitkit.graph.storages import attribute, shares_memory, tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.kernels import Bytes, Gives, as_seen, storages_of
from splitkit.memory.layouts import layouts
from splitkit.memory.temporaries import Temporaries, is_composite

STATIC = -1
"""What the caller holds throughout: parameters, inputs, and views of them."""


@dataclass(frozen=True, eq=False)
class JointStorages:
    """Who makes which storage, and who yields it again, as kernels do it. It does not depend on the plan.

    A *slot* is a storage as one node yields it. A storage goes by the slot of its maker, its *root*. Slots are told
    apart because halves may have two copies of a storage: a view that backward takes from forward lies in forward's,
    while the base that backward computes again lies in its own.

    Attributes:
        index: node -> position in the graph; nodes go by it below.
        slots: node -> its slots, numbered over all nodes.
        source: slot -> the same storage as an input of that node yields it; `STATIC`, if it is the caller's; itself, if
            the node makes it.
        root: slot -> the storage, or `STATIC`.
        maker: slot -> the node that yields it.
        sizes: slot -> its bytes if the node makes it, perhaps symbolic; else 0.
        nbytes: the same as a plain number, as seen at capture.
    """

    index: Mapping[Node, int]
    slots: tuple[tuple[int, ...], ...]
    source: tuple[int, ...]
    root: tuple[int, ...]
    maker: NDArray[np.int64]
    sizes: tuple[Bytes, ...]
    nbytes: tuple[int, ...]

    @classmethod
    def of(cls, flow: Dataflow) -> JointStorages:
        """Number the storages of a graph, which must not change afterwards."""
        found = _Numbering(flow)
        for node in flow.graph.nodes:
            found.add(node)
        return cls(
            flow.index,
            tuple(tuple(keys.values()) for keys in found.keys.values()),
            tuple(found.source),
            tuple(found.root),
            np.array(found.maker, np.int64),
            tuple(found.sizes),
            tuple(found.nbytes),
        )

    @cached_property
    def made(self) -> list[tuple[int, ...]]:
        """Node -> its slots but those that are `STATIC`."""
        return [tuple(s for s in slots if self.source[s] != STATIC) for slots in self.slots]

    def under(self, node: Node) -> tuple[int, ...]:
        """The storages that a node's value lies in, each once, but for the caller's."""
        return tuple(dict.fromkeys(self.root[slot] for slot in self.made[self.index[node]]))


class _Numbering:
    """The slots of the nodes so far; ``keys`` has what their values know them by."""

    def __init__(self, flow: Dataflow) -> None:
        self.keys: dict[Node, dict[Hashable, int]] = {}
        self.source: list[int] = []
        self.root: list[int] = []
        self.maker: list[int] = []
        self.sizes: list[Bytes] = []
        self.nbytes: list[int] = []
        self._flow, self._again, self._layouts = flow, _values_again(flow), layouts(flow.root, {})
        self._temporaries = Temporaries({})

    def add(self, node: Node) -> None:
        """Number what a node yields."""
        root = self._flow.root
        value = None if node.op == "output" else self._again.get(node, value_of(node))
        if node.op == "get_attr" and value is None:
            value = attribute(root, str(node.target))
        read = {r: self.keys[r] for r in node.all_input_nodes}
        pieces = storages_of(root, node, list(tensors(value)), read, self._gives(node))
        self.keys[node] = {p.key: self._slot(node, len(self.keys), p.nbytes, p.held, p.tensor) for p in pieces}

    def _slot(self, node: Node, position: int, nbytes: Bytes, held: int | None, tensor: torch.Tensor) -> int:
        number = len(self.source)
        makes = held is None and node.op not in ("placeholder", "get_attr")
        source = number if makes else STATIC if held is None or self.source[held] == STATIC else held
        self.source.append(source)
        self.root.append(source if source in (number, STATIC) else self.root[source])
        self.maker.append(position)
        self.sizes.append(nbytes if makes else 0)
        self.nbytes.append(as_seen(nbytes, tensor) if makes else 0)
        return number

    def _gives(self, node: Node) -> Gives:
        """What of its arguments' memory a composite op gives back: its C++ code is asked, on fakes."""
        if not isinstance(node.target, _torch.OpOverload) or not is_composite(node.target):
            return None
        regions = [r for r in self._flow.scope[node].regions if r.target is _torch.ENTER_AUTOCAST]
        return self._temporaries(self._flow.root, node, regions, self._layouts).gives


def _values_again(flow: Dataflow) -> Mapping[Node, Any]:
    """Values that show who shares memory, where those of the graph do not; a graph that runs on no fakes has none."""
    try:
        return {} if shares_memory(flow.root) else values_again(flow.root)
    except GraphError:
        return {}
