"""Number the storages of a joint graph, once for all questions of what is alive, saved or recomputed."""

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
from splitkit.graph.fake_runs import values_again
from splitkit.graph.storages import attribute, shares_memory, tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.kernels.kernel_results import Bytes, ResultAliases, as_seen, storages_of
from splitkit.memory.kernels.strides import kernel_strides
from splitkit.memory.kernels.temporaries import Temporaries, may_decompose

STATIC = -1
"""The slot of storages that the caller holds throughout: parameters, inputs, and views of them."""


@dataclass(frozen=True, eq=False)
class JointStorages:
    """Which node makes which storage, and which nodes yield it again, as kernels do. It does not depend on the plan.

    A *slot* is a pair of a node and a storage that its value lies in. A storage is known by the slot of its maker, its
    *root*. Slots of one storage are distinct because the halves may hold two copies of it: a view that backward takes
    from forward lies in forward's copy, while the base that backward recomputes lies in its own.

    Attributes:
        index: node -> position in the graph, by which nodes are known below.
        slots: node -> its slots, numbered over all nodes.
        source: slot -> the slot of the same storage at an input of the node; `STATIC` if the storage is the caller's;
            the slot itself if the node makes the storage.
        root: slot -> the slot of the storage's maker, or `STATIC`.
        maker: slot -> the node that yields it.
        sizes: slot -> its bytes if the node makes it, perhaps symbolic; else 0.
        nbytes: the same as plain numbers, as seen at capture.
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
        """Number the storages of a graph, which must not be edited afterwards."""
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
        """Node -> its slots, without those that are `STATIC`."""
        return [tuple(s for s in slots if self.source[s] != STATIC) for slots in self.slots]

    def under(self, node: Node) -> tuple[int, ...]:
        """Return the storages that a node's value lies in, each once, without the caller's."""
        return tuple(dict.fromkeys(self.root[slot] for slot in self.made[self.index[node]]))


class _Numbering:
    """The slots of the nodes so far; ``keys`` maps a node to storage key -> slot."""

    def __init__(self, flow: Dataflow) -> None:
        self.keys: dict[Node, dict[Hashable, int]] = {}
        self.source: list[int] = []
        self.root: list[int] = []
        self.maker: list[int] = []
        self.sizes: list[Bytes] = []
        self.nbytes: list[int] = []
        self._flow, self._again, self._strides_found = flow, _values_again(flow), kernel_strides(flow.root, {})
        self._temporaries = Temporaries({})

    def add(self, node: Node) -> None:
        """Number the storages of a node's value."""
        root = self._flow.root
        value = None if node.op == "output" else self._again.get(node, value_of(node))
        if node.op == "get_attr" and value is None:
            value = attribute(root, str(node.target))
        read = {r: self.keys[r] for r in node.all_input_nodes}
        results = storages_of(root, node, list(tensors(value)), read, self._aliases(node))
        self.keys[node] = {p.key: self._slot(node, len(self.keys), p.nbytes, p.held, p.tensor) for p in results}

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

    def _aliases(self, node: Node) -> ResultAliases:
        """Return which arguments' memory the results of a composite op share, found by running it on fake tensors."""
        if not isinstance(node.target, _torch.OpOverload) or not may_decompose(node.target):
            return None
        regions = [r for r in self._flow.scope[node].regions if r.target is _torch.ENTER_AUTOCAST]
        return self._temporaries(self._flow.root, node, regions, self._strides_found).aliases


def _values_again(flow: Dataflow) -> Mapping[Node, Any]:
    """Return values that show which share memory, if the graph's do not; none if it cannot run on fake tensors."""
    try:
        return {} if shares_memory(flow.root) else values_again(flow.root)
    except GraphError:
        return {}
