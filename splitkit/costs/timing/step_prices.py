"""Measure the prices of forward and backward in training steps.

Backward is timed by hooks on autograd's nodes: a hook reads the clock when a node begins, and the node's time lasts
until the next one begins. So the times add up to the whole, including the summation of gradients::

    forward   mm ── relu ── sum          an op owns the new autograd nodes behind its result
    backward  sum ─▶ relu ─▶ mm ─▶ accumulate (the weight's, owned by the first op that reads the weight)
              └ t ─┘└─ t ─┘└t┘└─ t ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs.base import StepCosts
from splitkit.costs.timing.cpu_time import OwnTime
from splitkit.costs.timing.measuring_run import BUSY, Measured, MeasuringRun
from splitkit.costs.timing.op_timing import MeasuredRuns, TimedRun, timing_rounds
from splitkit.costs.timing.run_inputs import Private, unfit_inputs_error
from splitkit.costs.training import FromOps
from splitkit.errors import CostError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.gradients import Gradients
from splitkit.graph.joint_marks import is_joint
from splitkit.graph.losses import loss_of
from splitkit.graph.shared_memory import memory_classes
from splitkit.graph.storages import tensors
from splitkit.short_repr import brief


@dataclass(frozen=True)
class MeasuredSteps(StepCosts):
    """The costs of `splitkit.costs.measured` with ``backward``.

    Attributes:
        costs: the costs of the same ops, measured without autograd.
        formula: counts the FLOPs of forward and backward.
        busy: whether the machine was busy with other work at every attempt: prices may be too high and are not cached.
    """

    costs: Measured
    formula: FromOps = field(repr=False, compare=False)
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

    def both(self, node: Node) -> tuple[float, float]:
        """Seconds of forward and of backward of the node's group; 0 for inputs, attributes and state ops."""
        return self._seconds.get(node) or (self.costs.seconds(node), 0.0)

    def workspace(self, node: Node) -> int:
        """Peak bytes allocated while the node runs forward, beyond its inputs and results."""
        return self.costs.workspace(node)


def require_steps(flow: Dataflow, device: torch.device) -> None:
    """Raise SK324 for a graph whose training steps cannot be measured."""
    if is_joint(flow.graph):
        raise CostError(
            "SK324", "backward is in this graph already", "Measure it without backward=True: measured(joint, inputs)."
        )
    if device.type != "cpu":
        raise CostError(
            "SK324",
            f"backward can be measured only on a CPU, not on {device}",
            "Estimate it there: splitkit.costs.training(splitkit.costs.measured(gm, inputs, device)).",
        )


