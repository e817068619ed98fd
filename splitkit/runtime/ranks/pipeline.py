"""Runs a split on the ranks of a process group, under a pipeline schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from splitkit.checks import is_whole, shown
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.graph.storages import parameters_and_buffers
from splitkit.pipeline.order import PipelineOrder
from splitkit.runtime.folder.load import StageFolder
from splitkit.runtime.ranks.faults import Progress, global_ranks, naming_failures
from splitkit.runtime.ranks.fsdp import shard, shard_like, sum_shards
from splitkit.runtime.ranks.last_stage import Loss, last_stage_of, own_loss
from splitkit.runtime.ranks.microbatches import BatchSplitter
from splitkit.runtime.ranks.order_runner import placed_order
from splitkit.runtime.ranks.rank_agreement import require_same
from splitkit.runtime.ranks.rank_stages import RankStages
from splitkit.runtime.ranks.replicas import replicas, require_replicable, row_of_rank
from splitkit.runtime.ranks.shared_parameters import SharedParameters
from splitkit.runtime.ranks.stage import Batch
from splitkit.runtime.ranks.stage_chain import chain_of
from splitkit.short_repr import brief


@dataclass(frozen=True)
class PipelineStep:
    """The result of a training step.

    Attributes:
        loss: the mean of the microbatches' losses, on the rank of the last stage; ``None`` elsewhere.
        losses: the loss of each microbatch, ``[microbatches]``, on the same rank.
        outputs: the model's output for each microbatch of this replica, if asked for, on the same rank.
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
    """Run a split on the ranks of a process group, one part a stage, under a pipeline schedule.

    Every rank calls it with the same split and arguments, and then calls `Pipeline.step` with the same batch. Each
    stage takes the inputs that it reads from the batch itself. The shapes of the values between stages come from the
    graph, so torch need not run stages on made-up inputs to find them. Parameters that several stages read get the sum
    of their gradients.

    A part with replicas (`Part.replicas`) runs on as many ranks, each with its share of the microbatches. After a step
    all of them have the sum of the gradients, and the results are those of a single pipeline. If all parts have the
    same number of replicas, that many pipelines run side by side; otherwise, under schedules with windows (1F1B, GPipe,
    eager 1F1B), the replicas of a stage take microbatches in turn.

    Args:
        split: parts in the order of the stages, captured with the inputs of one microbatch; or stages on disk
            (`splitkit.runtime.open_stages`), of which each rank loads its own.
        schedule: the name of a schedule (`splitkit.pipeline.schedules` lists all), which torch's own class runs if
            torch has one, and torch's interpreter of actions otherwise; or an order of your own, with any number of
            stages on each rank (`splitkit.pipeline.order_file` reads torch's CSV).
        microbatches: per step, of all replicas together; by default as many as the order has, or 8.
        loss: computes the loss from ``(output, target)`` of one microbatch; ``None`` for models that return their loss.
        group: the ranks; by default the whole default process group.
        device: the device of this rank; by default the current CUDA device if the group's backend is NCCL, otherwise
            the CPU.
        seed: the seed of random numbers, see `Pipeline.seed_of`.

    Raises:
        PipelineError: SK801 for a split that cannot run on several ranks, SK804 if the ranks do not run the same.
        ScheduleError: SK330 if the schedule does not allow these numbers of stages, ranks and microbatches. An order
            that would deadlock is refused when it is made (SK331).
    """
    return Pipeline(split, schedule, microbatches, loss, group, device, seed)


