"""A split on the ranks of a process group, under one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from splitkit._torch import pytree
from splitkit.brief import brief
from splitkit.checks import is_whole, shown
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.graph.storages import parameters_and_buffers
from splitkit.pipeline.order import PipelineOrder
from splitkit.runtime.actions import order_of, schedule_of
from splitkit.runtime.agreement import require_same
from splitkit.runtime.batches import Inputs
from splitkit.runtime.chain import Chain, chain_of
from splitkit.runtime.faults import Progress, named
from splitkit.runtime.stage import Batch, ChainStage, Ends, torch_stage
from splitkit.runtime.support import require_support
from splitkit.runtime.ties import Ties

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class PipelineStep:
    """What a step of training gives.

    Attributes:
        loss: the mean of the microbatches' losses, on the rank of the last stage; ``None`` elsewhere.
        losses: that of each microbatch, ``[microbatches]``; as ``loss``.
        outputs: what the model returned for each microbatch, if asked for; as ``loss``.
    """

    loss: torch.Tensor | None
    losses: torch.Tensor | None
    outputs: tuple[Any, ...] | None = None

    __repr__ = brief


def pipeline(
    split: Split,
    schedule: str | PipelineOrder = "1f1b",
    microbatches: int | None = None,
    *,
    loss: Loss | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Pipeline:
    """Run a split on the ranks of a process group, one part a stage, under one of torch's schedules.

    Every rank calls it, with the same split and arguments, and then `Pipeline.step` with the same batch. Each stage
    takes what it reads from the batch itself; values go from stage to stage with static metadata, so that nothing runs
    on made-up values, and parameters that several stages read get the sum of their gradients.

    Args:
        split: parts in the order of the stages, captured with the inputs of one microbatch.
        schedule: torch's name: gpipe, 1f1b, interleaved1f1b, loopedbfs, interleavedzerobubble, zbvzerobubble or
            dualpipev; or an order of your own, with any number of stages on each rank (`splitkit.pipeline.orderfile`
            reads torch's CSV).
        microbatches: how many in a step; as many as the order has, else 8.
        loss: gives the loss of ``(output, target)`` of one microbatch; ``None`` for models that return their loss.
        group: the ranks of the pipeline; all of the process group by default.
        device: of this rank; the current CUDA device where the group's backend is NCCL, else the CPU.
        seed: of the random numbers, see `Pipeline.seed_of`.

    Raises:
        PipelineError: SK801 for a split that cannot run on several ranks; SK804 where the ranks do not run the same.
        ScheduleError: SK330 where the schedule does not go with the numbers of stages, ranks and microbatches. An order
            that would wait for ever is refused where it is made (SK331).
    """
    return Pipeline(split, schedule, microbatches, loss, group, device, seed)


class Pipeline:
    """See `pipeline`.

    Attributes:
        split: what is run.
        order: what each rank does.
        rank: of this process in the group.
        stages: those of this rank.
        device: of this rank.
        microbatches: how many in a step.
        group: the ranks; ``None`` for all.
        steps: how many steps of training were begun; seeds go by it.
    """

    def __init__(
        self,
        split: Split,
        schedule: str | PipelineOrder,
        microbatches: int | None,
        loss: Loss | None,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        seed: int,
    ) -> None:
        if not dist.is_initialized():
            raise PipelineError(
                "SK804",
                "there is no process group",
                "Start with torchrun, and call torch.distributed.init_process_group.",
            )
        self.split = split
        self._chain = chain_of(split)
        self.group, self.rank = group, dist.get_rank(group)
        self.device = _device_of(device, group)
        what = schedule if isinstance(schedule, str) else getattr(schedule, "ranks", schedule)
        require_same(self._chain, {"schedule": what, "number of microbatches": microbatches, "seed": seed}, group)
        self.order = order_of(schedule, self._chain.stages, microbatches, dist.get_world_size(group))
        self.microbatches = self.order.microbatches
        self.stages = tuple(s for s, rank in enumerate(self.order.rank_of) if rank == self.rank)
        if not is_whole(seed):
            raise PipelineError("SK802", f"the seed is {shown(seed)}", "Give a whole number.")
        self._seed, self._loss, self.steps = int(seed), loss, 0
        self._inputs = Inputs(self._chain, self.microbatches, self.device)
        self._ties = Ties(self._chain, self.order.rank_of, group)
        self._runs: dict[bool, _Runs] = {}
        self._progress = Progress(self.order, self.rank, self.borders)
        for stage in self.stages:
            split.parts[self._chain.keys[stage]].to(self.device)

    __repr__ = brief

    def step(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> PipelineStep:
        """Forward and backward of one batch; gradients are added to those that are there, as by ``backward()``.

        The gradients are those of the mean of the microbatches' losses.

        Args:
            args: the inputs of the model: of all microbatches, one behind the other in dimension 0; what has the shape
                of one microbatch goes to each of them.
            target: as ``args``, for the loss.
            outputs: whether to return what the model returned.
            kwargs: as ``args``.

        Raises:
            PipelineError: SK802 for inputs that do not fit, before anything runs; SK803 for a value at a border that
                is not what was captured; SK805 where this rank or another one failed; SK806 for
                what this version of torch cannot run.
        """
        with self._ties.added_up():
            losses = self._run(True, args, kwargs, target, outputs)
        if losses.losses:
            found = torch.stack([losses.losses[i] for i in range(self.microbatches)])
            made = tuple(losses.outputs[i] for i in range(self.microbatches)) if outputs else None
            return PipelineStep(found.mean(), found.flatten(), made)
        return PipelineStep(None, None)

    def infer(self, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """Forward only, without gradients.

        Returns:
            What the model returns for each microbatch, on the rank of the last stage; ``None`` elsewhere.
        """
        with torch.no_grad():
            batch = self._run(False, args, kwargs, None, True)
        return tuple(batch.outputs[i] for i in range(self.microbatches)) if batch.outputs else None

    def cut(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """The inputs of each microbatch, by the names of the graph's inputs.

        Raises:
            PipelineError: SK802 as `step`.
        """
        return self._inputs.split(args, kwargs)

    def cut_target(self, target: Any) -> list[Any]:
        """The target of each microbatch."""
        return self._inputs.targets(target)

    def seed_of(self, step: int, microbatch: int) -> int:
        """The seed with which a microbatch of a step begins: the same for any number of stages."""
        return (self._seed * 1_000_003 + step * self.microbatches + microbatch) % 2**63

    def loss_of(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of one microbatch."""
        return (self._loss or _own_loss)(output, target)

    @property
    def borders(self) -> tuple[tuple[str, ...], ...]:
        """What goes over each border in training, by the names of the nodes: from each stage to the next one."""
        wanted = _ends(self._chain, self._loss, True).wanted
        edges = (self._chain.border(stage, wanted) for stage in range(self._chain.stages - 1))
        return tuple(tuple(self._chain.original(node).name for node in edge) for edge in edges)

    @property
    def torch_stages(self) -> tuple[PipelineStage, ...]:
        """Torch's stages of this rank for training, as of the first step."""
        return self._runs[True].stages if True in self._runs else ()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The parts of this rank."""
        return tuple(self.split.parts[self._chain.keys[stage]] for stage in self.stages)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank, each once, under the names that they have in the graph that was split."""
        return {name: p for name, p in self.named_tensors().items() if isinstance(p, nn.Parameter)}

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank, each once: for an optimizer."""
        return list({id(p): p for p in self.named_parameters().values()}.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of this rank under the names that they have in the graph that was split."""
        return {name: t.detach() for name, t in self.named_tensors().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what this rank holds from the state of the unsplit model, or of any pipeline of it.

        Raises:
            PipelineError: SK802 for a name that lacks, or a shape that differs; nothing is loaded then.
        """
        own = self.named_tensors()
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                what = f"has the shape {list(state[name].shape)}" if name in state else "is not in the state"
                raise PipelineError(
                    "SK802", f"{name}{list(tensor.shape)} {what}", "Load a state of the model that was captured."
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this rank, under the names that they have in the graph that was split."""
        split, found = self.split, dict[str, torch.Tensor]()
        for stage in self.stages:
            child = split.names[self._chain.keys[stage]]
            held = parameters_and_buffers(split.module.get_submodule(child))
            own = {f"{child}.{name}": t for name, t in held.items()} | self._chain.own(stage)
            found |= {split.qualified_names.get(name, name): t for name, t in own.items()}
        return found

    def _run(self, train: bool, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, keep: bool) -> Batch:
        runs = self._runs.get(train)
        if runs is None:
            runs = self._runs[train] = _Runs(self, train)
        batch = runs.batch
        batch.inputs = self.cut(*args, **kwargs)
        batch.targets = self.cut_target(target)
        batch.seeds = [self.seed_of(self.steps, i) for i in range(self.microbatches)]
        batch.keep = keep
        batch.outputs, batch.losses = {}, {}
        self.steps += train
        with named(self._progress):
            runs.step()
        return batch


class _Runs:
    """The stages of a rank and their schedule, for training or for inference."""

    def __init__(self, pipe: Pipeline, train: bool) -> None:
        chain: Chain = pipe._chain
        self.batch, self._count = Batch(pipe._progress), pipe.microbatches
        ends = _ends(chain, pipe._loss, train)
        modules = [ChainStage(chain, s, ends, self.batch, pipe.device) for s in pipe.stages]
        require_support(pipe.order, tuple(modules))
        stages = [torch_stage(m, s, chain.stages, pipe.group) for m, s in zip(modules, pipe.stages, strict=True)]
        self.stages = tuple(stages)
        self._schedule = schedule_of(pipe.order, stages, _handed if train else None)
        self._last = any(m.last for m in modules)

    def step(self) -> None:
        """One step on what lies in the batch."""
        number = torch.arange(self._count)
        self._schedule.step(
            microbatch=number, target=number if self._last else None, return_outputs=False,
        )  # fmt: skip


def _handed(loss: torch.Tensor, target: object) -> torch.Tensor:
    """The loss as the last stage gave it."""
    return loss


def _ends(chain: Chain, loss: Loss | None, train: bool) -> Ends:
    """What the last stage has: every output, and in training the loss."""
    every = tuple(chain.split.module.graph.output_node().all_input_nodes)
    return Ends(every, (loss or _own_loss) if train else None)


def _own_loss(result: Any, target: object) -> torch.Tensor:
    """The loss that the model returns: the one number among the outputs that requires grad."""
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    found = [t for t in leaves if t.requires_grad and t.numel() == 1]
    if len(found) != 1:
        raise PipelineError(
            "SK802",
            f"the model returns {len(found)} numbers that require grad",
            "Give a loss: pipeline(split, loss=lambda output, target: ...).",
        )
    return found[0]


def _device_of(device: torch.device | str | None, group: dist.ProcessGroup | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
