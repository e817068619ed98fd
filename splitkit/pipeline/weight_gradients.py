"""Bounds the bytes that a stage holds between the input part and the weight part of a divided backward.

Torch's ``stage_backward_input`` runs the autograd graph down to the inputs and keeps it for ``stage_backward_weight``,
with all saved values except those of nodes between the output and the last node that reads a parameter. It also
captures the gradient of each value at which the path of a parameter meets the path of an input::

    x ── linear ── gelu ── linear ── add ── out       captured: the gradients of both linears and of out (the second
     └───────────────────────────────┘               linear and out have one: an addend has the gradient of the sum)

With separate graphs for the two parts (as in *Zero Bubble Pipeline Parallelism*, Qi et al. 2023), only the values that
nodes with parameters saved are needed, and the gradients of their results. If the input part also finishes the
gradients of norms and biases, which are quick reductions of large values, only those of products are
(`splitkit.policies.SplitBackward`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.checks import is_word, shown
from splitkit.errors import PolicyError
from splitkit.graph.fake_calls import op_name, target_of
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.segments.graph_memory import GraphMemory, is_dense
from splitkit.memory.segments.order_tables import NodeMemory

WeightPart = Literal["torch", "own", "mincut"]
"""How backward is divided: by torch's pipelining; by separate graphs for the two parts, of which the weight part has
all that the input part does not need (``"own"``); or by graphs with the fewest bytes in between (``"mincut"``)."""

# Ops whose backward is a product for each factor.
_PRODUCTS = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addmv", "__matmul__", "convolution"),
        *("_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

_Gradient = tuple[Node, bool]
"""The memory of a gradient: the value, and whether its gradient comes from the next stage."""


def checked_weight_part(way: object) -> None:
    """Raise SK302 for an unknown way to divide backward."""
    if not is_word(way, "torch", "own", "mincut"):
        raise PolicyError("SK302", f"weight_part is {shown(way)}", "Use 'torch', 'own' or 'mincut'.")


def is_product(root: nn.Module, node: Node) -> bool:
    """Whether a node of a forward graph is a matrix product or a convolution."""
    target = target_of(root, node)
    return isinstance(target, _LAYERS) if isinstance(target, nn.Module) else op_name(target) in _PRODUCTS


def deferred_bytes(
    memory: GraphMemory,
    parts: Sequence[Sequence[Node]],
    homes: Mapping[Node, int],
    saved: Sequence[int],
    way: WeightPart,
) -> list[int]:
    """Return upper bounds on the bytes that each stage holds from the end of the input part to the end of the weight
    part.

    Torch's way includes the received and the sent gradients, and runs no input part in the first stage.

    Args:
        memory: the memory of the graph's nodes, with training.
        parts: the nodes of each stage in order.
        homes: node -> the stage whose copy others read, for nodes in several stages.
        saved: stage -> its saved bytes.
        way: how backward is divided.
    """
    stages = _Stages(memory, parts, homes)
    found = []
    for number, nbytes in enumerate(saved):
        stage = _Stage(stages, number)
        found.append(stage.by_torch(nbytes) if way == "torch" else stage.by_own_graphs(products=way == "mincut"))
    return found


@dataclass(frozen=True)
class _Stages:
    """Which stage makes and reads which value."""

    memory: GraphMemory
    parts: Sequence[Sequence[Node]]
    homes: Mapping[Node, int]

    @cached_property
    def lives(self) -> dict[Node, tuple[int, int]]:
        """Value -> the stage whose copy is sent, and the last stage that receives it."""
        lives: dict[Node, tuple[int, int]] = {}
        for number, nodes in enumerate(self.parts):
            for node in nodes:
                if self.homes.get(node, number) == number:
                    lives |= dict.fromkeys(self.memory.nodes[node].makes, (number, number))
        for number in range(len(self.parts)):
            for value in self.taken(number):
                lives[value] = lives[value][0], max(number, lives[value][1])
        for value in self.outputs.intersection(lives):  # the last stage hands it out
            lives[value] = lives[value][0], len(self.parts) - 1
        return lives

    @cached_property
    def outputs(self) -> frozenset[Node]:
        """The outputs of the graph: the loss, or the values from which it is computed."""
        return frozenset(self.memory.flow.graph.output_node().all_input_nodes)

    def made(self, stage: int) -> set[Node]:
        """Return the values that a stage makes."""
        return {made for node in self.parts[stage] for made in self.memory.nodes[node].makes}

    def taken(self, stage: int) -> set[Node]:
        """Return the values of other stages that a stage reads."""
        read = {value for node in self.parts[stage] for value in self.memory.nodes[node].reads}
        return {value for value in read - self.made(stage) if value.op != "placeholder"}

    def crossing(self, stage: int) -> list[Node]:
        """Return the values with a gradient that go from a stage to the next one."""
        requires = self.memory.activations.requires
        return [v for v, (home, last) in self.lives.items() if home <= stage < last and v in requires]


class _Stage:
    """The gradients of one stage."""

    def __init__(self, stages: _Stages, number: int) -> None:
        self._all, self._number = stages, number
        self._nodes: dict[Node, NodeMemory] = {node: stages.memory.nodes[node] for node in stages.parts[number]}
        self._made = stages.made(number)
        self._given = stages.crossing(number)
        self._come = stages.crossing(number - 1)
        self._readers: dict[Node, list[Node]] = {}
        for node, touched in self._nodes.items():
            for read in touched.contributes:
                if isinstance(read, Node):
                    self._readers.setdefault(read, []).append(node)
        # A reader of memory that was written depends on the writer, but the graph does not show it.
        effects = stages.memory.flow.effects
        self._writes = any(effects[node].writes for node, touched in self._nodes.items() if touched.contributes)

    def by_torch(self, saved: int) -> int:
        """See `deferred_bytes`."""
        came = [(value, True) for value in self._given]
        if not self._number:
            return saved + self._sum(came)
        captures = self._captures()
        gradients = [*map(self._memory, self._results(captures)), *map(self._sent, self._come)]
        return saved - self._released(captures) + self._sum([*came, *gradients])

    def by_own_graphs(self, products: bool) -> int:
        """See `deferred_bytes`."""
        nodes = [node for node in self._nodes if self._trains(node) and (not products or self._defers(node))]
        kept = {storage for node in nodes for storage in self._nodes[node].saves}
        return self._storages(kept) + self._sum(self._memory(v) for v in self._results(nodes))

    def _trains(self, node: Node) -> bool:
        return any(not isinstance(read, Node) for read in self._nodes[node].contributes)

    def _defers(self, node: Node) -> bool:
        """Whether a node with parameters has a weight gradient that takes time: a product, or all of its backward."""
        values = [read for read in self._nodes[node].contributes if isinstance(read, Node)]
        return not values or is_product(self._all.memory.flow.root, node)

    def _captures(self) -> list[Node]:
        """Return the nodes at which the path of a parameter meets the path of an input of the stage."""
        depends, found = set(self._come), []
        for node, touched in self._nodes.items():
            reads = [r for r in touched.contributes if isinstance(r, Node) and r.op != "placeholder"]
            meets = any(read in depends for read in reads)
            if meets:
                depends.update(touched.makes)
            trains = self._trains(node)
            if (trains and self._writes) or (meets and (trains or any(read not in depends for read in reads))):
                found.append(node)
        return found

    def _results(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """Return the values with a gradient that nodes make."""
        requires = self._all.memory.activations.requires
        return (made for node in nodes for made in self._nodes[node].makes if made in requires)

    def _memory(self, value: Node) -> _Gradient:
        """Return the memory of a value's gradient: a later value if an op passes it on and nothing is added."""
        while True:
            readers = self._readers.get(value, [])
            if value in self._given:
                return value, not readers
            ends = value in self._all.outputs  # a loss may add its own
            if ends or len(readers) != 1 or not self._is_handed(readers[0], value):
                return value, False
            (value,) = self._nodes[readers[0]].makes

    def _sent(self, value: Node) -> _Gradient:
        """Return the memory of a gradient that is sent upstream: `_memory`, or a copy where that is not contiguous."""
        found = self._memory(value)
        alike = self._nbytes(found[0]) == self._nbytes(value)
        ends = [t for v in (value, found[0]) for t in tensors(value_of(v))]
        plain = found[0] in self._given or all(is_dense(t, any_order=False) for t in ends)
        return found if alike and plain else (value, False)

    def _is_handed(self, node: Node, value: Node) -> bool:
        touched = self._nodes[node]
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        once = sum(leaf is value for leaf in leaves) == 1 and len(touched.makes) == 1
        return once and value in touched.handed and not self._writes

    def _sum(self, gradients: Iterable[_Gradient]) -> int:
        return sum(self._nbytes(value) for value, _ in set(gradients))

    def _nbytes(self, value: Node) -> int:
        wide = (self._nodes[node].wide.get(value, 0) for node in self._readers.get(value, ()))
        return max(self._all.memory.bytes_of(value), *wide, 0)

    def _released(self, captures: Sequence[Node]) -> int:
        """Return the bytes that torch frees: those saved only by nodes after all captures by detaching the output."""
        if self._writes:
            return 0
        below = set(captures)
        for node in reversed(self._nodes):
            if node not in below:
                readers = (r for made in self._nodes[node].makes for r in self._readers.get(made, ()))
                below |= {node} & {node for reader in readers if reader in below}
        kept = {s for node in below for s in self._nodes[node].saves}
        values = self._all.memory.activations.values
        held = (
            *(v for touched in self._nodes.values() for v in touched.reads if v not in self._made),
            *self._yielded(),
        )
        kept |= {s for value in held for s in values.get(value, ())}
        return self._storages({s for touched in self._nodes.values() for s in touched.saves} - kept)

    def _yielded(self) -> Iterator[Node]:
        """Return the values that a later stage reads, or that are outputs of the graph."""
        lives = self._all.lives
        return (v for v in self._made if v in self._all.outputs or lives[v][1] > self._number)

    def _storages(self, numbers: Iterable[int]) -> int:
        return sum(self._all.memory.storage_sizes[number] for number in numbers)
