"""Detect later graphs that overwrite what the backward of an earlier graph needs (SK215).

Between two Dynamo graphs, or in the second, a model may write to a buffer, an input or an activation that the first one
read. Eager autograd has saved what it needs by then; a plan that recomputes from that tensor would read the new value,
which autograd refuses in backward::

    h = linear(x) * buffer.exp()        graph 0: eager saves exp(buffer); a plan may save nothing, and take exp again
    print("step")                       graph break
    buffer.add_(1)                      graph 1
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.fx import Node

from splitkit.engine.pair import Pair
from splitkit.errors import PlanError
from splitkit.frontends import aot
from splitkit.graph.storages import storages_shown


@dataclass(frozen=True)
class LaterWrites:
    """Positions of the inputs and outputs of a graph that were written to after it had run."""

    inputs: frozenset[int]
    outputs: frozenset[int]

    def nodes(self, joint: fx.Graph) -> list[Node]:
        """Return the nodes in that memory; all inputs or outputs, if AOTAutograd does not tell where one is."""
        given = joint.find_nodes(op="placeholder")
        by_position = {aot.input_position(n): n for n in given}
        outputs: Any = joint.output_node().args[0]
        found = [by_position.get(i) for i in self.inputs]
        places = [aot.position_of_output(joint, i) for i in self.outputs]
        nodes = {n for n in found if n is not None} | {outputs[i] for i in places if i is not None}
        if None in found:
            nodes |= {n for n in given if not aot.is_tangent(n)}
        if None in places:
            nodes |= {n for n in outputs[: aot.count_forward_outputs(joint)] if isinstance(n, Node)}
        memory = storages_shown(nodes)
        return [n for n in joint.nodes if n.op != "output" and not memory.isdisjoint(storages_shown([n]))]


@dataclass
class WriteWatch:
    """Records the versions of inputs and outputs of compiled graphs, by number of graph, until `stop`."""

    _runs: list[tuple[int, Sequence[Any], Sequence[Any]]] = field(default_factory=list)
    _versions: list[tuple[list[int], list[int]]] = field(default_factory=list)
    _on: bool = True

    def saw(self, number: int, inputs: Sequence[Any], outputs: Any) -> None:
        """Record the inputs and outputs of a graph that has run."""
        if self._on:
            given = outputs if isinstance(outputs, tuple | list) else (outputs,)
            self._runs.append((number, tuple(inputs), tuple(given)))
            self._versions.append((_versions(inputs), _versions(given)))

    def stop(self) -> Mapping[int, LaterWrites]:
        """Return number of graph -> its inputs and outputs that were written to after it had run."""
        self._on = False
        found: dict[int, LaterWrites] = {}
        for (number, inputs, outputs), (before, yielded) in zip(self._runs, self._versions, strict=True):
            changed = LaterWrites(_changed(inputs, before), _changed(outputs, yielded))
            if changed.inputs or changed.outputs:
                known = found.get(number, LaterWrites(frozenset(), frozenset()))
                found[number] = LaterWrites(known.inputs | changed.inputs, known.outputs | changed.outputs)
        self._runs.clear()
        self._versions.clear()
        return found


def overwritten_saves(pair: Pair, written: Collection[Node], names: Sequence[str]) -> list[str]:
    """Return the saved values of a pair that share memory with ``written``; inputs go by ``names``."""
    nodes, memory = {n.name: n for n in pair.forward.graph.nodes}, storages_shown(written)
    found = [nodes[name] for name in pair.saved if not memory.isdisjoint(storages_shown([nodes[name]]))]
    positions = {n.name: aot.input_position(n) for n in found if n.op == "placeholder"}
    return [n.name if (i := positions.get(n.name)) is None or i >= len(names) else names[i] for n in found]


def overwritten_error(names: Sequence[str]) -> PlanError:
    """Return the SK215 for values that backward needs and that a later graph writes to."""
    return PlanError(
        "SK215",
        f"backward needs {', '.join(names)}, which the model writes to in a later graph, after forward has saved it",
        "Read a copy (buffer.clone()), or write to it after backward.",
        list(names),
    )


def _versions(values: Iterable[Any]) -> list[int]:
    return [v._version if isinstance(v, Tensor) and not v.is_inference() else 0 for v in values]


def _changed(values: Sequence[Any], before: list[int]) -> frozenset[int]:
    return frozenset(i for i, (now, then) in enumerate(zip(_versions(values), before, strict=True)) if now != then)
