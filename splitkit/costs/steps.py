"""Prices of forward and backward, both measured in steps of training.

Backward is timed by autograd's own nodes: each begins with a note of the clock, and what passes until the next one
begins is its time. So the times add up to the whole, the adding up of gradients included::

    forward   mm ── relu ── sum          each op's autograd nodes are those that its result brings
    backward  sum ─▶ relu ─▶ mm ─▶ accumulate (the weight: of the first op that reads it)
              └ t ─┘└─ t ─┘└t┘└─ t ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.brief import brief
from splitkit.costs.copies import Private, unfit
from splitkit.costs.in_place import MeasuredRuns, TimedRun, rounds
from splitkit.costs.measuring import BUSY, Measured, MeasuringRun
from splitkit.costs.owntime import OwnTime
from splitkit.costs.training import FromFormula
from splitkit.errors import CostError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.effects import memory_of
from splitkit.graph.gradients import Gradients
from splitkit.graph.joint import is_joint
from splitkit.graph.storages import tensors
from splitkit.losses import loss_of


@dataclass(frozen=True)
class MeasuredSteps:
    """See `splitkit.costs.measured` with ``backward``.

    Attributes:
        costs: the same ops, measured without autograd.
        formula: counts the FLOPs of both.
        busy: the machine was busy with other work at every attempt: prices may be too high, and are not kept.
    """

    costs: Measured
    formula: FromFormula = field(repr=False, compare=False)
    _seconds: Mapping[Node, tuple[float, float]] = field(repr=False, compare=False)
    busy: bool = False

    __repr__ = brief

    @property
    def gm(self) -> fx.GraphModule:
        """The forward graph."""
        return self.costs.gm

    @property
    def note(self) -> str:
        """What the seconds are, for reports."""
        return f"measured on {self.costs.device}, forward and backward{BUSY if self.busy else ''}"

    def seconds(self, node: Node) -> float:
        """Time of forward and backward of the node's group; 0 for inputs, attributes and state ops."""
        if node not in self._seconds:
            return self.costs.seconds(node)
        return sum(self._seconds[node])

    def backward(self, node: Node) -> float:
        """How many times its forward the node takes in backward."""
        forward, backward = self._seconds.get(node, (0.0, 0.0))
        return backward / forward if forward else 0.0

    def workspace(self, node: Node) -> int:
        """Most bytes that are allocated at once while the node runs forward, beyond its inputs and results."""
        return self.costs.workspace(node)

    def flops(self, node: Node) -> float:
        """FLOPs of forward and backward, by formula."""
        return self.formula.flops(node)

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value."""
        return self.costs.nbytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return self.costs.param_bytes(node)


def require_steps(flow: Dataflow, device: torch.device) -> None:
    """Refuse, with SK324, a graph of which no steps can be measured."""
    if is_joint(flow.graph):
        raise CostError(
            "SK324", "backward is in this graph already", "Measure it without backward=True: measured(joint, inputs)."
        )
    if device.type != "cpu":
        raise CostError(
            "SK324",
            f"backward is measured on a CPU only, not on {device}",
            "Estimate it there: splitkit.costs.training(splitkit.costs.measured(gm, inputs, device)).",
        )


def measured_steps(run: MeasuringRun, costs: Measured, inputs: Any, dice: torch.Tensor) -> MeasuredSteps:
    """The prices of forward and backward: those that are kept, or measured in some steps.

    Args:
        run: the run without autograd.
        costs: what it found.
        inputs: as they were given.
        dice: the state of the random generator before it.

    Raises:
        CostError: SK324 for a graph that may run only once, or whose backward fails.
    """
    keys = _keys(run)
    wanted = set(keys.values())
    known = {key: (run.known(key), run.known(_backward_of(key))) for key in wanted}
    if any(None in records for records in known.values()):
        if run.acts_outside:
            raise CostError(
                "SK324",
                "an op acts on the outside world, so that the graph may run only once",
                "Declare it with splitkit.extend.declare, or estimate backward: training(measured(gm, inputs)).",
            )
        _time_steps(run, keys, inputs, dice)
    seconds, busy = {}, costs.busy
    for node, key in keys.items():
        forward, backward = run.known(key), run.known(_backward_of(key))
        assert forward is not None and backward is not None
        seconds[node] = forward.seconds, backward.seconds
        busy |= forward.busy or backward.busy
    return MeasuredSteps(costs, FromFormula(costs, run.flow), seconds, busy)


def _keys(run: MeasuringRun) -> dict[Node, str]:
    """What a node's times in a step are kept by: also which of its inputs require grad decides them."""
    gradients = run.flow.fact(Gradients)
    found = {}
    for node, key in run.every.items():
        reads = gradients.reads.get(node, frozenset()) if node in gradients.needed else frozenset()
        asked = "".join("1" if n in reads else "0" for n in node.all_input_nodes)
        found[node] = f"in a step, grads {asked}: {key}"
    return found


