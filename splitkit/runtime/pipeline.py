"""A split on the ranks of a process group, under one of torch's schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from splitkit.brief import brief
from splitkit.checks import is_whole, shown
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.graph.storages import parameters_and_buffers
from splitkit.pipeline.order import PipelineOrder
from splitkit.runtime.actions import placed_order
from splitkit.runtime.agreement import require_same
from splitkit.runtime.batches import Inputs
from splitkit.runtime.chain import chain_of
from splitkit.runtime.ends import Loss, ends_of, own_loss
from splitkit.runtime.faults import Progress, named
from splitkit.runtime.replicas import replicas, require_replicable
from splitkit.runtime.runs import Runs
from splitkit.runtime.sharded import like, shard, sum_shards
from splitkit.runtime.stage import Batch
from splitkit.runtime.stagefolder import StageFolder
from splitkit.runtime.ties import Ties
from splitkit.runtime.uneven import row_of


@dataclass(frozen=True)
class PipelineStep:
    """What a step of training gives.

    Attributes:
        loss: the mean of the microbatches' losses, on the rank of the last stage; ``None`` elsewhere.
        losses: that of each microbatch, ``[microbatches]``; as ``loss``.
        outputs: what the model returned for each microbatch of this replica, if asked for; as ``loss``.
    """

    loss: torch.Tensor | None
    losses: torch.Tensor | None
    outputs: tuple[Any, ...] | None = None

    __repr__ = brief


def pipeline(
    split: Split | StageFolder,
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

    Parts with replicas (`Part.replicas`) run on as many ranks, each with its share of the microbatches; all have the
    sum of the gradients after a step, and the numbers are those of one pipeline. With as many of each part, they are
    pipelines side by side; else, under 1F1B and GPipe, the replicas of a stage take microbatches in turn.

    Args:
        split: parts in the order of the stages, captured with the inputs of one microbatch; or stages on disk
            (`splitkit.runtime.open_stages`), of which each rank loads its own.
        schedule: torch's name: gpipe, 1f1b, interleaved1f1b, loopedbfs, interleavedzerobubble, zbvzerobubble or
            dualpipev; or an order of your own, with any number of stages on each rank (`splitkit.pipeline.orderfile`
            reads torch's CSV).
        microbatches: how many in a step, of all replicas together; as many as the order has, else 8.
        loss: gives the loss of ``(output, target)`` of one microbatch; ``None`` for models that return their loss.
        group: the ranks; all of the process group by default.
        device: of this rank; the current CUDA device where the group's backend is NCCL, else the CPU.
        seed: of the random numbers, see `Pipeline.seed_of`.

    Raises:
        PipelineError: SK801 for a split that cannot run on several ranks, SK804 where these do not run the same.
        ScheduleError: SK330 where the schedule does not go with the numbers of stages, ranks and microbatches. An order
            that would wait for ever is refused where it is made (SK331).
    """
    return Pipeline(split, schedule, microbatches, loss, group, device, seed)


