"""The result of dividing a training step into pipeline stages: the graphs of each stage, and how they fit together."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from splitkit.engine.joint_stages.host_values import HostValue, host_values, on_device
from splitkit.graph.byte_sizes import storage_bytes
from splitkit.graph.storages import storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.plans.record import Plan
from splitkit.short_repr import brief, few
from splitkit.units import size


@dataclass(frozen=True)
class StageGraphs:
    """The graphs of one stage. All take and return flat tuples::

        forward(*primals, *received)                        ->  (*outputs, *sent, *saved and deferred, *offloaded)
        backward(*saved, *tangents, *gradients_received)    ->  (*gradients_sent, *gradients, *waiting)
        weight(*deferred, *waiting)                         ->  (*weight_gradients)

    ``tangents`` are given to the last stage only. What forward saves for both graphs of backward it returns once: first
    ``saved``, then what only ``deferred`` has. Of values that wait on the host it returns the copies there, and at the
    end the values themselves, until the copies are complete; backward takes copies on the device that it waits for
    (`splitkit.engine.joint_stages.host_values`). Nodes keep the names and the ``meta["val"]`` of the joint graph.

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
        offloaded: which of the saved and deferred values wait on the host.
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
    offloaded: tuple[str, ...] = ()

    __repr__ = brief

    @property
    def held(self) -> tuple[str, ...]:
        """What forward saves for both graphs of backward, in the order in which it returns it."""
        return (*self.saved, *(name for name in self.deferred if name not in self.saved))

    @property
    def saved_bytes(self) -> int:
        """Bytes that forward leaves on the device for backward, each storage once, without what the caller holds."""
        return self._bytes([name for name in self.held if name not in self.offloaded])

    @property
    def host_bytes(self) -> int:
        """Bytes that wait for backward on the host."""
        return self._bytes(self.offloaded)

    def given(self, made: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        """Return outputs, sent values and held values of what forward returned; moved ones are leaving."""
        rest, last = len(self.outputs) + len(self.sent), len(made) - len(self.offloaded)
        held = dict(zip(self.held, made[rest:last], strict=True))
        for name, source in zip(self.offloaded, made[last:], strict=True):
            held[name] = HostValue.leaving(held[name], source)
        return tuple(made[: len(self.outputs)]), tuple(made[len(self.outputs) : rest]), held

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait between the two graphs of backward, each storage once, without what the caller holds."""
        return self._bytes((*self.deferred, *self.waiting)) if self.weight is not None else 0

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

    def _bytes(self, names: Sequence[str]) -> int:
        """Return the bytes of the storages of some values, as on a rank of its own.

        What a stage receives is a copy there, even if it was a view of an input, or two values one storage, before.
        """
        copies = {*self.received, *self.gradients_received}
        origins = _origins(self.forward, copies, {})
        origins = _origins(self.backward, copies, origins) | origins
        found = {origin: nbytes for name in names for origin, nbytes in origins[name].values()}
        return sum(nbytes for (maker, _), nbytes in found.items() if maker not in self.primals)

    def __str__(self) -> str:
        graphs = [self.forward, self.backward, *([self.weight] if self.weight is not None else [])]
        counts = " + ".join(str(sum(n.op not in ("placeholder", "output") for n in g.graph.nodes)) for g in graphs)
        waits = f", {size(self.waiting_bytes)} wait for the weight graph" if self.weight is not None else ""
        host = f", {size(self.host_bytes)} wait on the host" if self.offloaded else ""
        return (
            f"{counts} ops, receives {len(self.received)} and sends {len(self.sent)} activations, saves "
            f"{size(self.saved_bytes)}{waits}{host}"
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
            own, crossing, kept = stage.given(stage.forward(*(given[name] for name in stage.primals), *crossing))
            for position, value in zip(stage.outputs, own, strict=True):
                outputs[position] = value
            for moved in host_values(kept):
                moved.release()
            held.append(kept)
        return tuple(outputs), held

    def run_backward(self, held: Sequence[Mapping[str, Any]], tangents: Sequence[Any]) -> tuple[Any, ...]:
        """Run the backward graphs from the last stage down, then the weight graphs; return the gradients."""
        gradients: list[Any] = [None] * self.gradients
        crossing, late = tuple(tangents), []
        for stage, values in zip(reversed(self.stages), reversed(held), strict=True):
            moved = host_values(values)
            for value in moved:
                value.ask()
            made = list(stage.backward(*on_device(values, stage.saved), *crossing))
            for value in moved:
                value.wait()  # what only the weight graph reads
            crossing = tuple(made[: len(stage.gradients_sent)])
            waiting = len(crossing) + len(stage.gradients)
            _add(gradients, stage.gradients, made[len(crossing) : waiting])
            late.append((stage, values, made[waiting:]))
        for stage, values, made in late:
            if stage.weight is not None:
                found = stage.weight(*on_device(values, stage.deferred), *made)
                _add(gradients, stage.weight_gradients, found)
        return tuple(gradients)


Origin = tuple[str, Hashable]
"""The value that first has a storage in a stage, and the storage."""


def _origins(
    graph: fx.GraphModule, copies: Collection[str], known: Mapping[str, Mapping[Hashable, tuple[Origin, int]]]
) -> dict[str, Mapping[Hashable, tuple[Origin, int]]]:
    """Return value -> storage -> its origin in this graph, or in ``known``, and its bytes.

    Args:
        graph: a graph of the stage.
        copies: values that come from other stages, where each arrives as a tensor of its own.
        known: the same for values of another graph of the stage.
    """
    found: dict[str, Mapping[Hashable, tuple[Origin, int]]] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder" and node.name in known:
            found[node.name] = known[node.name]
        elif node.op != "output":
            above = {key: origin for read in node.all_input_nodes for key, origin in found[read.name].items()}
            own = {storage_key(t): t for t in tensors(value_of(node))}
            found[node.name] = {
                key: above.get(key, ((node.name, key), t.nbytes if node.name in copies else storage_bytes(t)))
                for key, t in own.items()
            }
    return found


def _add(gradients: list[Any], positions: Sequence[int], found: Sequence[Any]) -> None:
    """Add the terms of a stage to the gradients."""
    for position, term in zip(positions, found, strict=True):
        gradients[position] = term if gradients[position] is None else gradients[position] + term
