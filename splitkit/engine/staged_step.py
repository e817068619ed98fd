"""The result of dividing a training step into pipeline stages: the graphs of each stage, and how they fit together."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs import unit_of
from splitkit.costs.links import HostLink
from splitkit.display import Shown
from splitkit.engine.pair import back_on_device, offload_refused, sharing, why_not_offloaded
from splitkit.graph.node_values import storage_bytes, value_bytes
from splitkit.graph.shards import collective_group
from splitkit.graph.storages import storage_key, tensors, value_of
from splitkit.memory.kernels.kernel_results import ARRIVED, TO_DEVICE
from splitkit.memory.simulation import MemorySimulation
from splitkit.memory.storage_watch import BEFORE, HELD
from splitkit.pipeline.order import StageCopies, suffix_sums
from splitkit.pipeline.stage_costs import Exchange, StageCosts
from splitkit.pipeline.stage_prices import STATE_OF, check_stage_optimizer
from splitkit.plans.parts import Offloaded, PlannedOptimizer
from splitkit.plans.record import Plan
from splitkit.prices import Costs, Optimizer, checked
from splitkit.short_repr import brief, few
from splitkit.training.flow import JointFlow
from splitkit.training.offload_timeline import why_not_moved
from splitkit.training.stage_parts import HALVES, known_part
from splitkit.units import size

if TYPE_CHECKING:
    from splitkit.display import ShownOverTime
    from splitkit.files import PathLike


Origin = tuple[str, Hashable]
"""The value that first has a storage in a stage, and the storage."""


_ACTIONS = {"forward": "F", "backward": "I", "input": "I", "weight": "W"}
"""Half of a stage -> the part of a microbatch in which a schedule runs it."""


@dataclass(frozen=True)
class StageGraphs:
    """The graphs of one stage. All take and return flat tuples::

        forward(*primals, *received)                        ->  (*outputs, *sent, *saved and deferred, *offloaded)
        backward(*saved, *tangents, *gradients_received)    ->  (*gradients_sent, *gradients, *waiting)
        weight(*deferred, *waiting)                         ->  (*weight_gradients)

    ``tangents`` are given to the last stage only. What forward saves for both graphs of backward it returns once: first
    ``saved``, then what only ``deferred`` has. Of values that wait on the host it returns the copies there, and at the
    end the values themselves, until the copies are complete; backward takes copies on the device that it waits for.
    Nodes keep the names and the ``meta["val"]`` of the joint graph.

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

    def each(self) -> dict[str, fx.GraphModule]:
        """Return ``"forward"``, ``"backward"`` and, if there is one, ``"weight"`` -> the graph."""
        found = {"forward": self.forward, "backward": self.backward}
        return found if self.weight is None else {**found, "weight": self.weight}

    @property
    def held(self) -> tuple[str, ...]:
        """What forward saves for both graphs of backward, in the order in which it returns it."""
        return (*self.saved, *(name for name in self.deferred if name not in self.saved))

    @property
    def saved_bytes(self) -> int:
        """Bytes that forward leaves on the device for backward, each storage once, without what the caller holds."""
        return self._bytes(self.kept)

    @property
    def kept(self) -> tuple[str, ...]:
        """What forward leaves on the device for backward: `held` without what waits on the host."""
        return tuple(name for name in self.held if name not in self.offloaded)

    @property
    def host_bytes(self) -> int:
        """Bytes that wait for backward on the host."""
        return self._bytes(self.offloaded)

    def given(self, made: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
        """Return outputs, sent values and held values of what forward returned; moved ones are leaving."""
        rest, last = len(self.outputs) + len(self.sent), len(made) - len(self.offloaded)
        held = dict(zip(self.held, made[rest:last], strict=True))
        for name, source in zip(self.offloaded, made[last:], strict=True):
            held[name] = HostValue(held[name], source, source.device)
        return tuple(made[: len(self.outputs)]), tuple(made[len(self.outputs) : rest]), held

    def with_copies(self, costs: StageCosts, seconds: Mapping[str, float], link: HostLink) -> StageCosts:
        """Return the costs of the stage with the copies of what waits on the host, which saved bytes include then.

        Args:
            costs: the costs without.
            seconds: the time of each node, by its name.
            link: the link to the host.
        """
        if not self.offloaded:
            return costs
        early, late = list(self.forward.graph.nodes), list(self.backward.graph.nodes)

        def taken(nodes: Sequence[Node]) -> list[float]:
            return [0.0 if node.op == "placeholder" else seconds.get(node.name, 0.0) for node in nodes]

        ends = {node.name: made for node, made in zip(early, accumulate(taken(early)), strict=True)}
        rest = {node.name: left for node, left in zip(late, suffix_sums(taken(late)), strict=True)}
        sizes = {name: sum(self.storages([name]).values()) for name in self.offloaded}
        leaving = [(ends[name], nbytes) for name, nbytes in sizes.items()]
        coming = [(rest.get(back_on_device(name), 0.0), nbytes) for name, nbytes in sizes.items()]
        copies = StageCopies.of(link, leaving, coming, costs.forward, costs.backward_input)
        return replace(costs, saved_bytes=costs.saved_bytes + copies.nbytes, copies=copies)

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
        return sum(self.storages(names).values())

    def storages(self, names: Iterable[str]) -> dict[Origin, int]:
        """Return storage -> bytes of some values as a rank owns them, without storages of the caller's inputs.

        What a stage receives is a copy there, even if it was a view of an input, or two values one storage, before.

        Args:
            names: values of the forward or the backward graph.
        """
        found = {origin: nbytes for name in names for origin, nbytes in self._known_origins[name].values()}
        return {origin: nbytes for origin, nbytes in found.items() if origin[0] not in self.primals}

    @cached_property
    def _known_origins(self) -> dict[str, Mapping[Hashable, tuple[Origin, int]]]:
        copies = {*self.received, *self.gradients_received}
        origins = _origins(self.forward, copies, {})
        return _origins(self.backward, copies, origins) | origins

    def __str__(self) -> str:
        graphs = self.each().values()
        counts = " + ".join(str(sum(n.op not in ("placeholder", "output") for n in g.graph.nodes)) for g in graphs)
        waits = f", {size(self.waiting_bytes)} wait for the weight graph" if self.weight is not None else ""
        host = f", {size(self.host_bytes)} of it on the host" if self.offloaded else ""
        return (
            f"{counts} ops, receives {len(self.received)} and sends {len(self.sent)} activations, saves "
            f"{size(self.saved_bytes + self.host_bytes)}{host}{waits}"
        )


JointSource = Any
"""The joint graph that was divided: a `splitkit.frontends.joint_capture.Joint`, which lies on a higher layer."""


@dataclass(frozen=True)
class StagedStep(Shown):
    """A training step in pipeline stages: a forward graph and one or two backward graphs for each.

    A notebook shows it as a ladder: forward and backward of each stage, what is saved and what waits.

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
        source: the joint graph that was divided; ``None`` if only its facts are known.
    """

    stages: tuple[StageGraphs, ...]
    primals: tuple[str, ...]
    tangents: tuple[str, ...]
    outputs: int
    constants: Mapping[int, Any]
    gradients: int
    ties: Mapping[int, tuple[int, ...]]
    plan: Plan
    source: JointSource | None = None

    __repr__ = brief

    def __str__(self) -> str:
        count = f"{len(self.stages)} stages"
        note = self.plan.note if self.plan.note.startswith(count) else f"{count}: {self.plan.note}".removesuffix(": ")
        lines = (f"stage {i}: {stage}" for i, stage in enumerate(self.stages))
        return "\n".join([f"Training step in {note}", *few(lines, "stages")])

    def view(
        self,
        *,
        height: int | None = None,
        costs: Costs | None = None,
        optimizer: PlannedOptimizer = "planned",
        memory: float | str | None = None,
        run: ShownOverTime | None = None,
        title: str = "",
    ) -> Any:
        """Return a page of the stages in a frame, which a notebook shows if this is the last line of a cell.

        Args:
            height: height of the frame in pixels.
            costs: prices of the nodes; by default those that the plan was made with, or FLOPs.
            optimizer: as for `stage_costs`.
            memory: the memory of each device in bytes (or ``"80GiB"``); what exceeds it is red.
            run: a step of these stages, as `splitkit.simulate_schedule` returns it for `stage_costs`; by default that
                of the schedule that the plan was made for, if there is one and the prices are times.
            title: the text above the picture; by default the note of the plan.

        Raises:
            ViewError: SK901 if it cannot be drawn, or not with these options; SK903 for a step by prices that are not
                times.
        """
        return self._framed(height, costs=costs, optimizer=optimizer, memory=memory, run=run, title=title)

    def to_html(
        self,
        path: PathLike,
        *,
        costs: Costs | None = None,
        optimizer: PlannedOptimizer = "planned",
        memory: float | str | None = None,
        run: ShownOverTime | None = None,
        title: str = "",
    ) -> None:
        """Write the page as one file that any browser shows, or the still picture if its name ends in ``.svg``.

        The options are those of `view`.

        Raises:
            ViewError: SK901 if it cannot be drawn, or not with these options.
            FileError: SK504 if the file cannot be written; an existing file is then left as it was.
        """
        self._write_html(path, costs=costs, optimizer=optimizer, memory=memory, run=run, title=title)

    def to_svg(
        self,
        path: PathLike,
        *,
        costs: Costs | None = None,
        optimizer: PlannedOptimizer = "planned",
        memory: float | str | None = None,
        run: ShownOverTime | None = None,
        title: str = "",
    ) -> None:
        """Write a static picture; the options are those of `view`, the errors those of `to_html`."""
        self._write_svg(path, costs=costs, optimizer=optimizer, memory=memory, run=run, title=title)

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forwards of all stages save for backward, with what waits on the host."""
        return sum(stage.saved_bytes + stage.host_bytes for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        """Bytes that wait for backward on the host."""
        return sum(stage.host_bytes for stage in self.stages)

    def stage_costs(self, costs: Costs, *, optimizer: PlannedOptimizer = "planned") -> tuple[StageCosts, ...]:
        """Return the costs of each stage for one microbatch, for `splitkit.simulate_schedule`.

        Until its backward, a stage holds its saved values and, as in torch's runtime, its received and sent values. The
        values that its weight graph reads wait for it; a stage whose backward is one graph has no weight part, and
        nothing waits. What waits on the host counts with its copies, if the plan knows the link to the host.

        Args:
            costs: prices of the nodes of the joint graph.
            optimizer: ``"adam"``, ``"momentum"`` or ``"sgd"``: 2, 1 or 0 times the bytes of the gradients are its
                state; ``None``: there is none; by default what the plan was made for, and Adam if it does not say.

        Raises:
            PolicyError: SK302 for an unknown optimizer.
            GraphError: SK108 for a data-dependent size.
        """
        asked, unit = self.plan.request, unit_of(costs)
        held = asked.counting(optimizer)
        check_stage_optimizer(held)
        prices = checked(costs)
        seconds: dict[tuple[str, int], float] = {}
        of_node = {n.name: prices.seconds(n) for n in self.plan if n.op not in ("placeholder", "get_attr")}
        exchanges: dict[int, list[Exchange]] = {}
        for node, keys in self.plan.items():
            for key in map(known_part, keys) if node.name in of_node else ():
                start, own = seconds.get(key, 0.0), of_node[node.name]
                if collective_group(node) is not None:
                    exchanges.setdefault(key.stage, []).append(Exchange(_ACTIONS[key.half], start, own))
                seconds[key] = start + own
        found = tuple(
            replace(self._costs_of(number, seconds, unit, held), collectives=tuple(exchanges.get(number, ())))
            for number in range(len(self.stages))
        )
        if asked.offload is None or unit != "s":
            return found
        link = HostLink.of_data(asked.offload)
        return tuple(stage.with_copies(own, of_node, link) for stage, own in zip(self.stages, found, strict=True))

    def _costs_of(
        self, number: int, seconds: Mapping[tuple[str, int], float], unit: str, optimizer: Optimizer
    ) -> StageCosts:
        stage = self.stages[number]
        forward, backward, first, weight = (seconds.get((half, number), 0.0) for half in HALVES)
        late = [graph_temporaries(g) for g in (stage.backward, stage.weight) if g is not None]
        parameters, gradients = self.parameter_bytes(number)
        return StageCosts(
            forward=forward,
            backward_input=backward + first,
            backward_weight=weight,
            saved_bytes=sum(stage.storages((*stage.received, *stage.sent, *stage.kept)).values()),
            deferred_bytes=stage.waiting_bytes,
            activation_bytes=stage.sent_bytes,
            input_gradient_bytes=stage.gradients_sent_bytes,
            temporary_bytes=max(graph_temporaries(stage.forward, len(stage.outputs)), *late),
            parameter_bytes=sum(parameters.values()),
            gradient_bytes=sum(gradients.values()),
            optimizer_bytes=sum(gradients.values()) * STATE_OF[optimizer] if optimizer else 0,
            unit=unit,
        )

    def parameter_bytes(self, number: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes of what a stage is given (parameters, buffers, inputs) and of their gradients, by name."""
        returned = {i for stage in self.stages for i in (*stage.gradients, *stage.weight_gradients)}
        trained = {name for i, name in enumerate(self.primals) if i in returned}
        nodes = {n.name: n for n in self.stages[number].forward.graph.find_nodes(op="placeholder")}
        own = {name: value_bytes(nodes[name]) for name in self.stages[number].primals}
        return own, {name: nbytes for name, nbytes in own.items() if name in trained}

    def run(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Run all stages in this process on real values: forward up, backward down, weight graphs last.

        Args:
            primals: the values of `primals`.
            tangents: the values of `tangents`.

        Returns:
            The outputs and the gradients, as `splitkit.frontends.joint_capture.Joint.read` takes them together.
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


# Count the bytes that a graph of a stage takes only while it runs.


def graph_temporaries(graph: fx.GraphModule, outputs: int | None = None) -> int:
    """Return the most bytes alive while a graph runs, without its inputs and the attributes that it reads.

    Args:
        graph: the graph.
        outputs: how many of its outputs count, from the first one; ``None``: all. What a forward graph saves and sends
            is held long after it, and is counted there.

    Raises:
        GraphError: SK108 for a data-dependent size.
    """
    run = MemorySimulation({}, lambda node: 0)
    returned = run.graph(graph, lambda node: run.input(node, "input"))
    for _, value in returned:
        run.hold(value, HELD)
    apart = {n for _, value in returned[len(returned) if outputs is None else outputs :] for n in value.values()}
    for number, storage in enumerate(run.storages):
        if storage.born == BEFORE or number in apart:
            storage.nbytes = 0
    return max(run.timeline(), default=0)


# Saved values of stages that wait for backward on the host: checked, emitted, and moved between the graphs.
#
# The forward graph starts the copy to the host as soon as a value is made, and the backward graph waits for the copy
# back right before it reads the value. Whoever runs the graphs says when, in between, the memory on the device is free
# and when the copy back starts (`HostValue`)::
#
#     forward graph    x = ...    copy = to_host(x)    ...    returns copy and x
#     runner           release: waits for the copy, frees x        ask: x_back = to_device(copy)
#     backward graph   ...    x = arrived(x_back)    ...    reads x


@dataclass
class HostValue:
    """A saved value on its way to the host, there, or on its way back.

    Attributes:
        host: the copy on the host, complete once it has been released.
        source: the value on the device, until it is released.
        device: the device of the value.
        copy: the copy back, once it has been asked for; the backward graph waits for it.
    """

    host: torch.Tensor
    source: torch.Tensor | None
    device: torch.device
    copy: torch.Tensor | None = None

    def release(self) -> None:
        """Wait for the copy to the host, and free the memory of the device."""
        if self.source is not None:
            self.host, self.source = ARRIVED(self.host, self.source), None

    def ask(self) -> None:
        """Start the copy back."""
        self.copy = TO_DEVICE(self.host, self.device)

    def wait(self) -> None:
        """Wait for the copy back."""
        if self.copy is not None:
            self.copy = ARRIVED(self.copy, self.host)


def host_values(held: Mapping[str, Any]) -> list[HostValue]:
    """Return the held values of a stage that move to the host."""
    return [value for value in held.values() if isinstance(value, HostValue)]


def on_device(held: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """Return values that a stage holds as its graphs take them, the moved ones as copies that are on their way."""
    found = (held[name] for name in names)
    return [value.copy if isinstance(value, HostValue) else value for value in found]


def offloaded_stages(
    flow: JointFlow, offloaded: Iterable[Offloaded], places: Mapping[Node, Sequence[Any]]
) -> dict[Node, int]:
    """Return value that a plan offloads -> its stage, checked as far as that does not depend on the stages' borders.

    Raises:
        PlanError: SK220 for a value that cannot be moved, or with moments of its own.
    """
    found: dict[Node, int] = {}
    for one in offloaded:
        if one.release is not None or one.fetch is not None:
            flaw = "stages move values by their actions, not by nodes"
            raise offload_refused(one.value, flaw, "Leave out release and fetch.")
        if flaw := why_not_moved(flow, one.value):
            raise offload_refused(one.value, flaw)
        stages = [key[1] for key in places.get(one.value, ()) if key[0] == "forward"]
        if len(stages) != 1:
            raise offload_refused(one.value, "forward does not compute it in one stage")
        found[one.value] = stages[0]
    return found


def check_moved(
    flow: JointFlow, moved: Iterable[Node], stage: int, held: Collection[Node], crossing: Collection[Node]
) -> None:
    """Check what a stage moves.

    Args:
        flow: facts about the joint graph.
        moved: what it moves.
        stage: the stage.
        held: what its forward saves.
        crossing: what it receives and sends, which the runtime holds in any case.

    Raises:
        PlanError: SK220 for a value that is not saved, cannot be moved, or shares its memory with one that stays.
    """
    for value in moved:
        if flaw := why_not_offloaded(flow, value, held, f"backward of stage {stage}"):
            raise offload_refused(value, flaw)
        if others := sharing(flow, value, crossing):
            flaw = f"its memory crosses the border of stage {stage} as {others[0].name}, and is held there"
            raise offload_refused(value, flaw)