class Pipeline:
    """See `pipeline`.

    Attributes:
        split: the split, or the stages on disk, that this pipeline runs.
        order: the actions of each rank of one pipeline, as if each stage had one replica.
        replicas: which ranks run the same stages.
        rank: the rank of this process in the group.
        stages: the numbers of this rank's stages.
        device: the device of this rank.
        microbatches: per step, of all replicas together.
        group: the ranks; ``None`` for all.
        steps: the number of training steps that have begun; seeds depend on it.
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
        self.microbatches = self.order.microbatches * self.replicas.pipelines
        self.stages = tuple(s for s, rank in enumerate(self.order.rank_of) if rank == self.replicas.place)
        if not is_whole(seed):
            raise PipelineError("SK802", f"the seed is {shown(seed)}", "Give a whole number.")
        self._seed, self._loss, self.steps = int(seed), loss, 0
        if isinstance(split, StageFolder):
            split.load(self.stages, self.device)
        self._inputs = BatchSplitter(self._chain, self.microbatches, self.device)
        self._shared_parameters = SharedParameters(
            self._chain, self.order.rank_of, self.replicas, group, self.parameters()
        )
        self._rank_stages: dict[bool, RankStages] = {}
        self._progress = Progress(
            row_of_rank(self.order, self.replicas), self.order.rank_of, self.replicas, self.borders, global_ranks(group)
        )
        for stage in self.stages:
            split.parts[self._chain.keys[stage]].to(self.device)

    def __repr__(self) -> str:
        return f"<Pipeline {self.order.name}, rank {self.rank}: stages {self.stages} of {self._chain.stages}>"

    def step(self, *args: Any, target: Any = None, outputs: bool = False, **kwargs: Any) -> PipelineStep:
        """Run forward and backward of one batch. Gradients accumulate, as with ``backward()``.

        The gradients are those of the mean of the microbatches' losses.

        Args:
            args: the inputs of the model, with all microbatches concatenated in dimension 0; an input with the shape of
                one microbatch goes to each of them.
            target: the target for the loss, as ``args``; if the model has an input of that name, that input.
            outputs: whether to return the model's outputs. If no rank asks for them in the first step, values that the
                loss does not need are never sent, and later steps cannot return them.
            kwargs: keyword inputs, as ``args``.

        Raises:
            PipelineError: SK802 for inputs that do not fit, before anything runs; SK803 for a value at a border with
                another dtype or shape than captured; SK805 if this rank or another one failed; SK806 for what this
                version of torch cannot run.
        """
        if self.takes_target:
            kwargs, target = {**kwargs, "target": target}, None
        batch = self._run(True, args, kwargs, target, outputs)
        if batch.found is not None:
            made = tuple(batch.outputs[i] for i in self._share) if outputs else None
            return PipelineStep(batch.found.mean(), batch.found, made)
        return PipelineStep(None, None)

    def infer(self, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """Run forward only, without gradients.

        Returns:
            The model's output for each microbatch of this replica on the rank of the last stage; ``None`` elsewhere.
        """
        with torch.no_grad():
            batch = self._run(False, args, kwargs, None, True)
        return tuple(batch.outputs[i] for i in self._share) if batch.outputs else None

    def cut(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Split the inputs of a step: return those of each microbatch, by the names of the graph's inputs.

        Raises:
            PipelineError: SK802 as in `step`.
        """
        return self._inputs.split(args, kwargs)

    def shard(self) -> None:
        """Shard the parameters of each stage over its replicas, with torch's FSDP2. Call it before making an optimizer.

        Each rank then holds its share of the parameters, the gradients and the optimizer's state. Parameters that
        stages on other ranks share stay whole. For other settings, call ``fully_shard`` on each of `modules`.

        Raises:
            PipelineError: SK801 if there is only one pipeline, or stages have different numbers of replicas.
        """
        shard(self.modules, self.replicas, self._shared_parameters.tied)

    @property
    def takes_target(self) -> bool:
        """Whether ``target`` is an input of the model rather than an argument of the loss."""
        return self._inputs.has("target")

    def cut_target(self, target: Any) -> list[Any]:
        """Split a target: return the target of each microbatch."""
        return self._inputs.targets(target)

    def seed_of(self, step: int, microbatch: int) -> int:
        """Return the seed of a microbatch of a step. It does not depend on the number of stages."""
        return (self._seed * 1_000_003 + step * self.microbatches + microbatch) % 2**63

    def microbatch_of(self, chunk: int) -> int:
        """Return the number in the step of this replica's ``chunk``-th microbatch."""
        return self._share[chunk]

    def loss_of(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of one microbatch."""
        return (self._loss or own_loss)(output, target)

    @property
    def borders(self) -> tuple[tuple[str, ...], ...]:
        """Border -> the names of the nodes whose values cross it in training, from each stage to the next."""
        stages = self._rank_stages.get(True)
        wanted = last_stage_of(self._chain, self._loss, True, stages is not None and stages.outputs).wanted
        edges = (self._chain.border(stage, wanted) for stage in range(self._chain.stages - 1))
        return tuple(tuple(self._chain.value(node).name for node in edge) for edge in edges)

    @property
    def torch_stages(self) -> tuple[PipelineStage, ...]:
        """Torch's stages of this rank for training; empty before the first step."""
        return self._rank_stages[True].stages if True in self._rank_stages else ()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The parts of this rank."""
        return tuple(self.split.parts[self._chain.keys[stage]] for stage in self.stages)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the graph that was split."""
        return {name: p for name, p in self.named_tensors().items() if isinstance(p, nn.Parameter)}

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters, each once, for an optimizer."""
        return list({id(p): p for p in self.named_parameters().values()}.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's share of the model's state dict, under the names of the unsplit model."""
        return {name: t.detach() for name, t in self._saved().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's parameters and buffers from the state dict of the unsplit model, or of any pipeline of it.

        Raises:
            PipelineError: SK802 for a missing name or a different shape; nothing is loaded then.
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
                tensor.copy_(shard_like(tensor, state[name]))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters and buffers by their names in the graph that was split."""
        split, found = self.split, dict[str, torch.Tensor]()
        for stage in self.stages:
            child = split.names[self._chain.keys[stage]]
            held = parameters_and_buffers(split.module.get_submodule(child))
            own = {f"{child}.{name}": t for name, t in held.items()} | self._chain.own(stage)
            found |= {split.qualified_names.get(name, name): t for name, t in own.items()}
        return found

    def _saved(self) -> dict[str, torch.Tensor]:
        """Return `named_tensors` without non-persistent buffers and constants of the graph."""
        module, names = self.split.module, self.split.qualified_names
        saved = {names.get(name, name) for name in module.state_dict()}
        return {name: t for name, t in self.named_tensors().items() if name in saved}

    def _run(self, train: bool, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, keep: bool) -> Batch:
        stages = self._rank_stages.get(train)
        if stages is None:
            last_stage = last_stage_of(self._chain, self._loss, train, self._asked(keep))
            where = self.order, self.stages, self.device, self.replicas
            stages = self._rank_stages[train] = RankStages(
                self._chain, last_stage, Batch(self._progress, self._share), *where
            )
        if keep and not stages.outputs:
            raise PipelineError(
                "SK802",
                "outputs are asked for after steps that did not ask for them",
                "Ask in the first step: step(..., outputs=True).",
            )
        batch = stages.batch
        batch.inputs = self.cut(*args, **kwargs)
        batch.targets = self.cut_target(target)
        batch.seeds = [self.seed_of(self.steps, i) for i in range(self.microbatches)]
        batch.keep = keep
        batch.outputs, batch.losses, batch.found = {}, {}, None
        self.steps += train
        if train:
            sum_shards(self.modules, self.replicas, self._shared_parameters.tied)
        with naming_failures(self._progress), self._shared_parameters.added_up() if train else nullcontext():
            stages.step()
            if batch.losses:
                losses = torch.cat([batch.losses[i].flatten() for i in self._share])
                batch.found = self.replicas.gathered(losses, self.microbatches)
        return batch

    def _asked(self, outputs: bool) -> bool:
        """Whether any rank asks for outputs: all ranks must then send them."""
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
