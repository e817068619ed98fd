"""Runs one stage: a module that takes the received values, runs its part, and returns the values to send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.fx import Node, map_arg

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.errors import PipelineError
from splitkit.graph.size_expressions import evaluated
from splitkit.runtime.devices.accelerators import current
from splitkit.runtime.ranks.border_values import BorderValue, non_view
from splitkit.runtime.ranks.faults import Progress
from splitkit.runtime.ranks.last_stage import LastStage
from splitkit.runtime.ranks.rng_channel import RngChannel
from splitkit.runtime.ranks.rng_state import RngHandover
from splitkit.runtime.ranks.stage_chain import Chain
from splitkit.runtime.ranks.step_losses import scaled
from splitkit.runtime.ranks.step_sizes import MessageShapes, StepSizes
from splitkit.runtime.ranks.torch_limits import DividedStage, divisible, passed_on


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
    """

    progress: Progress | None = None
    share: Sequence[int] = ()
    inputs: Sequence[Mapping[str, Any]] = ()
    sizes: StepSizes = field(default_factory=lambda: StepSizes((), ()))
    targets: Sequence[Any] = ()
    seeds: Sequence[int] = ()
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    found: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    keep: bool = False
    channel: RngChannel | None = None


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
        self.rng = RngHandover.of(chain, stage, device, batch.channel)

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

    def forward(self, *received: torch.Tensor, microbatch: torch.Tensor) -> Any:
        """Run one microbatch."""
        number = int(microbatch)
        progress = self._batch.progress
        with nullcontext() if progress is None else progress.computing(self._stage, "F", number):
            return self._watched(received, number)

    def begin_backward(self, chunk: int) -> None:
        """Note that the gradient that a backward waits for has arrived.

        Args:
            chunk: the microbatch, by torch's number.
        """
        if self._batch.progress is not None:
            self._batch.progress.begun(self._stage, "B", self._batch.share[chunk])

    def _watched(self, received: tuple[torch.Tensor, ...], number: int) -> Any:
        made = self._forward(received, number)
        if self.ran is not None and self.trains:
            self.ran(received, made if isinstance(made, tuple) else (made,))
            self.ran = None
        return made

    def _forward(self, received: tuple[torch.Tensor, ...], number: int) -> Any:
        with current(self.device):
            return self._on_device(received, number)

    def _on_device(self, received: tuple[torch.Tensor, ...], number: int) -> Any:
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


class PartStage(DividedStage):
    """Torch's stage of a part, with static metadata, so that torch runs nothing on made-up inputs to find shapes."""

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
        module.ran = self._divide

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Note that backward begins, and run torch's."""
        cast(ChainStage, self.submod).begin_backward(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _divide(self, received: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        """Decide after the first forward whether torch can divide backward correctly; if not, let it run as a whole."""
        module = cast(ChainStage, self.submod)
        if not received or (divisible(received, given, list(module.parameters())) and not module.needs_whole_backward):
            self.passed_on = passed_on(given)
        else:
            # With a dw_builder, torch runs all of backward as the input part, and calls this one as the weight part.
            self.dw_builder = lambda: lambda: None