class Pipeline:
    """See `pipeline`.

    Attributes:
        split: what is run.
        order: what each rank of one pipeline does, where each stage has one replica.
        replicas: which ranks run the same stages.
        rank: of this process in the group.
        stages: those of this rank.
        device: of this rank.
        microbatches: how many in a step, of all replicas together.
        group: the ranks; ``None`` for all.
        steps: how many steps of training were begun; seeds go by it.
    """

    def __init__(
        self,
        split: Split | StageFolder,
        schedule: str | PipelineOrder,
        microbatches: int | None,
        loss: Loss | None,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        seed: int,
    ) -> None:
        if not dist.is_initialized():
            raise PipelineError(
                "SK804", "there is no process group", "Start with torchrun and torch.distributed.init_process_group."
            )
        self.split = split
        self._chain = chain_of(split) if isinstance(split, Split) else split.chain
        self.group, self.rank = group, dist.get_rank(group)
        self.device = _device_of(device, group)
        if microbatches is None and isinstance(schedule, str):
            microbatches = 8
        what = schedule if isinstance(schedule, str) else getattr(schedule, "ranks", schedule)
        require_same(self._chain, {"schedule": what, "number of microbatches": microbatches, "seed": seed}, group)
        counts, ranks = self._chain.replicas, dist.get_world_size(group)
        require_replicable(self._chain.facts.writes, counts, ranks, microbatches)
        self.order, at = placed_order(schedule, counts, microbatches, ranks)
        self.replicas = replicas(at, group, self.device)
        self.microbatches = self.order.microbatches * self.replicas.lines
        self.stages = tuple(s for s, rank in enumerate(self.order.rank_of) if rank == self.replicas.place)
        if not is_whole(seed):
            raise PipelineError("SK802", f"the seed is {shown(seed)}", "Give a whole number.")
        self._seed, self._loss, self.steps = int(seed), loss, 0
        if isinstance(split, StageFolder):
            split.load(self.stages, self.device)
        self._inputs = Inputs(self._chain, self.microbatches, self.device)
        self._ties = Ties(self._chain, self.order.rank_of, self.replicas, group, self.parameters())
        self._runs: dict[bool, Runs] = {}
        self._progress = Progress(row_of(self.order, self.replicas), self.order.rank_of, self.replicas, self.borders)
        for stage in self.stages:
            split.parts[self._chain.keys[stage]].to(self.device)

    def __repr__(self) -> str:
        return f"<Pipeline {self.order.name}, rank {self.rank}: stages {self.stages} of {self._chain.stages}>"

    def step(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> PipelineStep:
        """Forward and backward of one batch; gradients are added to those that are there, as by ``backward()``.

        The gradients are those of the mean of the microbatches' losses.

        Args:
            args: the inputs of the model: of all microbatches, one behind the other in dimension 0; what has the shape
                of one microbatch goes to each of them.
            target: as ``args``, for the loss; of a model with an input of that name, its input.
            outputs: whether to return what the model returned. If no rank asks in the first step, what the loss does
                not need is not sent, and no later step has it.
            kwargs: as ``args``.

        Raises:
            PipelineError: SK802 for inputs that do not fit, before anything runs; SK803 for a value at a border that
                is not what was captured; SK805 where this rank or another one failed; SK806 for
                what this version of torch cannot run.
        """
        if self.takes_target:
            kwargs, target = {**kwargs, "target": target}, None
        batch = self._run(True, args, kwargs, target, outputs)
        if batch.found is not None:
            made = tuple(batch.outputs[i] for i in self._share) if outputs else None
            return PipelineStep(batch.found.mean(), batch.found, made)
        return PipelineStep(None, None)

    def infer(self, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """Forward only, without gradients.

        Returns:
            What the model returns for each microbatch of this replica, on the rank of the last stage; ``None``
            elsewhere.
        """
        with torch.no_grad():
            batch = self._run(False, args, kwargs, None, True)
        return tuple(batch.outputs[i] for i in self._share) if batch.outputs else None

    def cut(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """The inputs of each microbatch, by the names of the graph's inputs.

        Raises:
            PipelineError: SK802 as `step`.
        """
        return self._inputs.split(args, kwargs)

    def shard(self) -> None:
        """Shard the parameters of each stage over its replicas, by torch's FSDP2; call it before an optimizer is made.

        Each rank then holds its share of the parameters, of gradients and of the optimizer's state. What stages on
        other ranks share stays whole. For other settings, call ``fully_shard`` on each of `modules`.

        Raises:
            PipelineError: SK801 where there is one pipeline.
        """
        shard(self.modules, self.replicas, self._ties.tied)

    @property
    def takes_target(self) -> bool:
        """Whether ``target`` is an input of the model, and not for the loss."""
        return self._inputs.has("target")

    def cut_target(self, target: Any) -> list[Any]:
        """The target of each microbatch."""
        return self._inputs.targets(target)

    def seed_of(self, step: int, microbatch: int) -> int:
        """The seed with which a microbatch of a step begins: the same for any number of stages."""
        return (self._seed * 1_000_003 + step * self.microbatches + microbatch) % 2**63

    def loss_of(self, output: Any, target: Any) -> torch.Tensor:
        """The loss of one microbatch."""
        return (self._loss or own_loss)(output, target)

    @property
    def borders(self) -> tuple[tuple[str, ...], ...]:
        """What goes over each border in training, by the names of the nodes: from each stage to the next one."""
        runs = self._runs.get(True)
        wanted = ends_of(self._chain, self._loss, True, runs is not None and runs.outputs).wanted
        edges = (self._chain.border(stage, wanted) for stage in range(self._chain.stages - 1))
        return tuple(tuple(self._chain.value(node).name for node in edge) for edge in edges)

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
        """The parameters and buffers of this rank that a checkpoint of the model has, under its names."""
        return {name: t.detach() for name, t in self._saved().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what this rank holds from the state of the unsplit model, or of any pipeline of it.

        Raises:
            PipelineError: SK802 for a name that lacks, or a shape that differs; nothing is loaded then.
        """
        own = self._saved()
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                what = f"has the shape {list(state[name].shape)}" if name in state else "is not in the state"
                raise PipelineError(
                    "SK802", f"{name}{list(tensor.shape)} {what}", "Load a state of the model that was captured."
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(like(tensor, state[name]))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this rank, under the names that they have in the graph that was split."""
        split, found = self.split, dict[str, torch.Tensor]()
        for stage in self.stages:
            child = split.names[self._chain.keys[stage]]
            held = parameters_and_buffers(split.module.get_submodule(child))
            own = {f"{child}.{name}": t for name, t in held.items()} | self._chain.own(stage)
            found |= {split.qualified_names.get(name, name): t for name, t in own.items()}
        return found

    def _saved(self) -> dict[str, torch.Tensor]:
        """Without buffers that are not persistent, and constants of the graph."""
        module, names = self.split.module, self.split.qualified_names
        saved = {names.get(name, name) for name in module.state_dict()}
        return {name: t for name, t in self.named_tensors().items() if name in saved}

    def _run(self, train: bool, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, keep: bool) -> Batch:
        runs = self._runs.get(train)
        if runs is None:
            ends = ends_of(self._chain, self._loss, train, self._asked(keep))
            where = self.order, self.stages, self.device, self.replicas
            runs = self._runs[train] = Runs(self._chain, ends, Batch(self._progress, self._share), *where)
        if keep and not runs.outputs:
            raise PipelineError(
                "SK802", "outputs are asked for after steps without", "Ask in the first step: step(..., outputs=True)."
            )
        batch = runs.batch
        batch.inputs = self.cut(*args, **kwargs)
        batch.targets = self.cut_target(target)
        batch.seeds = [self.seed_of(self.steps, i) for i in range(self.microbatches)]
        batch.keep = keep
        batch.outputs, batch.losses, batch.found = {}, {}, None
        self.steps += train
        if train:
            sum_shards(self.modules, self.replicas, self._ties.tied)
        with named(self._progress), self._ties.added_up() if train else nullcontext():
            runs.step()
            if batch.losses:
                losses = torch.cat([batch.losses[i].flatten() for i in self._share])
                batch.found = self.replicas.gathered(losses, self.microbatches)
        return batch

    def _asked(self, outputs: bool) -> bool:
        """Whether a rank asks for outputs; all must send alike."""
        asked = torch.tensor(int(outputs), device=self.device)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.group)
        return bool(asked)

    @property
    def _share(self) -> range:
        """The microbatches of this replica."""
        return self.replicas.share(self.microbatches)


def _device_of(device: torch.device | str | None, group: dist.ProcessGroup | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
