"""What a stage holds between the two parts of a backward that is divided: for the input, and later for the weights.

Torch's ``stage_backward_input`` runs the graph of autograd down to the inputs and keeps it for
``stage_backward_weight``: all that was saved, but for what only lies between the output and the last node that reads a
parameter; and it captures the gradient of each value at which the way of a parameter meets that of an input::

    x ── linear ── gelu ── linear ── add ── out       captured: the gradients of both linears and of out (the second
     └───────────────────────────────┘               linear and out have one: an addend has the gradient of the sum)

Graphs of one's own (as in *Zero Bubble Pipeline Parallelism*, Qi et al. 2023) need only what the nodes that read a
parameter saved, and the gradients of their results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch.fx import Node

from splitkit._torch import pytree
from splitkit.checks import is_word, shown
from splitkit.errors import PolicyError
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.lines import Units, lies_together
from splitkit.memory.linetables import LineNode

WeightPart = Literal["torch", "own"]
"""Who divides backward: torch's pipelining, or graphs of one's own for the two parts."""

_Gradient = tuple[Node, bool]
"""The memory of a gradient: that of a value, as it came from the next stage or as it is here."""


def checked_weight_part(way: object) -> None:
    """Raise SK302 for a way that is not known."""
    if not is_word(way, "torch", "own"):
        raise PolicyError("SK302", f"weight_part is {shown(way)}", "Use 'torch' or 'own'.")


def deferred_bytes(
    units: Units,
    parts: Sequence[Sequence[Node]],
    homes: Mapping[Node, int],
    saved: Sequence[int],
    way: WeightPart,
) -> list[int]:
    """Bytes that each stage holds from the end of the input part to the end of the weight part, from above.

    By torch's way with the gradients that came and those that go back, and no input part in the first stage.

    Args:
        units: of the graph, with training.
        parts: the nodes of each stage in order.
        homes: node -> the stage whose copy others read, for nodes that stand in several.
        saved: what each stage has saved.
        way: who divides backward.
    """
    stages = _Stages(units, parts, homes)
    found = []
    for number, nbytes in enumerate(saved):
        stage = _Stage(stages, number)
        found.append(stage.by_torch(nbytes) if way == "torch" else stage.by_own_graphs())
    return found


@dataclass(frozen=True)
class _Stages:
    """Who reads what of whom."""

    units: Units
    parts: Sequence[Sequence[Node]]
    homes: Mapping[Node, int]

    @cached_property
    def lives(self) -> dict[Node, tuple[int, int]]:
        """Value -> the stage whose copy is sent, and the last one to which it goes."""
        lives: dict[Node, tuple[int, int]] = {}
        for number, nodes in enumerate(self.parts):
            for node in nodes:
                if self.homes.get(node, number) == number:
                    lives |= dict.fromkeys(self.units.units[node].makes, (number, number))
        for number in range(len(self.parts)):
            for value in self.taken(number):
                lives[value] = lives[value][0], max(number, lives[value][1])
        for value in self.outputs.intersection(lives):  # the last stage hands it out
            lives[value] = lives[value][0], len(self.parts) - 1
        return lives

    @cached_property
    def outputs(self) -> frozenset[Node]:
        """What the graph yields: the loss, or what it is made of."""
        return frozenset(self.units.flow.graph.output_node().all_input_nodes)

    def made(self, stage: int) -> set[Node]:
        """The values that a stage makes."""
        return {made for node in self.parts[stage] for made in self.units.units[node].makes}

    def taken(self, stage: int) -> set[Node]:
        """The values of other stages that a stage reads."""
        read = {value for node in self.parts[stage] for value in self.units.units[node].reads}
        return {value for value in read - self.made(stage) if value.op != "placeholder"}

    def crossing(self, stage: int) -> list[Node]:
        """The values with a gradient that go from a stage to the next one."""
        requires = self.units.activations.requires
        return [v for v, (home, last) in self.lives.items() if home <= stage < last and v in requires]


class _Stage:
    """The gradients of one stage."""

    def __init__(self, stages: _Stages, number: int) -> None:
        self._all, self._number = stages, number
        self._units: dict[Node, LineNode] = {node: stages.units.units[node] for node in stages.parts[number]}
        self._made = stages.made(number)
        self._given = stages.crossing(number)
        self._come = stages.crossing(number - 1)
        self._readers: dict[Node, list[Node]] = {}
        for node, unit in self._units.items():
            for read in unit.contributes:
                if isinstance(read, Node):
                    self._readers.setdefault(read, []).append(node)
        # What reads memory that was written before stands behind the writer, which the graph does not show.
        effects = stages.units.flow.effects
        self._writes = any(effects[node].writes for node, unit in self._units.items() if unit.contributes)

    def by_torch(self, saved: int) -> int:
        """See `deferred_bytes`."""
        came = [(value, True) for value in self._given]
        if not self._number:
            return saved + self._sum(came)
        captures = self._captures()
        gradients = [*map(self._memory, self._results(captures)), *map(self._sent, self._come)]
        return saved - self._released(captures) + self._sum([*came, *gradients])

    def by_own_graphs(self) -> int:
        """See `deferred_bytes`."""
        nodes = [node for node in self._units if self._trains(node)]
        kept = {storage for node in nodes for storage in self._units[node].saves}
        return self._storages(kept) + self._sum(self._memory(v) for v in self._results(nodes))

    def _trains(self, node: Node) -> bool:
        return any(not isinstance(read, Node) for read in self._units[node].contributes)

    def _captures(self) -> list[Node]:
        """The nodes at which parameters meet what depends on an input of the stage."""
        depends, found = set(self._come), []
        for node, unit in self._units.items():
            reads = [r for r in unit.contributes if isinstance(r, Node) and r.op != "placeholder"]
            meets = any(read in depends for read in reads)
            if meets:
                depends.update(unit.makes)
            trains = self._trains(node)
            if (trains and self._writes) or (meets and (trains or any(read not in depends for read in reads))):
                found.append(node)
        return found

    def _results(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """The values with a gradient that nodes make."""
        requires = self._all.units.activations.requires
        return (made for node in nodes for made in self._units[node].makes if made in requires)

    def _memory(self, value: Node) -> _Gradient:
        """Where the gradient of a value lies: in that of a later value, if that is handed on and nothing is added."""
        while True:
            readers = self._readers.get(value, [])
            if value in self._given:
                return value, not readers
            ends = value in self._all.outputs  # a loss may add its own
            if ends or len(readers) != 1 or not self._is_handed(readers[0], value):
                return value, False
            (value,) = self._units[readers[0]].makes

    def _sent(self, value: Node) -> _Gradient:
        """The same of a gradient that goes back: it lies side by side there, and is copied where it does not."""
        found = self._memory(value)
        alike = self._nbytes(found[0]) == self._nbytes(value)
        ends = [t for v in (value, found[0]) for t in tensors(value_of(v))]
        plain = found[0] in self._given or all(lies_together(t, turned=False) for t in ends)
        return found if alike and plain else (value, False)

    def _is_handed(self, node: Node, value: Node) -> bool:
        unit = self._units[node]
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        once = sum(leaf is value for leaf in leaves) == 1 and len(unit.makes) == 1
        return once and value in unit.handed and not self._writes

    def _sum(self, gradients: Iterable[_Gradient]) -> int:
        return sum(self._nbytes(value) for value, _ in set(gradients))

    def _nbytes(self, value: Node) -> int:
        wide = (self._units[node].wide.get(value, 0) for node in self._readers.get(value, ()))
        return max(self._all.units.bytes_of(value), *wide, 0)

    def _released(self, captures: Sequence[Node]) -> int:
        """Bytes that only nodes behind all that captures have saved: torch detaches the output."""
        if self._writes:
            return 0
        below = set(captures)
        for node in reversed(self._units):
            if node not in below:
                readers = (r for made in self._units[node].makes for r in self._readers.get(made, ()))
                below |= {node} & {node for reader in readers if reader in below}
        kept = {s for node in below for s in self._units[node].saves}
        values = self._all.units.activations.values
        held = (*(v for unit in self._units.values() for v in unit.reads if v not in self._made), *self._yielded())
        kept |= {s for value in held for s in values.get(value, ())}
        return self._storages({s for unit in self._units.values() for s in unit.saves} - kept)

    def _yielded(self) -> Iterator[Node]:
        """The values that the stage gives: to a later one, or as outputs of the graph."""
        lives = self._all.lives
        return (v for v in self._made if v in self._all.outputs or lives[v][1] > self._number)

    def _storages(self, numbers: Iterable[int]) -> int:
        return sum(self._all.units.storage_sizes[number] for number in numbers)
