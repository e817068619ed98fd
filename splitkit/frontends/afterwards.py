"""Graphs of one model, one after another: what a later one writes to, an earlier one must not need in backward.

Between two graphs of Dynamo's, and in the second, a model may write to a buffer, an input or an activation that the
first one read. Eager autograd has saved what it needs by then; a plan that computes it again from that tensor would
read the new value, which autograd refuses in backward::

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
class Written:
    """What was written to after a graph had run: positions among its inputs and outputs."""

    inputs: frozenset[int]
    outputs: frozenset[int]

    def nodes(self, joint: fx.Graph) -> list[Node]:
        """What lies in that memory; all inputs, or outputs, if AOTAutograd does not say where one is."""
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
    """Watches the runs of compiled graphs, by their number, until `stop`."""

    _runs: list[tuple[int, Sequence[Any], Sequence[Any]]] = field(default_factory=list)
    _versions: list[tuple[list[int], list[int]]] = field(default_factory=list)
    _on: bool = True

    def saw(self, number: int, inputs: Sequence[Any], outputs: Any) -> None:
        """A graph has run."""
        if self._on:
            given = outputs if isinstance(outputs, tuple | list) else (outputs,)
            self._runs.append((number, tuple(inputs), tuple(given)))
            self._versions.append((_versions(inputs), _versions(given)))

    def stop(self) -> Mapping[int, Written]:
        """The graphs after which something of theirs was written to."""
        self._on = False
        found: dict[int, Written] = {}
        for (number, inputs, outputs), (before, yielded) in zip(self._runs, self._versions, strict=True):
            changed = Written(_changed(inputs, before), _changed(outputs, yielded))
            if changed.inputs or changed.outputs:
                known = found.get(number, Written(frozenset(), frozenset()))
                found[number] = Written(known.inputs | changed.inputs, known.outputs | changed.outputs)
        self._runs.clear()
        self._versions.clear()
        return found


def needed(pair: Pair, written: Collection[Node], names: Sequence[str]) -> list[str]:
    """What a pair hands to backward of what lies in the memory of these nodes; inputs go by ``names``."""
    nodes, memory = {n.name: n for n in pair.forward.graph.nodes}, storages_shown(written)
    found = [nodes[name] for name in pair.saved if not memory.isdisjoint(storages_shown([nodes[name]]))]
    positions = {n.name: aot.input_position(n) for n in found if n.op == "placeholder"}
    return [n.name if (i := positions.get(n.name)) is None or i >= len(names) else names[i] for n in found]


def refused(names: Sequence[str]) -> PlanError:
    """SK215."""
    return PlanError(
        "SK215",
        f"backward needs {', '.join(names)}, which the model writes to in a later graph, after forward has saved it",
        "Read a copy (buffer.clone()), write to it after backward, or remove the graph break between: "
        "TORCH_LOGS=graph_breaks says where.",
        list(names),
    )


def _versions(values: Iterable[Any]) -> list[int]:
    return [v._version if isinstance(v, Tensor) and not v.is_inference() else 0 for v in values]


def _changed(values: Sequence[Any], before: list[int]) -> frozenset[int]:
    return frozenset(i for i, (now, then) in enumerate(zip(_versions(values), before, strict=True)) if now != then)
