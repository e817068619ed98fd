"""One stage of a training step as a module: its forward and backward run the graphs that the plan has divided.

To autograd, the forward of a stage is one function. Its backward runs the stage's own backward graph and returns the
gradients of the parameters and of what the stage received. If the stage has a weight graph, a schedule with weight
parts runs it later (`PlannedStage.weight_runner`, torch's ``dw_builder``); otherwise it runs at the end of backward.
Torch thus traverses none of the stage's own operations, so they may be compiled, and backward is divided in the first
stage as well::

    autograd        received, parameters  ──▶  _StageFunction  ──▶  sent, loss
    forward graph   saves what backward and weight graph read, for as long as autograd keeps the function
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit.engine.staged_step import HostValue, StageGraphs, host_values, on_device
from splitkit.graph.shards import local_tensor, sharded_as
from splitkit.pipeline.order import Action, host_windows
from splitkit.runtime.devices.accelerators import current
from splitkit.runtime.ranks.border_values import BorderValue, border_value


@dataclass(frozen=True)
class StageTask:
    """What a stage does besides running its graphs.

    Attributes:
        inputs: the inputs of the graph that the stage reads, by the names of their placeholders.
        updates: position of an output of the step -> the placeholder of the buffer that gets the new value.
        trained: position of a gradient -> the placeholder of its parameter.
        loss: the position of the loss among the outputs of the step, in the last stage; otherwise ``None``.
        tangents: for each tangent of the last stage, a tensor on ``meta`` like it, and whether it belongs to the loss;
            the others are zero.
        before: how values cross the border to the stage before; ``None`` in the first stage.
        after: how values cross the border to the stage after; ``None`` in the last stage.
    """

    inputs: tuple[str, ...]
    updates: Mapping[int, str]
    trained: Mapping[int, str]
    loss: int | None
    tangents: Sequence[tuple[torch.Tensor, bool]]
    before: BorderSlots | None
    after: BorderSlots | None


class PlannedStage(nn.Module):
    """The module of one stage. It is called with the inputs in ``task.inputs`` and with what the stage receives.

    A call returns the values to send, in the last stage the loss. Parameters and buffers are in the child ``held``, by
    the names of their placeholders.

    Attributes:
        graphs: the graphs of the stage.
        task: what it does besides.
        device: the device on which it runs.
        deferring: whether gradients that only the weight graph computes wait for `weight_runner`.
        waiting: what weight graphs will be given, the first backward first.
        moved: called with the values of a call that wait on the host.
    """

    def __init__(
        self,
        graphs: StageGraphs,
        task: StageTask,
        held: Mapping[str, torch.Tensor],
        unsaved: Collection[str] = (),
    ) -> None:
        """Make the stage.

        Args:
            graphs: the graphs of the stage.
            task: what it does besides.
            held: placeholder -> parameter or buffer.
            unsaved: the placeholders of buffers that are not in the state dict of the model.
        """
        super().__init__()
        self.graphs, self.task, self.device = graphs, task, torch.device("cpu")
        self.held = nn.Module()
        for name, tensor in held.items():
            if isinstance(tensor, nn.Parameter):
                self.held.register_parameter(name, tensor)
            else:
                self.held.register_buffer(name, tensor, persistent=name not in unsaved)
        self.deferring = False
        self.waiting: list[tuple[Any, ...]] = []
        self.moved: Callable[[list[HostValue]], None] | None = None
        self._run: dict[str, Callable[..., tuple[Any, ...]]] = dict(self.graphs.each())

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the graphs of the stage with ``torch.compile``, which gets the arguments.

        A backward graph that waits for values from the host stays as it is: Inductor refuses the op that waits.
        """
        kept = {"backward"} if self.graphs.offloaded else set[str]()
        graphs = self.graphs.each()
        # a dict, since torch refuses stages with compiled modules under zero bubble
        self._run = {
            half: graph if half in kept else torch.compile(graph, *args, **kwargs) for half, graph in graphs.items()
        }

    def forward(self, *given: Any) -> tuple[Any, ...]:
        """Run the forward graph."""
        if not torch.is_grad_enabled():
            return self.run_forward(given)[0]
        names = {i: name for i, name in self.task.trained.items() if self.tensor(name).requires_grad}
        anchor = torch.empty(0, device=self.device, requires_grad=True)  # so that there is always a backward
        parameters = [local_tensor(self.tensor(name)) for name in names.values()]
        return _StageFunction.apply(self, tuple(names), anchor, *parameters, *given)  # type: ignore[no-untyped-call, no-any-return]

    def tensor(self, placeholder: str) -> torch.Tensor:
        """Return the parameter or buffer of a placeholder as it is now: sharding replaces parameters."""
        found: torch.Tensor = getattr(self.held, placeholder)
        return found

    def run_forward(self, given: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the forward graph without autograd, and update buffers.

        Args:
            given: the arguments of the call.

        Returns:
            What the call returns, and what it holds for backward.
        """
        task, count = self.task, len(self.task.inputs)
        inputs = dict(zip(task.inputs, given[:count], strict=True))
        primals = [inputs[name] if name in inputs else local_tensor(self.tensor(name)) for name in self.graphs.primals]
        received = given[count : count + len(self.graphs.received)]  # the rest are slots for gradients
        with torch.no_grad(), current(self.device):
            own, sent, held = self.graphs.given(self._run["forward"](*primals, *received))
            outputs = dict(zip(self.graphs.outputs, own, strict=True))
            buffers = {position: local_tensor(self.tensor(name)) for position, name in task.updates.items()}
            written = {id(buffer) for buffer in buffers.values()}
            # backward needs saved buffers as they were
            held = {name: value.clone() if id(value) in written else value for name, value in held.items()}
            for position, buffer in buffers.items():
                buffer.copy_(outputs[position])
            returned = sent if task.loss is None else (outputs[task.loss].reshape(()).clone(),)
            if task.after is not None:
                slots = [value.like for value in task.after.activations[len(sent) :]]
                returned = (*returned, *(torch.zeros_like(like, device=self.device) for like in slots))
        # an alias: what is held must not hold the function that holds it
        return tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in returned), held

    def run_backward(
        self, held: Mapping[str, Any], gradients: Sequence[torch.Tensor | None]
    ) -> tuple[Sequence[torch.Tensor | None], Mapping[int, torch.Tensor]]:
        """Run the backward graph, and the weight graph unless it is deferred.

        Args:
            held: what forward held.
            gradients: the gradients of what the call returned.

        Returns:
            The gradients of the received values, and position -> gradient of a parameter.
        """
        graphs, moved = self.graphs, host_values(held)
        with torch.no_grad(), current(self.device):
            for value in moved:
                if value.copy is None:
                    value.release()
                    value.ask()
            given = (*on_device(held, graphs.saved), *self._crossing(gradients))
            made = self._run["backward"](*given)
            for value in moved:
                value.wait()  # what only the weight graph reads
            sent = len(graphs.gradients_sent)
            returned = sent + len(graphs.gradients)
            found = self._owned(graphs.gradients, made[sent:returned], (*given, *made))
            if graphs.weight is not None:
                late = (*on_device(held, graphs.deferred), *made[returned:])
                if self.deferring:
                    self.waiting.append(late)
                else:
                    found |= self._run_weight(late)
            back = self.task.before.packed(made[:sent], self.device, "in backward") if self.task.before else []
        return back, found

    def _crossing(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return what the backward graph takes besides saved values."""
        if self.task.after is not None:
            return self.task.after.unpacked(gradients, self.device)
        (loss,) = gradients
        found = list[torch.Tensor]()
        for like, of_loss in self.task.tangents:
            one = torch.ones(like.shape, dtype=like.dtype, device=self.device)
            found.append(one * loss if of_loss and loss is not None else one * 0)
        return found

    def _run_weight(self, given: Sequence[Any]) -> dict[int, torch.Tensor]:
        made = self._run["weight"](*given)
        return self._owned(self.graphs.weight_gradients, made, (*given, *made))

    def _owned(
        self, positions: Sequence[int], made: Sequence[torch.Tensor], every: Sequence[Any]
    ) -> dict[int, torch.Tensor]:
        """Return position -> gradient for parameters, each with memory of its own: it is kept, and added to.

        Args:
            positions: the positions of gradients.
            made: the gradients.
            every: all that the graph was given and has made; what shares memory in it is copied.
        """
        tensors = (value for value in every if isinstance(value, torch.Tensor))
        uses = Counter(value.untyped_storage().data_ptr() for value in tensors)
        return {
            position: value.clone() if uses[value.untyped_storage().data_ptr()] > 1 else value
            for position, value in zip(positions, made, strict=True)
            if position in self.task.trained
        }

    def weight_runner(self) -> Callable[..., None]:
        """Return what runs the weight part of the microbatch whose backward ran last: torch's ``dw_builder``."""
        if not self.waiting:
            return lambda: None
        given = self.waiting[-1]

        def run() -> None:
            with torch.no_grad(), current(self.device):
                self.waiting[:] = [other for other in self.waiting if other is not given]
                for position, gradient in self._run_weight(given).items():
                    _add_to(self.tensor(self.task.trained[position]), gradient)

        return run


class _StageFunction(torch.autograd.Function):
    """The forward and backward graphs of a stage as one autograd node."""

    @staticmethod
    def forward(
        ctx: Any, stage: PlannedStage, positions: tuple[int, ...], anchor: torch.Tensor, *given: Any
    ) -> tuple[Any, ...]:
        made, held = stage.run_forward(given[len(positions) :])
        ctx.set_materialize_grads(False)
        after = stage.task.after
        graded = range(1) if after is None else after.slot_of
        ctx.mark_non_differentiable(*(v for i, v in enumerate(made) if i not in graded and isinstance(v, torch.Tensor)))
        # torch runs no backward of a stage to which no gradient comes back
        if graded:
            ctx.stage, ctx.positions, ctx.held = stage, positions, held
            if stage.moved is not None:
                stage.moved(host_values(held))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        stage, held, ctx.held = ctx.stage, ctx.held, None
        back, own = stage.run_backward(held, gradients)
        inputs = [None] * len(stage.task.inputs)
        return None, None, None, *(own.get(i) for i in ctx.positions), *inputs, *back


def _add_to(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if not parameter.requires_grad:
        return
    gradient = sharded_as(gradient, parameter)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def graphs_of(part: nn.Module) -> tuple[fx.GraphModule, ...]:
    """Return the graphs that a part runs: itself, or the graphs of a planned stage."""
    if isinstance(part, PlannedStage):
        return tuple(part.graphs.each().values())
    assert isinstance(part, fx.GraphModule)
    return (part,)


# Moves the offloaded values of a rank's stages to the host and back between the actions of a schedule.
#
# `splitkit.pipeline.order` says at the end of which action a value is released, and at the start of which it is
# asked for, so the device holds what the simulation says.


_Key = tuple[int, int]
"""A stage and a microbatch."""


@dataclass
class HostQueue:
    """The values of one rank.

    Attributes:
        row: the actions of the rank in a step.
        moving: the stages that offload.
        host_most: the most bytes that were on the host at once in this step.
        device_most: the most bytes of offloaded values that were on the device at once: made, leaving, or coming back.
    """

    row: Sequence[Action]
    moving: Collection[int]
    host_most: int = 0
    device_most: int = 0
    _values: dict[_Key, list[HostValue]] = field(default_factory=dict)
    _number: dict[Action, int] = field(default_factory=dict)
    _released: dict[int, list[_Key]] = field(default_factory=dict)
    _asked: dict[int, list[_Key]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.moving:
            return
        self._number = {action: number for number, action in enumerate(self.row)}
        for key, window in host_windows(self.row).items():
            if key[0] in self.moving:
                self._released.setdefault(window.released, []).append(key)
                self._asked.setdefault(window.asked, []).append(key)

    def clear(self) -> None:
        """Forget what a step has left behind."""
        self._values.clear()
        self.host_most = self.device_most = 0

    def begin(self, stage: int, kinds: str, microbatch: int) -> None:
        """Ask for what comes back while an action runs.

        Args:
            stage: the stage of the action.
            kinds: its kind; for a backward ``"BI"``, whichever the schedule has.
            microbatch: its microbatch.
        """
        number = self._of(stage, kinds, microbatch)
        for key in self._asked.get(number, ()) if number is not None else ():
            for value in self._values.get(key, ()):
                value.ask()
        self._note()

    def end(self, stage: int, kinds: str, microbatch: int) -> None:
        """Wait for what left until the end of an action, and free its memory; arguments as in `begin`."""
        self._note()
        number = self._of(stage, kinds, microbatch)
        for key in self._released.get(number, ()) if number is not None else ():
            for value in self._values.get(key, ()):
                value.release()

    def add(self, stage: int, microbatch: int, values: list[HostValue]) -> None:
        """Take the values of a microbatch whose forward has run."""
        if values and stage in self.moving:
            self._values[stage, microbatch] = values

    def done(self, stage: int, microbatch: int) -> None:
        """Forget the values of a microbatch whose backward, or input part, has run."""
        self._values.pop((stage, microbatch), None)

    def _of(self, stage: int, kinds: str, microbatch: int) -> int | None:
        found = (self._number.get(Action(stage, kind, microbatch)) for kind in kinds)
        return next((number for number in found if number is not None), None)

    def _note(self) -> None:
        values = [value for each in self._values.values() for value in each]
        self.host_most = max(self.host_most, sum(value.host.nbytes for value in values))
        here = sum(value.host.nbytes for value in values if value.source is not None or value.copy is not None)
        self.device_most = max(self.device_most, here)


# Choose the buffers in which gradients of a staged training step are sent upstream over a border.
#
# Autograd, and torch's pipelining, send one gradient back for each activation that requires one, and take its shape
# from it. The graphs of a staged step may send back any values, so each of them travels in the slot of an activation of
# its size and dtype. Between layers these are the activation's own gradients; inside a layer, the slot may be another
# activation's. Where none is left, zeros of its size go to the next stage, as a slot: as many bytes more in forward as
# the gradient has.


@dataclass(frozen=True)
class BorderSlots:
    """How values cross the border between a stage and the next one.

    Attributes:
        activations: the values that go to the next stage, in order; the last of them may be only slots.
        gradients: the values that come back, in order.
        slot_of: for each gradient, the position of the activation in whose place it comes back.
    """

    activations: tuple[BorderValue, ...]
    gradients: tuple[BorderValue, ...]
    slot_of: tuple[int, ...]

    @property
    def crossing(self) -> tuple[BorderValue, ...]:
        """The activations; those with a slot require a gradient."""
        return tuple(
            replace(value, like=value.like.detach().clone().requires_grad_(i in self.slot_of))
            for i, value in enumerate(self.activations)
        )

    def packed(self, gradients: Sequence[torch.Tensor], device: torch.device, where: str) -> list[torch.Tensor | None]:
        """Return what goes back for each activation: its slot's gradient in the activation's shape, or ``None``."""
        found: list[torch.Tensor | None] = [None] * len(self.activations)
        for value, gradient, slot in zip(self.gradients, gradients, self.slot_of, strict=True):
            activation = self.activations[slot]
            sent = value.packed(gradient, device, where).view(activation.meta_tensor.shape)
            found[slot] = activation.unpacked(sent)
        return found

    def unpacked(self, slots: Sequence[torch.Tensor | None], device: torch.device) -> list[torch.Tensor]:
        """Return the gradients from what came back for each activation."""
        found = list[torch.Tensor]()
        for value, slot in zip(self.gradients, self.slot_of, strict=True):
            came, activation = slots[slot], self.activations[slot]
            if came is None:
                found.append(torch.zeros(value.like.shape, dtype=value.like.dtype, device=device))
            else:
                sent = activation.packed(came, device, "in backward")
                found.append(value.unpacked(sent.view(value.meta_tensor.shape)))
        return found


def border_slots(before: StageGraphs, after: StageGraphs) -> BorderSlots:
    """Return how values cross the border between two stages.

    Args:
        before: the graphs of the stage before the border.
        after: the graphs of the stage after it.

    Raises:
        PipelineError: SK801 for a value that cannot be sent.
    """
    activations = _values(before.sent, _nodes(before.forward))
    gradients = _values(after.gradients_sent, _nodes(after.backward))
    free = [i for i, value in enumerate(activations) if value.scalar is None and value.like.is_floating_point()]
    slots: list[int] = []
    for gradient in gradients:
        fitting = (i for i in free if _size(activations[i]) == _size(gradient) and i not in slots)
        slot = next(fitting, None)
        if slot is None:
            slot = len(activations)
            activations = (*activations, replace(gradient, name=f"slot_of_{gradient.name}", order=()))
        slots.append(slot)
    return BorderSlots(activations, gradients, tuple(slots))


def _size(value: BorderValue) -> tuple[int, torch.dtype]:
    return prod(value.like.shape), value.like.dtype


def _nodes(graph: torch.fx.GraphModule) -> Mapping[str, Node]:
    return {node.name: node for node in graph.graph.nodes}


def _values(names: Sequence[str], nodes: Mapping[str, Node]) -> tuple[BorderValue, ...]:
    return tuple(border_value(nodes[name], frozenset(), frozenset()).sent(False) for name in names)
