"""Runs one stage: a module that takes the received values, runs its part, and returns the values to send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.fx import Node, map_arg
from torch.nn import Parameter

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.errors import PipelineError
from splitkit.graph.size_expressions import evaluated
from splitkit.pipeline.order import PipelineOrder
from splitkit.runtime.devices.accelerators import current
from splitkit.runtime.ranks.border_values import BorderValue, non_view
from splitkit.runtime.ranks.faults import Progress
from splitkit.runtime.ranks.microbatches import MessageShapes, StepSizes, message_shapes
from splitkit.runtime.ranks.order_runner import torch_schedule
from splitkit.runtime.ranks.planned_stage import HostQueue, PlannedStage
from splitkit.runtime.ranks.replicas import Replicas, RngChannel, RngHandover, gradients_aside
from splitkit.runtime.ranks.stage_chain import Chain, LastStage, require_loss
from splitkit.runtime.ranks.step_losses import scaled

# Finds backwards that torch's pipelining divides wrongly, and refuses what old versions of it cannot run.
#
# Torch divides the backward of a stage in ``torch/distributed/pipelining/_backward.py``. ``stage_backward_input`` runs
# backward along the paths from the outputs to the inputs, and records the gradients that arrive at the nodes where the
# paths to parameters branch off. ``stage_backward_weight`` runs the rest from these nodes::
#
#     output ──▶ add ──▶ mm ──▶ input           both paths meet at one node: mm
#                         └───▶ weight
#
# A parameter to which no such node leads, because an output does not depend on an input, silently gets no gradient. A
# parameter to which several lead may be counted twice, or need what was freed (torch 2.11 to 2.15).


VIEWS = frozenset(f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias"))
PRODUCTS = frozenset(f"{name}Backward0" for name in ("Mm", "Bmm", "Embedding", "Convolution", "NativeLayerNorm"))
"""Autograd nodes that compute a new tensor for each gradient, rather than pass one on."""


def divisible(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], parameters: Sequence[Any]) -> bool:
    """Whether torch divides the backward of a stage correctly.

    It does if every leaf that gets a gradient is an input or a known parameter, and exactly one node leads to each
    parameter from the paths between outputs and inputs.

    Args:
        inputs: the inputs of the stage.
        outputs: the outputs of a forward.
        parameters: the parameters of the module that torch runs.
    """
    roots = [t.grad_fn for t in outputs if t.grad_fn is not None]
    above = _above(roots)
    leaves = {node: node.variable for node in above if hasattr(node, "variable")}
    given = {id(t) for t in inputs}
    known = {id(p) for p in parameters}
    ways = _upwards([node for node, leaf in leaves.items() if id(leaf) in given], above, set())
    for node, leaf in leaves.items():
        if id(leaf) in given:
            continue
        own = _upwards([node], above, ways)
        if id(leaf) not in known or len(own & ways) != 1 or any(root in own and root not in ways for root in roots):
            return False
    return True


def passed_on(outputs: Sequence[torch.Tensor]) -> list[Parameter]:
    """Return the parameters whose gradient may alias another tensor."""
    above = _above([t.grad_fn for t in outputs if t.grad_fn is not None])
    leaves = [node for node in above if isinstance(getattr(node, "variable", None), Parameter)]
    return [node.variable for node in leaves if not _computed(node, above)]


def _computed(leaf: Any, above: Mapping[Any, Sequence[Any]]) -> bool:
    """Whether one op computes a new tensor as the gradient of a leaf, which reaches it through views at most."""
    givers = above[leaf]
    while len(givers) == 1 and givers[0].name() in VIEWS:
        givers = above[givers[0]]
    return len(givers) == 1 and givers[0].name() in PRODUCTS


def _above(roots: Iterable[Any]) -> dict[Any, list[Any]]:
    """Map each node of an autograd graph to the nodes whose backward gives it a gradient."""
    above: dict[Any, list[Any]] = {root: [] for root in roots}
    waiting = list(above)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is not None:
                if below not in above:
                    above[below] = []
                    waiting.append(below)
                above[below].append(node)
    return above


def _upwards(nodes: Sequence[Any], above: Mapping[Any, Sequence[Any]], ends: set[Any]) -> set[Any]:
    """Return these nodes and all above them, without going above nodes in ``ends``."""
    seen, waiting = set(nodes), list(nodes)
    while waiting:
        for node in above[waiting.pop()]:
            if node not in seen:
                seen.add(node)
                if node not in ends:
                    waiting.append(node)
    return seen


_SINCE = (2, 13)
"""The first version of torch without the limits that `require_support` refuses."""


def require_support(order: PipelineOrder, stages: Sequence[Any]) -> None:
    """Refuse what the installed torch cannot run in these stages (`splitkit.runtime.ranks.stage.ChainStage`).

    Before 2.13 every value that crosses a border must be a float with a gradient, consecutive stages cannot share a
    rank, and zero-bubble schedules cannot detach the outputs of a stage.

    Raises:
        PipelineError: SK806, naming the value or the schedule.
    """
    if _is_recent():
        return
    zero_bubble = any(action.kind == "I" for row in order.ranks for action in row)
    if zero_bubble or any(a == b for a, b in zip(order.rank_of, order.rank_of[1:], strict=False)):
        raise _needs(f"{order.name} on {len(order.ranks)} ranks", "Use 1f1b or interleaved-1f1b on 2 ranks or more, or")
    require_plain_values(stages)


def require_plain_values(stages: Sequence[Any]) -> None:
    """Refuse values that the installed torch cannot send: see `require_support`."""
    for stage in () if _is_recent() else stages:
        if stage.rng.receives or stage.rng.sends:
            raise _needs("dropout in several stages", "Capture in eval mode, or")
        for value in (*stage.received_values, *stage.sent_values):
            if not value.like.requires_grad and stage.trains:
                raise _needs(f"{value.name}, which goes over a border without a gradient,", "Split elsewhere, or")


def _is_recent() -> bool:
    return tuple(map(int, torch.__version__.split(".")[:2])) >= _SINCE


def _needs(what: str, else_: str) -> PipelineError:
    return PipelineError(
        "SK806", f"{what} needs torch 2.13; this is {torch.__version__}", f"{else_} install torch 2.13."
    )


@dataclass
class Batch:
    """The data of a step, which the stages of a rank share.

    Attributes:
        progress: the action that the rank is running; ``None`` under a schedule that the user's program drives.
        share: the microbatches of this rank; torch's stage numbers them from 0.
        inputs: microbatch -> the inputs of the graph by name.
        sizes: the sizes of these inputs.
        targets: microbatch -> the target, the second argument of the loss.
        seeds: microbatch -> its seed.
        outputs: microbatch -> the output of the graph, on the last rank.
        losses: microbatch -> its loss, on the last rank.
        found: the losses of the microbatches of all replicas, on the last rank.
        loss: the loss of the step, on the last rank.
        keep: whether outputs are wanted.
        channel: hands RNG states over between the hosts of accelerators.
        queue: the saved values that wait on the host.
    """

    progress: Progress | None = None
    share: Sequence[int] = ()
    inputs: Sequence[Mapping[str, Any]] = ()
    sizes: StepSizes = field(default_factory=lambda: StepSizes(()))
    targets: Sequence[Any] = ()
    seeds: Sequence[int] = ()
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    found: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    keep: bool = False
    channel: RngChannel | None = None
    queue: HostQueue = field(default_factory=lambda: HostQueue((), ()))


class ChainStage(nn.Module):
    """The module of one stage, which torch's stage runs.

    Attributes:
        part: the part's module; its parameters have their original names.
        received_values: the values that come from the previous stage.
        sent_values: the values that go to the next stage.
        ran: called once, with the received and the sent tensors, after the first forward of training.
    """

    def __init__(
        self,
        chain: Chain,
        stage: int,
        last_stage: LastStage,
        batch: Batch,
        device: torch.device,
        shapes: MessageShapes,
    ) -> None:
        super().__init__()
        key = chain.keys[stage]
        self.part = chain.split.parts[key]
        # A checkpointed part is read by ``get_attr``, and called by ``checkpoint``.
        self._read = {**chain.own(stage), chain.split.names[key]: self.part}
        self._stage, self._stages, self._last_stage = stage, chain.stages, last_stage
        self._batch, self.device = batch, device
        self._nodes, self._inputs = chain.nodes(stage), chain.inputs(stage)
        self._received = chain.border(stage - 1, last_stage.wanted) if stage else ()
        self._handed = chain.border(stage, last_stage.wanted) if not self.last else ()
        self._computed = chain.computed(stage, last_stage.wanted) if stage else {}
        self._varies = bool(shapes.padded)
        self.received_values: tuple[BorderValue, ...] = _border_values(chain, self._received, last_stage, shapes)
        self.sent_values: tuple[BorderValue, ...] = _border_values(chain, self._handed, last_stage, shapes)
        self.ran: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] | None = None
        self._output = chain.split.module.graph.output_node()
        self._module = chain.split.module
        self.rng = RngHandover(chain, stage, device, batch.channel)
        self.chunk = 0
        if self.planned is not None:
            self.planned.device = device

    @property
    def planned(self) -> PlannedStage | None:
        """The part, if a plan has divided its backward; ``None`` if autograd runs it."""
        return self.part if isinstance(self.part, PlannedStage) else None

    @property
    def needs_whole_backward(self) -> bool:
        """Whether backward must run as a whole, not divided into an input and a weight part.

        A compiled or checkpointed part would do its work in both, and FSDP2 gathers and sums its shards once.
        """
        again = any(node.op == "get_attr" and self._read[str(node.target)] is self.part for node in self._nodes)
        return again or any(_torch.is_compiled(m) or isinstance(m, FSDPModule) for m in self.part.modules())

    @property
    def trains(self) -> bool:
        """Whether gradients come back, as in training."""
        return self._last_stage.loss is not None

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self._stage == self._stages - 1

    def forward(self, *received: torch.Tensor) -> Any:
        """Run one microbatch."""
        number = self.microbatch(self.chunk)
        progress = self._batch.progress
        if self.planned is not None:
            self.planned.moved = partial(self._batch.queue.add, self._stage, number)
        computing = nullcontext() if progress is None else progress.computing(self._stage, "F", number)
        with computing, self.running("F", number):
            return self._watched(received, number)

    @contextmanager
    def running(self, kinds: str, number: int) -> Iterator[None]:
        """Move values to the host and back while an action runs.

        Args:
            kinds: the kind of the action; for a backward ``"BI"``, whichever the schedule has.
            number: the microbatch, by its number in the step.
        """
        self._batch.queue.begin(self._stage, kinds, number)
        yield
        self._batch.queue.end(self._stage, kinds, number)

    def microbatch(self, chunk: int) -> int:
        """Return the number in the step of torch's microbatch."""
        return self._batch.share[chunk] if self._batch.share else chunk

    def backward(self, chunk: int, run: Callable[[], None]) -> None:
        """Run a backward whose gradient has arrived.

        Args:
            chunk: the microbatch, by torch's number.
            run: runs it.
        """
        number = self.microbatch(chunk)
        if self._batch.progress is not None:
            self._batch.progress.begun(self._stage, "B", number)
        with self.running("BI", number):
            run()
        self._batch.queue.done(self._stage, number)

    def _watched(self, received: tuple[torch.Tensor, ...], number: int) -> Any:
        with current(self.device):
            made = self._forward(received, number)
        if self.ran is not None and self.trains:
            self.ran(received, made if isinstance(made, tuple) else (made,))
            self.ran = None
        return made

    def _forward(self, received: tuple[torch.Tensor, ...], number: int) -> Any:
        inputs = self._batch.inputs[number]
        values: dict[Node, Any] = {node: inputs[str(node.target)] for node in self._inputs}
        values |= {node: evaluated(size, self._batch.sizes.sizes[number]) for node, size in self._computed.items()}
        rest = self.rng.begin(received, self._batch.seeds[number], number)
        try:
            for node, value, how in zip(self._received, rest, self._in(number, self.received_values), strict=True):
                values[node] = how.unpacked(value)
            for node in self._nodes:
                values[node] = result_of(node, values, self._read, self.part)
        finally:
            state = self.rng.end(number)
        if self.last:
            return self._finish(number, values, inputs)
        where = f"after stage {self._stage}, in microbatch {number}"
        sent = zip(self._handed, self._in(number, self.sent_values), strict=True)
        given = [how.packed(values[n], self.device, where) for n, how in sent]
        return (*state, *given)

    def _in(self, number: int, values: tuple[BorderValue, ...]) -> tuple[BorderValue, ...]:
        """Return the values that cross a border as they are in a microbatch."""
        return tuple(how.at(self._batch.sizes.sizes[number]) for how in values) if self._varies else values

    def _finish(self, number: int, values: Mapping[Node, Any], inputs: Mapping[str, Any]) -> Any:
        """Return the loss, which is all that torch gets; outputs stay in the batch."""

        def value(node: Node) -> Any:
            return values[node] if node in values else inputs.get(str(node.target))

        if self._last_stage.own is not None:
            result = values[self._last_stage.own]
        else:
            result = self._module.graph.process_outputs(map_arg(self._output.args[0], value))
        if self._last_stage.loss is None:
            self._batch.outputs[number] = result
            return torch.zeros((), device=self.device)
        loss = self._last_stage.loss(result, self._batch.targets[number] if self._batch.targets else None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"{type(loss).__name__}" if not isinstance(loss, torch.Tensor) else f"of shape {list(loss.shape)}"
            raise PipelineError("SK802", f"the loss is {what}", "Give one number that requires grad.")
        self._batch.losses[number] = loss.detach()
        if self._batch.keep:
            self._batch.outputs[number] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        return non_view(scaled(loss.reshape(()), self._batch.sizes.shares[number]))

    @property
    def input_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors on ``meta`` that torch is told to receive from the previous stage."""
        return (*([self.rng.like] if self.rng.receives else []), *(value.meta_tensor for value in self.received_values))

    @property
    def output_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors on ``meta`` that torch is told to send to the next stage."""
        if self.last:
            return (torch.empty((), device="meta", requires_grad=self._last_stage.loss is not None),)
        return (*([self.rng.like] if self.rng.sends else []), *(value.meta_tensor for value in self.sent_values))


def result_of(node: Node, values: Mapping[Node, Any], read: Mapping[str, Any], part: nn.Module) -> Any:
    """Return the result of a node of the parent.

    Args:
        node: the node.
        values: node -> its value, for all that it reads.
        read: name -> what ``get_attr`` reads.
        part: the part of the stage, which the parent calls.
    """
    if node.op == "get_attr":
        return read[str(node.target)]
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_module":
        return part(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _border_values(
    chain: Chain, values: Sequence[Node], last_stage: LastStage, shapes: MessageShapes
) -> tuple[BorderValue, ...]:
    return tuple(shapes.of(chain.value(node).sent(last_stage.loss is not None)) for node in values)


class PartStage(PipelineStage):
    """Torch's stage of a part, with static metadata, so that torch runs nothing on made-up inputs to find shapes.

    Where backward is divided, gradients do not alias. ``stage_backward_weight`` stores the tensor that autograd returns
    as the gradient of a parameter. If an op passes its gradient on unchanged, two parameters get the same tensor, and
    each later microbatch adds to both at once (torch 2.11 to 2.15)::

        x @ w + (a + b)       a and b get the same tensor
    """

    passed_on: Sequence[Parameter] = ()
    """The parameters whose first gradient may be the tensor of another gradient."""

    def __init__(self, module: ChainStage, number: int, count: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(
            module,
            number,
            count,
            module.device,
            input_args=module.input_tensors,
            output_args=module.output_tensors,
            group=group,
        )
        if module.planned is None:
            module.ran = self._divide
        else:
            # FSDP2 gathers and sums shards once for each backward
            module.planned.deferring = not isinstance(module.planned, FSDPModule)
            self.dw_builder = module.planned.weight_runner

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run torch's forward, and note its microbatch."""
        cast(ChainStage, self.submod).chunk = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run torch's backward, and note when it begins."""
        run = partial(super().backward_one_chunk, bwd_chunk_id, *args, **kwargs)
        cast(ChainStage, self.submod).backward(bwd_chunk_id, run)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run torch's weight part, while values move between host and device; copy gradients that may alias others."""
        module = cast(ChainStage, self.submod)
        new = [p for p in self.passed_on if p.grad is None]
        with module.running("W", module.microbatch(bwd_chunk_id)):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            for parameter in new:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def _divide(self, received: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        """Decide after the first forward whether torch can divide backward correctly; if not, let it run as a whole."""
        module = cast(ChainStage, self.submod)
        if not received or (divisible(received, given, list(module.parameters())) and not module.needs_whole_backward):
            self.passed_on = passed_on(given)
        else:
            # With a dw_builder, torch runs all of backward as the input part, and calls this one as the weight part.
            self.dw_builder = lambda: lambda: None


# Makes torch's stages and schedule for a rank: one set for training, one for inference.
#
# Torch's stages receive into tensors of fixed shapes, which up to torch 2.14 they hold from one step to the next. So
# only the stages of the last step are kept; new ones take 3 to 15 ms. All ranks see the same batches, so they make new
# stages in the same steps.


class RankStages:
    """The stages of a rank and their schedule, for the sizes of the last step.

    Attributes:
        last_stage: what the last stage does.
        batch: the batch that the stages work on.
        stages: torch's stages; none before the first step.
    """

    def __init__(
        self,
        chain: Chain,
        last_stage: LastStage,
        batch: Batch,
        order: PipelineOrder,
        numbers: Sequence[int],
        device: torch.device,
        replicas: Replicas,
    ) -> None:
        self.last_stage, self.batch = last_stage, batch
        self.stages: tuple[PartStage, ...] = ()
        self._chain, self._order, self._numbers, self._device = chain, order, numbers, device
        self._group, self._shapes = replicas.pipeline_group, MessageShapes()
        self._schedule: Any = None
        self._has_run = False

    def set_sizes(self, step: StepSizes, together: Callable[[Callable[[], Any]], Any]) -> None:
        """Make new stages if a step has other sizes than the last one. All ranks call it with the same sizes.

        Args:
            step: the sizes.
            together: runs something on all ranks, and raises the error of one on all.
        """
        shapes = message_shapes(self._chain, self.last_stage.wanted, step)
        if not self.stages or shapes != self._shapes:
            # The old stages are freed before new ones are made.
            self.stages, self._schedule, self._has_run = (), None, False
            self.stages, self._schedule = together(lambda: self._made(shapes))  # on all ranks, or on none
            self._shapes = shapes

    def _made(self, shapes: MessageShapes) -> tuple[tuple[PartStage, ...], Any]:
        """Return torch's stages and their schedule."""
        chain = self._chain
        require_loss(chain, self.last_stage)
        modules = [ChainStage(chain, s, self.last_stage, self.batch, self._device, shapes) for s in self._numbers]
        require_support(self._order, modules)
        numbered = zip(modules, self._numbers, strict=True)
        stages = tuple(PartStage(m, s, chain.stages, self._group) for m, s in numbered)
        # the last stage has computed the loss already
        loss = None if self.last_stage.loss is None else lambda loss, target: loss
        return stages, torch_schedule(self._order, stages, loss)

    def step(self) -> None:
        """Run one step on the inputs in ``batch``."""
        # torch asks for a target where there is a loss
        target = torch.tensor(self.batch.share) if self._chain.stages - 1 in self._numbers else None
        # torch clears the gradients of FSDP2's parameters when stages run for the first time
        parts = () if self._has_run else (self._chain.split.parts[self._chain.keys[s]] for s in self._numbers)
        modules = [m for part in parts for m in part.modules()]
        with gradients_aside(p for m in modules if isinstance(m, FSDPModule) for p in cast(nn.Module, m).parameters()):
            self._schedule.step(target=target, return_outputs=False)
        self._has_run = True