def measured_steps(run: MeasuringRun, costs: Measured, inputs: Any, rng_state: torch.Tensor) -> MeasuredSteps:
    """Return the prices of forward and backward, from the cache or measured in several steps.

    Args:
        run: the run without autograd.
        costs: the costs of that run.
        inputs: the inputs that the user gave.
        rng_state: the RNG state before that run.

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
        _time_steps(run, keys, inputs, rng_state)
    seconds, busy = {}, costs.busy
    for node, key in keys.items():
        forward, backward = run.known(key), run.known(_backward_of(key))
        assert forward is not None and backward is not None
        seconds[node] = forward.seconds, backward.seconds
        busy |= forward.busy or backward.busy
    return MeasuredSteps(costs, FromOps(costs, run.flow), seconds, busy)


def _keys(run: MeasuringRun) -> dict[Node, str]:
    """Return node -> the key of its times in a step, which depend on which of its inputs require grad."""
    gradients = run.flow.fact(Gradients)
    found = {}
    for node, key in run.every.items():
        reads = gradients.reads.get(node, frozenset()) if node in gradients.needed else frozenset()
        asked = "".join("1" if n in reads else "0" for n in node.all_input_nodes)
        found[node] = f"in a step, grads {asked}: {key}"
    return found


def _backward_of(key: str) -> str:
    return f"backward {key}"


def _time_steps(run: MeasuringRun, keys: Mapping[Node, str], inputs: Any, rng_state: torch.Tensor) -> None:
    forward, backward, took = MeasuredRuns(), MeasuredRuns(), list[float]()
    unreached = set[str]()
    lasting = _state(run, inputs) if _leaves_state(run.flow) else None
    for number in timing_rounds(1 + len(set(keys.values())), run.min_run_time, lambda: _settled(took, forward)):
        torch.random.set_rng_state(rng_state)
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
            unreached |= {keys[n] for n in step.watched - step.backward.keys()}
            took.append(sum(step.seconds.values()) + sum(step.backward.values()))
        step.forget()
    for key, record in forward.records(keys).items():
        run.remember(key, record)
    for key, record in backward.records(keys).items():
        if key in unreached:  # the loss does not depend on an op of this group; in another graph it may
            run.remember_for_now(_backward_of(key), record)
        else:
            run.remember(_backward_of(key), record)
    run.cache.save()


def _leaves_state(flow: Dataflow) -> bool:
    """Whether no step writes what the next one reads.

    Then all steps share one state, as in a training loop: gradients and activations reuse memory of the step before.
    """
    if flow.written or any(e.writes_state or not e.known for e in flow.effects.values()):
        return False
    memory = memory_classes(flow.effects, flow.root)
    return all(memory.members.get(n, n) not in memory.written for n in flow.graph.find_nodes(op="placeholder"))


def _state(run: MeasuringRun, inputs: Any) -> tuple[Private, Any]:
    private = Private(run.flow, run.private.device, trained=True)
    return private, private.inputs(inputs)


def _settled(took: Sequence[float], runs: MeasuredRuns) -> bool:
    """Whether steps get no faster: the first ones wait for memory that the allocator later keeps."""
    return runs.enough and len(took) > 2 and min(took[-2:]) > 0.99 * min(took[:-2])


class _Step(TimedRun):
    """One training step; the seconds of a node include autograd's work in forward.

    Attributes:
        backward: node whose backward has run -> seconds of it.
        watched: the nodes that have a backward; it runs only if the loss depends on them.
    """

    def __init__(self, run: MeasuringRun, private: Private) -> None:
        super().__init__(run, private)
        self.backward: dict[Node, float] = {}
        self.watched: set[Node] = set()
        self._met: set[Any] = set()  # autograd's nodes that have a hook
        self._hooks: list[Any] = []  # handles of these hooks
        self._now: Node | None = None
        self._since = 0.0

    def _measured(self, n: Node) -> Any:
        result = super()._measured(n)
        self._watch(n, result)
        return result

    def _watch(self, n: Node, result: Any) -> None:
        """Hook autograd's nodes behind a result; those behind its arguments are hooked already."""
        coming = [t.grad_fn for t in tensors(result)]
        while coming:
            found: Any = coming.pop()
            if found is not None and found not in self._met:
                self._met.add(found)
                self.watched.add(n)
                self._hooks.append(found.register_prehook(self._beginning(n)))
                coming += [before for before, _ in found.next_functions]

    def _beginning(self, n: Node) -> Callable[[object], None]:
        def begin(_: object) -> None:
            self._end()
            self._now, self._since = n, self.clock.now()

        return begin

    def forget(self) -> None:
        """Break the cycle of references: autograd nodes hold hooks, hooks hold the step, the step holds results."""
        self._met.clear()
        for hook in self._hooks:
            hook.remove()

    def _end(self) -> None:
        if self._now is not None:
            self.backward[self._now] = self.backward.get(self._now, 0.0) + self.clock.now() - self._since

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run backward from the loss if there is one (`splitkit.graph.losses`), else from outputs that require grad."""
        wanted = [t for t in tensors(args) if t.requires_grad]
        own = loss_of(self.graph.process_outputs(args[0]))
        losses = wanted if own is None else [own]
        try:
            if losses:
                torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])
        except Exception as error:
            raise unfit_inputs_error(f"their backward fails: {error}") from error
        self._end()
        return super().output(target, args, kwargs)
