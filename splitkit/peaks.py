"""The peak of a plan for a joint graph, to the byte, before any module is made of it.

`splitkit.simulate` runs the graphs of a pair. Here the same run is done for a plan, fast enough to be asked often: who
shares whose storage does not depend on the plan, and is found once for the joint graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.fx import Node

from splitkit.backward_order import BackwardOrder
from splitkit.costs.sizes import tensors
from splitkit.effects import attribute, storage_key
from splitkit.fakes import values_again
from splitkit.halves import BACKWARD, FORWARD, JointFlow, homes
from splitkit.plan import PartKey, Plan
from splitkit.sharing import shares_memory
from splitkit.simulate import Run
from splitkit.symbols import concrete, value_of
from splitkit.tags import honour

Ints = npt.NDArray[np.int64]
STATIC = -1
"""The buffer of what the caller holds throughout: parameters, inputs, and views of them."""


@dataclass(frozen=True)
class Trace:
    """A simulated run of forward and backward.

    Attributes:
        baseline: bytes that the caller holds throughout: parameters, inputs, gradients of outputs.
        timeline: bytes alive while each step runs, the baseline included.
        steps: the node of each step, as its position in the graph.
        forward: how many of the steps are forward's.
        maker: for each buffer that is made in the run, the node that makes it, as its position in the graph.
        nbytes: bytes of each buffer.
        born: the step that makes it.
        dies: the step after which it is freed; the number of steps if the caller holds it.
        saved: whether forward leaves it for backward.
    """

    baseline: int
    timeline: Ints
    steps: Ints
    forward: int
    maker: Ints
    nbytes: Ints
    born: Ints
    dies: Ints
    saved: npt.NDArray[np.bool_]

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return int(self.timeline.max(initial=self.baseline))

    @property
    def saved_bytes(self) -> int:
        """Bytes that forward leaves for backward, beyond inputs and parameters."""
        return int(self.nbytes[self.saved].sum())

    def alive(self, step: int) -> Ints:
        """The buffers that are there while ``step`` runs."""
        return np.flatnonzero((self.born <= step) & (step <= self.dies))


class Peaks:
    """Simulates plans for one joint graph. The graph must not change meanwhile.

    Attributes:
        flow: the facts about the graph.
        slots: for each node, by position in the graph, the storages that it yields, as numbers.
        source: storage as a node yields it -> the same storage as an input of that node yields it, ``STATIC`` if it is
            the caller's, itself if the node makes it.
        nbytes: bytes of each.
    """

    def __init__(self, flow: JointFlow) -> None:
        self.flow = flow
        self.nodes: tuple[Node, ...] = tuple(flow.graph.nodes)
        self.slots: list[tuple[int, ...]] = []
        self.source: list[int] = []
        self.nbytes: list[int] = []
        self._maker: list[int] = []
        self._static: dict[object, int] = {}
        self._number()
        reads = ((flow.index[r] for r in node.all_input_nodes) for node in self.nodes)
        self._touched = [self._dynamic(self.slots[j] for j in found) for found in reads]
        self._made = [self._dynamic([slots]) for slots in self.slots]
        self._transient = self._transients()
        self._computed = [n in flow.scope and n.op not in ("placeholder", "get_attr") for n in self.nodes]
        self._order = BackwardOrder(flow)

    def _number(self) -> None:
        """Give every storage that a node yields a number, and find whose it is."""
        again = {} if shares_memory(self.flow.root) else values_again(self.flow.root)
        keys: dict[Node, dict[object, int]] = {}
        for position, node in enumerate(self.nodes):
            value = again[node] if node in again else value_of(node)
            found: dict[object, int] = {}
            if node.op == "get_attr":
                found = self._attribute(node)
            for tensor in tensors(value) if node.op != "output" else ():
                key = storage_key(tensor)
                if key not in found:
                    found[key] = self._slot(node, key, tensor, position, [keys[r] for r in node.all_input_nodes])
            keys[node] = found
            self.slots.append(tuple(found.values()))

    def _slot(
        self, node: Node, key: object, tensor: torch.Tensor, position: int, read: Sequence[Mapping[object, int]]
    ) -> int:
        number, nbytes = len(self.source), 0
        shared = next((slots[key] for slots in read if key in slots), None)
        if shared is not None:
            self.source.append(STATIC if self.source[shared] == STATIC else shared)
        elif node.op in ("placeholder", "get_attr"):
            self.source.append(STATIC)
            self._static.setdefault(key, _storage_bytes(tensor))
        else:
            self.source.append(number)
            nbytes = _storage_bytes(tensor)
        self.nbytes.append(nbytes)
        self._maker.append(position)
        return number
