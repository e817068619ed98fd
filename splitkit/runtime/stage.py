"""One stage: a module that takes what comes over its border, runs its part, and gives what goes over the next."""

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
from splitkit.runtime.chain import Chain
from splitkit.runtime.dice import Dice
from splitkit.runtime.divided import DividedStage, divisible, passed_on
from splitkit.runtime.ends import Ends
from splitkit.runtime.faults import Progress
from splitkit.runtime.values import Carried, fresh


@dataclass
class Batch:
    """What a step works on; shared by the stages of a rank.

    Attributes:
        progress: what the rank is at; ``None`` under a schedule of others.
        share: the microbatches of this rank, as torch's stage numbers them from 0 on.
        inputs: microbatch -> the inputs of the graph by name.
        targets: microbatch -> what the loss is given besides the output.
        seeds: microbatch -> its seed.
        outputs: microbatch -> what the graph returns, on the last rank.
        losses: microbatch -> its loss, on the last rank.
        found: the losses of the microbatches of all replicas, on the last rank.
        keep: whether outputs are wanted.
    """

    progress: Progress | None = None
    share: Sequence[int] = ()
    inputs: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] = ()
    seeds: Sequence[int] = ()
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    found: torch.Tensor | None = None
    keep: bool = False


class ChainStage(nn.Module):
    """The part of one stage, for torch's stage.

    Attributes:
        part: the part's module; its parameters have their original names.
        takes: what comes from the stage before.
        gives: what goes to the stage behind.
        ran: called once with what came in and what goes out, after the first forward that trains.
    """

    def __init__(self, chain: Chain, stage: int, ends: Ends, batch: Batch, device: torch.device) -> None:
        super().__init__()
        key = chain.keys[stage]
        self.part = chain.split.parts[key]
        self._read = {**chain.own(stage), chain.split.names[key]: self.part}  # the part itself where it is checkpointed
        self._stage, self._stages, self._ends, self._batch, self.device = stage, chain.stages, ends, batch, device
        self._nodes, self._inputs = chain.nodes(stage), chain.inputs(stage)
        self._received = chain.border(stage - 1, ends.wanted) if stage else ()
        self._handed = chain.border(stage, ends.wanted) if not self.last else ()
        self.takes: tuple[Carried, ...] = _carried(chain, self._received, ends)
        self.gives: tuple[Carried, ...] = _carried(chain, self._handed, ends)
        self.ran: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] | None = None
        self._output = chain.split.module.graph.output_node()
        self._module = chain.split.module
        self.dice = Dice.of(chain, stage, device)

    @property
    def once(self) -> bool:
        """Whether it has one backward: what is compiled or computed again would do its work twice, and shards of FSDP2
        are gathered and added up once."""
        again = any(node.op == "get_attr" and self._read[str(node.target)] is self.part for node in self._nodes)
        return again or any(_torch.is_compiled(m) or isinstance(m, FSDPModule) for m in self.part.modules())

    @property
    def trains(self) -> bool:
        """Whether gradients come back."""
        return self._ends.loss is not None

    @property
    def last(self) -> bool:
        """Whether no stage is behind it."""
        return self._stage == self._stages - 1

    def forward(self, *received: torch.Tensor, microbatch: torch.Tensor) -> Any:
        """Run one microbatch."""
        number = int(microbatch)
        progress = self._batch.progress
        with nullcontext() if progress is None else progress.computing(self._stage, "F", number):
            return self._watched(received, number)

    def begin_backward(self, chunk: int) -> None:
        """Note that the gradient has come that a backward waits for.

        Args:
            chunk: the microbatch, as torch's stage numbers it.
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
        inputs = self._batch.inputs[number]
        values: dict[Node, Any] = {node: inputs[str(node.target)] for node in self._inputs}
        rest = self.dice.begin(received, self._batch.seeds[number])
        try:
            for node, value, how in zip(self._received, rest, self.takes, strict=True):
                values[node] = how.unpacked(value)
            for node in self._nodes:
                values[node] = self._run(node, values)
        finally:
            state = self.dice.end()
        if self.last:
            return self._finish(number, values, inputs)
        where = f"after stage {self._stage}, in microbatch {number}"
        given = [how.packed(values[n], self.device, where) for n, how in zip(self._handed, self.gives, strict=True)]
        return (*state, *given)

    def _run(self, node: Node, values: Mapping[Node, Any]) -> Any:
        if node.op == "get_attr":
            return self._read[str(node.target)]
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "call_module":
            return self.part(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _finish(self, number: int, values: Mapping[Node, Any], inputs: Mapping[str, Any]) -> Any:
        """The loss, which is all that torch is given; outputs stay here."""

        def value(node: Node) -> Any:
            return values[node] if node in values else inputs.get(str(node.target))

        if self._ends.own is not None:
            result = values[self._ends.own]
        else:
            result = self._module.graph.process_outputs(map_arg(self._output.args[0], value))
        if self._ends.loss is None:
            self._batch.outputs[number] = result
            return torch.zeros((), device=self.device)
        loss = self._ends.loss(result, self._batch.targets[number] if self._batch.targets else None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"{type(loss).__name__}" if not isinstance(loss, torch.Tensor) else f"of shape {list(loss.shape)}"
            raise PipelineError("SK802", f"the loss is {what}", "Give one number that requires grad.")
        self._batch.losses[number] = loss.detach()
        if self._batch.keep:
            self._batch.outputs[number] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        return fresh(loss.reshape(()) / len(self._batch.inputs))

    @property
    def arrives(self) -> tuple[torch.Tensor, ...]:
        """What torch is told of the border before it, on ``meta``."""
        return (*([self.dice.like] if self.dice.takes else []), *(value.told for value in self.takes))

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """What torch is told of the border behind it, on ``meta``."""
        if self.last:
            return (torch.empty((), device="meta", requires_grad=self._ends.loss is not None),)
        return (*([self.dice.like] if self.dice.gives else []), *(value.told for value in self.gives))


def _carried(chain: Chain, values: Sequence[Node], ends: Ends) -> tuple[Carried, ...]:
    return tuple(chain.value(node).sent(ends.loss is not None) for node in values)


class PartStage(DividedStage):
    """Torch's stage of a part, with static metadata: nothing runs on made-up values."""

    def __init__(self, module: ChainStage, number: int, count: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(
            module, number, count, module.device, input_args=module.arrives, output_args=module.leaves, group=group
        )
        module.ran = self._divide

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """See torch."""
        cast(ChainStage, self.submod).begin_backward(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _divide(self, received: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        """After the first microbatch: let backward run as a whole where torch would divide it wrongly."""
        module = cast(ChainStage, self.submod)
        if not received or (divisible(received, given, list(module.parameters())) and not module.once):
            self.passed_on = passed_on(given)
        else:
            self.dw_builder = lambda: lambda: None  # its part for inputs is all, none is left for weights
