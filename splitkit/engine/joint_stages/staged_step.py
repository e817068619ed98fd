"""The result of dividing a training step into pipeline stages: the graphs of each stage, and how they fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from splitkit.graph.byte_sizes import storage_bytes
from splitkit.graph.storages import storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.plans.record import Plan
from splitkit.short_repr import brief, few
from splitkit.units import size


@dataclass(frozen=True)
class StageGraphs:
    """The graphs of one stage. All take and return flat tuples::

        forward(*primals, *received)                        ->  (*outputs, *sent, *saved and deferred)
        backward(*saved, *tangents, *gradients_received)    ->  (*gradients_sent, *gradients, *waiting)
        weight(*deferred, *waiting)                         ->  (*weight_gradients)

    ``tangents`` are given to the last stage only. What forward saves for both graphs of backward it returns once: first
    ``saved``, then what only ``deferred`` has. Nodes keep the names and the ``meta["val"]`` of the joint graph.

    Attributes:
        forward: the forward graph.
        backward: the backward graph; if there is a weight graph, it computes the gradients that leave the stage.
        weight: the graph of the remaining gradients of parameters, which may run much later; ``None`` if backward is
            one graph.
        primals: the parameters, buffers and inputs that the stage is given, by the names of their placeholders.
        received: the activations from the stage before.
        outputs: positions of the outputs of the step that forward returns.
        sent: the activations for the stage after.
        saved: what backward takes from forward.
        deferred: what weight takes from forward.
        gradients_received: the gradients from the stage after.
        gradients_sent: the gradients for the stage before.
        gradients: positions of the gradients that backward returns.
        waiting: what weight takes from backward.
        weight_gradients: positions of the gradients that weight returns.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    weight: fx.GraphModule | None
    primals: tuple[str, ...]
    received: tuple[str, ...]
    outputs: tuple[int, ...]
    sent: tuple[str, ...]
    saved: tuple[str, ...]
    deferred: tuple[str, ...]
    gradients_received: tuple[str, ...]
    gradients_sent: tuple[str, ...]
    gradients: tuple[int, ...]
    waiting: tuple[str, ...]
    weight_gradients: tuple[int, ...]

    __repr__ = brief

    @property
    def held(self) -> tuple[str, ...]:
        """What forward saves for both graphs of backward, in the order in which it returns it."""
        return (*self.saved, *(name for name in self.deferred if name not in self.saved))

    @property
    def saved_bytes(self) -> int:
        """Bytes that forward leaves for backward, each storage once, without what the caller holds."""
        return self._bytes(self.held, self.forward)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait between the two graphs of backward, each storage once, without what the caller holds."""
        if self.weight is None:
            return 0
        return self._bytes((*self.deferred, *self.waiting), self.forward, self.weight)

    @property
    def sent_bytes(self) -> int:
        """Bytes of the activations for the stage after."""
        return self._values(self.sent, self.forward)

    @property
    def gradients_sent_bytes(self) -> int:
        """Bytes of the gradients for the stage before."""
        return self._values(self.gradients_sent, self.backward)

    @staticmethod
    def _values(names: Sequence[str], graph: fx.GraphModule) -> int:
        nodes = {node.name: node for node in graph.graph.nodes}
        return sum(t.nbytes for name in names for t in tensors(value_of(nodes[name])))

    def _bytes(self, names: Sequence[str], *graphs: fx.GraphModule) -> int:
        nodes = {node.name: node for graph in reversed(graphs) for node in graph.graph.nodes}
        own = (nodes[name] for name in self.primals if name in nodes)
        known = {storage_key(t) for node in own for t in tensors(value_of(node))}
        found = {storage_key(t): storage_bytes(t) for name in names for t in tensors(value_of(nodes[name]))}
        return sum(nbytes for key, nbytes in found.items() if key not in known)

    def __str__(self) -> str:
        graphs = [self.forward, self.backward, *([self.weight] if self.weight is not None else [])]
        counts = " + ".join(str(sum(n.op not in ("placeholder", "output") for n in g.graph.nodes)) for g in graphs)
        waits = f", {size(self.waiting_bytes)} wait for the weight graph" if self.weight is not None else ""
        return (
            f"{counts} ops, receives {len(self.received)} and sends {len(self.sent)} activations, saves "
            f"{size(self.saved_bytes)}{waits}"
        )


@dataclass(frozen=True)
class StagedStep:
    """A training step in pipeline stages: a forward graph and one or two backward graphs for each.

    Attributes:
        stages: the graphs of each stage.
        primals: the inputs of forward (parameters, buffers, inputs), by the names of their placeholders, in order.
        tangents: the inputs of backward in the last stage: the gradients of the outputs of the step.
        outputs: the number of outputs of forward.
        constants: position of an output that no stage computes -> its value.
        gradients: the number of outputs of backward; some may be ``None``.
        ties: position of a gradient -> the stages that each compute a term of it, because they share the parameter.
            Their sum is the gradient.
        plan: the complete plan.
    """

    stages: tuple[StageGraphs, ...]
    primals: tuple[str, ...]
    tangents: tuple[str, ...]
    outputs: int
    constants: Mapping[int, Any]
    gradients: int
    ties: Mapping[int, tuple[int, ...]]
    plan: Plan

    __repr__ = brief

    def __str__(self) -> str:
        note = f": {self.plan.note}" if self.plan.note else ""
        lines = (f"stage {i}: {stage}" for i, stage in enumerate(self.stages))
        return "\n".join([f"Training step in {len(self.stages)} stages{note}", *few(lines, "stages")])

    def run(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Run all stages in this process on real values: forward up, backward down, weight graphs last.

        Args:
            primals: the values of `primals`.
            tangents: the values of `tangents`.

        Returns:
            The outputs and the gradients, as `splitkit.Joint.read` takes them together.
        """
        with torch.no_grad():
            outputs, held = self.run_forward(primals)
            return outputs, self.run_backward(held, tangents)

    def run_forward(self, primals: Sequence[Any]) -> tuple[tuple[Any, ...], list[dict[str, Any]]]:
        """Run the forward graphs; return the outputs, and what each stage holds for backward."""
        given = dict(zip(self.primals, primals, strict=True))
        outputs = [self.constants.get(i) for i in range(self.outputs)]
        held: list[dict[str, Any]] = []
        crossing: tuple[Any, ...] = ()
        for stage in self.stages:
            made = list(stage.forward(*(given[name] for name in stage.primals), *crossing))
            for position in stage.outputs:
                outputs[position] = made.pop(0)
            crossing = tuple(made[: len(stage.sent)])
            held.append(dict(zip(stage.held, made[len(stage.sent) :], strict=True)))
        return tuple(outputs), held

    def run_backward(self, held: Sequence[Mapping[str, Any]], tangents: Sequence[Any]) -> tuple[Any, ...]:
        """Run the backward graphs from the last stage down, then the weight graphs; return the gradients."""
        gradients: list[Any] = [None] * self.gradients
        crossing, late = tuple(tangents), []
        for stage, values in zip(reversed(self.stages), reversed(held), strict=True):
            made = list(stage.backward(*(values[name] for name in stage.saved), *crossing))
            crossing = tuple(made[: len(stage.gradients_sent)])
            waiting = len(crossing) + len(stage.gradients)
            _add(gradients, stage.gradients, made[len(crossing) : waiting])
            late.append((stage, values, made[waiting:]))
        for stage, values, made in late:
            if stage.weight is not None:
                found = stage.weight(*(values[name] for name in stage.deferred), *made)
                _add(gradients, stage.weight_gradients, found)
        return tuple(gradients)


def _add(gradients: list[Any], positions: Sequence[int], found: Sequence[Any]) -> None:
    """Add the terms of a stage to the gradients."""
    for position, term in zip(positions, found, strict=True):
        gradients[position] = term if gradients[position] is None else gradients[position] + term
