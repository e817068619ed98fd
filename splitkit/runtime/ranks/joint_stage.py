"""Runs the graphs of one stage of a training step inside torch's pipeline schedules.

To torch, a stage is a module whose forward is one autograd function. Its backward runs the stage's input-gradient graph
and puts aside what the weight graph needs; torch calls ``dw_builder`` after it, and the runner that this returns when
the schedule has the weight part. Torch thus traverses none of the stage's own operations, so they may be compiled, and
backward is divided in the first stage as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from splitkit.engine.staged_step import HostValue, StageGraphs, host_values, on_device
from splitkit.errors import PipelineError
from splitkit.pipeline.order import Action, host_windows
from splitkit.runtime.devices.accelerators import current
from splitkit.runtime.ranks.border_values import BorderValue, border_value
from splitkit.runtime.ranks.faults import Progress
from splitkit.runtime.ranks.replicas import RngHandover
from splitkit.runtime.ranks.step_losses import scaled

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
        if values:
            self._values[stage, microbatch] = values

    def back(self, stage: int, microbatch: int) -> None:
        """Make sure that the values of a microbatch are on their way back: backward is about to run."""
        for value in self._values.get((stage, microbatch), ()):
            if value.copy is None:
                value.release()
                value.ask()

    def done(self, stage: int, microbatch: int) -> None:
        """Forget the values of a microbatch whose backward, or input part, has run."""
        for value in self._values.pop((stage, microbatch), ()):
            value.wait()  # what only the weight graph reads

    def _of(self, stage: int, kinds: str, microbatch: int) -> int | None:
        found = (self._number.get(Action(stage, kind, microbatch)) for kind in kinds)
        return next((number for number in found if number is not None), None)

    def _note(self) -> None:
        values = [value for each in self._values.values() for value in each]
        self.host_most = max(self.host_most, sum(value.host.nbytes for value in values))
        here = sum(value.host.nbytes for value in values if value.source is not None or value.copy is not None)
        self.device_most = max(self.device_most, here)


Graph = Callable[..., tuple[Any, ...]]


@dataclass
class JointBatch:
    """The data of a step, which the stages of a rank share.

    Attributes:
        progress: the action that the rank is running.
        primals: microbatch -> the inputs of the graph by the names of their placeholders, without those of the model.
        shares: microbatch -> the factor of its loss in the loss of the step.
        seeds: microbatch -> its seed.
        losses: microbatch -> its loss, on the last rank.
        queue: the values that wait on the host.
    """

    progress: Progress
    primals: Sequence[Mapping[str, Any]] = ()
    shares: Sequence[Fraction | float] = ()
    seeds: Sequence[int] = ()
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    queue: HostQueue = field(default_factory=lambda: HostQueue((), ()))


@dataclass(frozen=True)
class StageOutputs:
    """What a stage does with the outputs of its forward.

    Attributes:
        loss: the position of the loss, in the last stage.
        updates: position -> the buffer that gets the new value.
        tangents: for each tangent of the last stage, whether it is that of the loss; the others are zero.
        gradients: position of a gradient -> the parameter that it is added to.
    """

    loss: int | None
    updates: Mapping[int, torch.Tensor]
    tangents: Sequence[tuple[bool, torch.Tensor]]
    gradients: Mapping[int, nn.Parameter]


class JointStage(nn.Module):
    """The module of one stage.

    Attributes:
        held: microbatch -> what forward saved for backward.
        waiting: microbatches, the first backward first -> what the weight graph will be given.
        terms: position -> the sum of the gradients of this step, for gradients that are not whole ones.
    """

    def __init__(
        self,
        number: int,
        graphs: StageGraphs,
        outputs: StageOutputs,
        own: Mapping[str, torch.Tensor],
        borders: tuple[BorderSlots | None, BorderSlots | None],
        rng: RngHandover,
        batch: JointBatch,
        partial: frozenset[int],
        compiled: bool,
    ) -> None:
        super().__init__()
        self.number, self.graphs, self.outputs, self.own = number, graphs, outputs, own
        self.before, self.after = borders
        self.rng, self.batch, self._partial = rng, batch, partial
        device = batch.progress.device
        self.anchor = nn.Parameter(torch.empty(0, device=device))
        """Makes the outputs of the first stage, which receives no tensor with a gradient, require one."""
        self._forward, self._backward = (_callable(g, device, compiled) for g in (graphs.forward, graphs.backward))
        self._weight = _callable(graphs.weight, device, compiled) if graphs.weight is not None else None
        self.held: dict[int, dict[str, Any]] = {}
        self.waiting: list[tuple[int, tuple[Any, ...]]] = []
        self.terms: dict[int, torch.Tensor] = {}

    @property
    def has_backward(self) -> bool:
        """Whether a gradient comes back to this stage. Torch runs no backward of a stage to which none does."""
        return self.after is None or bool(self.after.slot_of)

    @property
    def input_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors on ``meta`` that torch is told to receive."""
        state = [self.rng.like] if self.rng.receives else []
        return (*state, *(self.before.expected if self.before else ()))

    @property
    def output_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors on ``meta`` that torch is told to send; the loss in the last stage."""
        if self.after is None:
            return (torch.empty((), device="meta", requires_grad=True),)
        return (*([self.rng.like] if self.rng.sends else []), *self.after.expected)

    def forward(self, *received: torch.Tensor, microbatch: torch.Tensor) -> Any:
        """Run one microbatch; return the values to send, or the term of its loss in the loss of the step."""
        number = int(microbatch)
        with self.batch.progress.computing(self.number, "F", number):
            made = _StageFunction.apply(self, number, self.anchor, *received)  # type: ignore[no-untyped-call]
            return scaled(made[0], self.batch.shares[number]) if self.after is None else made

    def run_forward(self, number: int, received: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the forward graph of one microbatch, without autograd."""
        given = self.batch.primals[number]
        self.batch.queue.begin(self.number, "F", number)
        rest = self.rng.begin(received, self.batch.seeds[number], number)
        try:
            values = [
                how.unpacked(v) for how, v in zip(self.before.activations if self.before else (), rest, strict=True)
            ]
            primals = [self.own[name] if name in self.own else given[name] for name in self.graphs.primals]
            own, sent, held = self.graphs.given(self._forward(*primals, *values))
        finally:
            state = self.rng.end(number)
        outputs = dict(zip(self.graphs.outputs, own, strict=True))
        self.held[number] = held
        self._keep_old_values(number)
        if self.has_backward:
            self.batch.queue.add(self.number, number, host_values(held))
        else:
            del self.held[number]
        del held
        self.batch.queue.end(self.number, "F", number)
        for position, buffer in self.outputs.updates.items():
            buffer.copy_(outputs[position])
        if self.after is None:
            assert self.outputs.loss is not None
            loss = outputs[self.outputs.loss].reshape(()).clone()
            self.batch.losses[number] = loss.detach().clone()
            return (loss,)
        where, device = f"after stage {self.number}, in microbatch {number}", self.batch.progress.device
        packed = [how.packed(v, device, where) for how, v in zip(self.after.activations, sent, strict=True)]
        return (*state, *(_apart(v, received) for v in packed))

    def _keep_old_values(self, number: int) -> None:
        """Copy saved buffers that forward is about to update: backward needs them as they were."""
        updated = {id(buffer) for buffer in self.outputs.updates.values()}
        held = self.held[number]
        for name, value in held.items():
            if id(value) in updated:
                held[name] = value.clone()

    def run_backward(self, number: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the backward graph of one microbatch; return the gradient for each received tensor."""
        self.batch.progress.begun(self.number, "B", number)
        self.batch.queue.begin(self.number, "BI", number)
        self.batch.queue.back(self.number, number)
        held = self.held.pop(number)
        if self.after is None:
            crossing = [gradients[0] * like if of_loss else like * 0 for of_loss, like in self.outputs.tangents]
        else:
            crossing = self.after.unpacked(gradients[int(self.rng.sends) :])
        made = self._backward(*on_device(held, self.graphs.saved), *crossing)
        self.batch.queue.end(self.number, "BI", number)
        self.batch.queue.done(self.number, number)
        sent = len(self.graphs.gradients_sent)
        returned = sent + len(self.graphs.gradients)
        self._add(self.graphs.gradients, made[sent:returned])
        self.waiting.append((number, (*on_device(held, self.graphs.deferred), *made[returned:])))
        if self.before is None:
            return []
        where = f"in backward of stage {self.number}, microbatch {number}"
        back = self.before.packed(made[:sent], self.batch.progress.device, where)
        return [*([None] if self.rng.receives else []), *back]

    def weight_runner(self) -> Callable[..., None]:
        """Return what runs the weight part of the microbatch whose backward ran last: torch's ``dw_builder``."""
        if not self.has_backward:
            return lambda: None
        number, given = self.waiting[-1]

        def run() -> None:
            with torch.no_grad():
                self.batch.queue.begin(self.number, "W", number)
                self.waiting.remove(next(entry for entry in self.waiting if entry[0] == number))
                if self._weight is not None:
                    self._add(self.graphs.weight_gradients, self._weight(*given))
                self.batch.queue.end(self.number, "W", number)

        return run

    def _add(self, positions: Sequence[int], found: Sequence[torch.Tensor]) -> None:
        """Add gradients to those of the parameters, or to the terms of this step."""
        for position, gradient in zip(positions, found, strict=True):
            if position in self._partial:
                old = self.terms.get(position)
                self.terms[position] = gradient.clone() if old is None else old.add_(gradient)
            elif position in self.outputs.gradients:
                parameter = self.outputs.gradients[position]
                if parameter.grad is None:
                    parameter.grad = gradient.clone()  # it may be an alias of another gradient
                else:
                    parameter.grad.add_(gradient)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that now wait for weight graphs, each storage once, without what the model and the batch hold."""
        known = {t.untyped_storage().data_ptr() for t in self._caller_tensors()}
        tensors = (v for _, values in self.waiting for v in values if isinstance(v, torch.Tensor))
        found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(nbytes for key, nbytes in found.items() if key not in known)

    def _caller_tensors(self) -> list[torch.Tensor]:
        given = [v for primals in self.batch.primals for v in primals.values() if isinstance(v, torch.Tensor)]
        return [*self.own.values(), *given]


class _StageFunction(torch.autograd.Function):
    """The forward and backward graphs of a stage as one autograd node."""

    @staticmethod
    def forward(ctx: Any, stage: JointStage, number: int, anchor: Any, *received: torch.Tensor) -> Any:
        ctx.stage, ctx.number = stage, number
        made = stage.run_forward(number, received)
        grads = [like.requires_grad for like in stage.output_tensors]
        ctx.mark_non_differentiable(*(t for t, grad in zip(made, grads, strict=True) if not grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            return None, None, None, *ctx.stage.run_backward(ctx.number, gradients)


def _callable(graph: Any, device: torch.device, compiled: bool) -> Graph:
    """Return what runs a graph: no module, since torch refuses stages with compiled modules under zero bubble."""
    run = torch.compile(graph) if compiled else graph

    def called(*given: Any) -> tuple[Any, ...]:
        with current(device):
            made: tuple[Any, ...] = run(*given)
        return made

    return called


def _apart(value: torch.Tensor, received: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a value that is passed on as a tensor of its own, which an autograd function may return."""
    return value.detach() if any(value is given for given in received) else value


# Choose the buffers in which gradients of a staged training step are sent upstream over a border.
#
# Torch's pipelining sends one gradient back for each activation that requires one, and takes its shape from it. The
# graphs of a staged step may send back any values, so each of them travels in the slot of an activation of its size and
# dtype. Between layers these are the activation's own gradients; inside a layer, the slot may be another activation's.


@dataclass(frozen=True)
class BorderSlots:
    """How values cross the border between a stage and the next one.

    Attributes:
        activations: the values that go to the next stage, in order.
        gradients: the values that come back, in order.
        slot_of: for each gradient, the position of the activation in whose place it comes back.
    """

    activations: tuple[BorderValue, ...]
    gradients: tuple[BorderValue, ...]
    slot_of: tuple[int, ...]

    @property
    def expected(self) -> tuple[torch.Tensor, ...]:
        """The tensors on ``meta`` that torch is told to expect; those with a slot require a gradient."""
        return tuple(
            value.meta_tensor.detach().clone().requires_grad_(i in self.slot_of)
            for i, value in enumerate(self.activations)
        )

    def packed(self, gradients: Sequence[torch.Tensor], device: torch.device, where: str) -> list[torch.Tensor | None]:
        """Return what goes back for each activation: its slot's gradient in the activation's shape, or ``None``."""
        found: list[torch.Tensor | None] = [None] * len(self.activations)
        for value, gradient, slot in zip(self.gradients, gradients, self.slot_of, strict=True):
            found[slot] = value.packed(gradient, device, where).view(self.activations[slot].meta_tensor.shape)
        return found

    def unpacked(self, slots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients from what came back for each activation."""
        return [
            value.unpacked(slots[slot].view(value.meta_tensor.shape))
            for value, slot in zip(self.gradients, self.slot_of, strict=True)
        ]


def border_slots(before: StageGraphs, after: StageGraphs, number: int) -> BorderSlots:
    """Return how values cross the border between two stages.

    Args:
        before: the graphs of the stage before the border.
        after: those of the stage after it.
        number: the number of the stage before.

    Raises:
        PipelineError: SK801 for a value that cannot be sent, or a gradient for which no activation has a slot.
    """
    activations = _values(before.sent, _nodes(before.forward))
    gradients = _values(after.gradients_sent, _nodes(after.backward))
    free = [i for i, value in enumerate(activations) if value.scalar is None and value.like.is_floating_point()]
    slots: list[int] = []
    for gradient in gradients:
        fitting = (i for i in free if _size(activations[i]) == _size(gradient) and i not in slots)
        slot = next(fitting, None)
        if slot is None:
            raise PipelineError(
                "SK801",
                f"stage {number + 1} sends {gradient.name} back to stage {number}, but of the activations that it "
                f"received ({', '.join(before.sent) or 'none'}) none is left of that size and dtype",
                "Cut a few nodes earlier or later, between two layers: torch sends one gradient back per activation.",
                [gradient.name],
            )
        slots.append(slot)
    return BorderSlots(activations, gradients, tuple(slots))


def _size(value: BorderValue) -> tuple[int, torch.dtype]:
    return prod(value.like.shape), value.like.dtype


def _nodes(graph: torch.fx.GraphModule) -> Mapping[str, Node]:
    return {node.name: node for node in graph.graph.nodes}


def _values(names: Sequence[str], nodes: Mapping[str, Node]) -> tuple[BorderValue, ...]:
    return tuple(border_value(nodes[name], frozenset(), frozenset()).sent(False) for name in names)