def _backward_of(key: str) -> str:
    return f"backward {key}"


def _time_steps(run: MeasuringRun, keys: Mapping[Node, str], inputs: Any, dice: torch.Tensor) -> None:
    forward, backward, took = MeasuredRuns(), MeasuredRuns(), list[float]()
    lasting = _state(run, inputs) if _leaves_state(run.flow) else None
    for number in rounds(1 + len(set(keys.values())), run.min_run_time, lambda: _settled(took, forward)):
        torch.random.set_rng_state(dice)
        private, values = lasting or _state(run, inputs)
        for tensor in [*private.tensors(), *tensors(values)]:
            tensor.grad = None
        step = _Step(run, private)
        step.clock = OwnTime()
        with step.safely(), torch.enable_grad():
            step.run(*values, enable_io_processing=False)
        if number > 0:  # the first is a warm-up
            busy = step.clock.is_busy()
            forward.add(step.seconds, busy=busy)
            backward.add(step.backward, busy=busy)
            took.append(sum(step.seconds.values()) + sum(step.backward.values()))
        step.forget()
    for key, record in forward.records(keys).items():
        run.remember(key, record)
    for key, record in backward.records(keys).items():
        run.remember(_backward_of(key), record)
    run.cache.save()


def _leaves_state(flow: Dataflow) -> bool:
    """Whether no step writes what the next one reads. All then have one state, as those of a training loop: gradients
    and activations come to lie where those of the step before lay, and no memory is new."""
    if flow.written or any(e.writes_state or not e.known for e in flow.effects.values()):
        return False
    memory = memory_of(flow.effects, flow.root)
    return all(memory.members.get(n, n) not in memory.written for n in flow.graph.find_nodes(op="placeholder"))


def _state(run: MeasuringRun, inputs: Any) -> tuple[Private, Any]:
    private = Private(run.flow, run.private.device, trained=True)
    return private, private.inputs(inputs)


def _settled(took: Sequence[float], runs: MeasuredRuns) -> bool:
    """Whether steps get no faster: those of the beginning wait for memory, which the allocator later keeps."""
    return runs.enough and len(took) > 2 and min(took[-2:]) > 0.99 * min(took[:-2])


class _Step(TimedRun):
    """One step of training; the seconds of a node hold what autograd does in forward.

    Attributes:
        backward: seconds of each node that has a backward.
    """

    def __init__(self, run: MeasuringRun, private: Private) -> None:
        super().__init__(run, private)
        self.backward: dict[Node, float] = {}
        self._met: set[Any] = set()  # autograd's nodes
        self._hooks: list[Any] = []  # on them
        self._now: Node | None = None
        self._since = 0.0

    def _measured(self, n: Node) -> Any:
        result = super()._measured(n)
        self._watch(n, result)
        return result

    def _watch(self, n: Node, result: Any) -> None:
        """Note when autograd's nodes of a result begin; those of its arguments are watched already."""
        coming = [t.grad_fn for t in tensors(result)]
        while coming:
            found: Any = coming.pop()
            if found is not None and found not in self._met:
                self._met.add(found)
                self._hooks.append(found.register_prehook(self._beginning(n)))
                coming += [before for before, _ in found.next_functions]

    def _beginning(self, n: Node) -> Callable[[object], None]:
        def begin(_: object) -> None:
            self._end()
            self._now, self._since = n, self.clock.now()

        return begin

    def forget(self) -> None:
        """Let go of autograd's nodes: they hold their hooks, hooks hold the step, and the step holds its results."""
        self._met.clear()
        for hook in self._hooks:
            hook.remove()

    def _end(self) -> None:
        if self._now is not None:
            self.backward[self._now] = self.backward.get(self._now, 0.0) + self.clock.now() - self._since

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Backward, from the loss if there is one (`splitkit.losses`), else from all that requires grad."""
        wanted = [t for t in tensors(args) if t.requires_grad]
        own = loss_of(self.graph.process_outputs(args[0]))
        losses = wanted if own is None else [own]
        try:
            if losses:
                torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])
        except Exception as error:
            raise unfit(f"their backward fails: {error}") from error
        self._end()
        return super().output(target, args, kwargs)
