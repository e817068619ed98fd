"""Runs a split on the ranks of a process group, under a pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from splitkit._torch import pytree
from splitkit.checks import is_number, is_whole, shown
from splitkit.engine.split import Split
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import PipelineError
from splitkit.graph.shards import copies_of, groups_met, is_sharded, local_tensor, mesh_groups
from splitkit.graph.storages import names_of, parameters_and_buffers
from splitkit.pipeline.order import PipelineOrder
from splitkit.runtime.folder.load import StageFolder
from splitkit.runtime.ranks.evaluation import (
    FixedAtCapture,
    require_gradients,
    share_tensors,
    split_like,
)
from splitkit.runtime.ranks.faults import Progress, naming_failures, naming_lost_ranks, time_limit
from splitkit.runtime.ranks.microbatches import BatchDims, BatchSplitter, DividedBatch
from splitkit.runtime.ranks.order_runner import microbatches_or_usual, placed_order
from splitkit.runtime.ranks.planned_chain import PlannedParts, captured_model, chain_of_any, with_every_name
from splitkit.runtime.ranks.planned_stage import HostQueue, PlannedStage, graphs_of
from splitkit.runtime.ranks.rank_agreement import (
    from_every,
    require_process_group,
    require_same,
    require_same_collectives,
)
from splitkit.runtime.ranks.rank_device import device_of_rank, place_stages, require_meshes_of
from splitkit.runtime.ranks.replicas import (
    RngChannel,
    SharedParameters,
    replicas,
    require_replicable,
    row_of_rank,
)
from splitkit.runtime.ranks.stage import Batch, RankStages
from splitkit.runtime.ranks.stage_chain import (
    Loss,
    StageSource,
    chain_of,
    last_stage_of,
    loss_without_grad,
    own_loss,
)
from splitkit.runtime.ranks.stage_weights import (
    LOADED,
    ComparedOptimizer,
    OtherTensors,
    copies,
    require_same_beside,
    require_same_model,
    require_same_optimizers,
    require_same_tensors,
    reshard,
    shard_like,
    sum_shards,
    tensors_of_stages,
)
from splitkit.runtime.ranks.step_agreement import Kind, PipelineCall, StepAgreement
from splitkit.runtime.ranks.step_losses import PipelineStep, Reduction, checked_reduction, reduced


def pipeline(
    split: Split | StagedStep | StageFolder,
    schedule: str | PipelineOrder = "1f1b",
    microbatches: int | None = None,
    *,
    loss: Loss | None = None,
    reduction: Reduction = "mean",
    batch_dims: BatchDims | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Pipeline:
    """Run a split on the ranks of a process group, with each part as a stage, under a pipeline schedule.

    Call it on every rank with the same split and arguments, and then call `Pipeline.step` with the same batch. Each
    stage takes the inputs that it reads from the batch. The shapes of the values between stages come from the graph, so
    torch does not run stages on dummy inputs to find them. Parameters that several stages read get the sum of their
    gradients.

    A part with replicas (`Part.replicas`) runs on as many ranks, each with its share of the microbatches. After a step
    all of them have the sum of the gradients, and the results are those of a single pipeline. All parts have the same
    number of replicas, so that as many pipelines run side by side.

    The stages of a training step (``joint.split(plan)``) do exactly what their plan says: they save, recompute and
    defer as planned. Under zero-bubble schedules, stages with a weight graph run it when the schedule says; other
    stages run all of backward in the input part::

        joint = splitkit.capture_joint(model, **inputs_of_one_microbatch)
        step = joint.split(splitkit.policies.Pipeline(4, schedule="zbv", microbatches=8))
        pipe = splitkit.runtime.pipeline(step, "zbv", 8)
        pipe.step(**batch)
        optimizer.step()

    Args:
        split: parts in the order of the stages, captured with the inputs of one microbatch; or the stages of a training
            step; or stages on disk (`splitkit.runtime.open_stages`), of which each rank loads its own.
        schedule: the name of a schedule (`splitkit.pipeline.schedules` lists all), which torch's own class runs if
            torch has one, and torch's interpreter of actions otherwise; or an order of your own, with any number of
            stages on each rank (`splitkit.pipeline.synthesize` reads torch's CSV).
        microbatches: per step, of all replicas together; by default as many as the order has, or 8.
        loss: computes the loss from ``(output, target)`` of one microbatch; ``None`` for models that return their loss.
        reduction: what the loss of a step is of the losses of its microbatches. ``"mean"``: their mean, weighted by
            rows, for losses that are means over rows. ``"sum"``: their sum, for losses that are sums, or that are
            divided by a number of the whole batch, such as ``num_items_in_batch``. For other means, a function that
            returns over how many terms the loss of a microbatch is a mean; it is called with the inputs of the
            microbatch by name, and its ``target``. For the mean over the labels that a causal language model keeps::

                lambda inputs: (inputs["labels"][:, 1:] != -100).sum()

        batch_dims: input -> the dimension that holds its batch, for inputs in which it is not 0, and for graphs with
            symbolic sizes of which several may count rows; ``None`` for an input that every microbatch gets as it is.
            ``target`` may be among them: ``{"x": 1, "target": 1}`` for a sequence-first model.
        group: the ranks; by default the whole default process group.
        device: the device of this rank; by default the current accelerator if the group has a backend for it that is
            not the CPU's (``nccl``, ``cpu:gloo,cuda:nccl``), otherwise the CPU. Devices that capture hard-coded follow.
        seed: the seed of random numbers, see `Pipeline.seed_of`.

    Raises:
        PipelineError: SK801 for a split that cannot run on several ranks, SK804 if the ranks differ, or hold different
            weights: set the same seed before you create the model.
        ScheduleError: SK330 if the schedule does not allow these numbers of stages, ranks and microbatches. An order
            that would deadlock is refused when it is created (SK331).
    """
    return Pipeline(split, schedule, microbatches, loss, reduction, batch_dims, group, device, seed)


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
        meshes: dimensions of meshes over which parameters were sharded before -> the group of this rank along each.
        steps: the number of training steps that have begun; seeds depend on it.
    """

    def __init__(
        self,
        split: Split | StagedStep | StageFolder,
        schedule: str | PipelineOrder,
        microbatches: int | None,
        loss: Loss | None,
        reduction: Reduction,
        batch_dims: BatchDims | None,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        seed: int,
        trained: Pipeline | None = None,
    ) -> None:
        require_process_group()
        self._chain = chain_of_any(split)
        if loss is not None and isinstance(split, StagedStep):
            remedy = "Capture it with this one: capture_joint(model, ..., loss=...)."
            raise PipelineError("SK802", "a training step has its own loss", remedy)
        self.split: StageSource = self._chain.split
        self.group, self.rank = group, dist.get_rank(group)
        self.device = device_of_rank(device, group)
        microbatches = microbatches_or_usual(schedule, microbatches)
        what = schedule if isinstance(schedule, str) else getattr(schedule, "ranks", schedule)
        dims = sorted((batch_dims or {}).items())
        how = "a function" if callable(reduction) else reduction
        same = {"number of microbatches": microbatches, "seed": seed, "reduction": how, "dimensions of the batch": dims}
        require_same(self._chain, {"schedule": what, **same}, group)
        counts, ranks = self._chain.replicas, dist.get_world_size(group)
        require_replicable(self._chain.facts.writes, counts, ranks, microbatches)
        self.order = placed_order(schedule, counts[0], len(counts), microbatches, ranks)
        self.replicas = replicas(counts[0], group, self.device)
        self.microbatches = self.order.microbatches * self.replicas.pipelines
        self.stages = tuple(s for s, rank in enumerate(self.order.rank_of) if rank == self.replicas.place)
        if not is_whole(seed):
            raise PipelineError("SK802", f"the seed is {shown(seed)}", "Give a whole number.")
        self._seed, self._loss, self._reduction, self.steps = (
            int(seed),
            loss,
            checked_reduction(reduction, self.inputs),
            0,
        )
        progress = Progress(
            row_of_rank(self.order, self.replicas),
            self.order.rank_of,
            self.replicas,
            (),
            rank=self.rank,
            ranks=dist.get_process_group_ranks(group),
            device=self.device,
            limit=time_limit(group),
        )
        self._agreement = StepAgreement(group, self.device, progress)
        if isinstance(split, StageFolder):
            self._agreement.together(lambda: split.load(self.stages, self.device))
        held = tensors_of_stages(self._chain, range(self._chain.stages)).values()
        require_meshes_of(self.device, held)
        place_stages(self._chain, self.stages, self.device)
        # a pipeline that evaluates gets the weights of the one that trains, of which each rank has its own
        shared = {} if trained is None else with_every_name(trained.every_saved(), trained._captured_model())
        require_same_model(self._chain, self.stages, group, without=shared)
        # ranks that run the same stages on pieces of their tensors
        met = groups_met(gm.graph for part in self._chain.split.parts.values() for gm in graphs_of(part))
        self.meshes, self._is_forward_alone = mesh_groups(held) | met, isinstance(split, Split) and bool(met)
        self._agreement.together(lambda: self._require_same_beside({"schedule": what, **same}))
        self._weights_changed, self._compared_at, self._trains = True, 0, trained
        self._optimizer: ComparedOptimizer | None = None
        self._others = OtherTensors(self._chain, self.stages)
        self._empty = nn.Parameter(torch.empty(0, device=self.device))
        self._inputs = BatchSplitter(self._chain, self.microbatches, self.device, self.needs, batch_dims)
        self._batch_dims = dict(batch_dims or {})
        self._shared_parameters = SharedParameters(
            self._chain, self.order.rank_of, self.replicas, group, self.parameters()
        )
        self._rank_stages: dict[bool, RankStages] = {}
        self._progress = progress
        progress.names = self.borders
        self._channel: RngChannel | None = None
        if self.device.type != "cpu":  # the CPU waits for nothing
            ranks_of = [*map(self.replicas.rank_at, self.order.rank_of)]
            self._channel = RngChannel(self._chain.facts.draws, ranks_of, self.rank, group)
        self._schedule, self._fixed = schedule, FixedAtCapture(self.modules, self.named_parameters())

    def __repr__(self) -> str:
        return f"<Pipeline {self.order.name}, rank {self.rank}: stages {self.stages} of {self._chain.stages}>"

    def _require_same_beside(self, facts: Mapping[str, object]) -> None:
        for group in self.meshes.values():
            require_same_collectives(self._chain, facts, group)
            require_same_beside(self._chain, self.stages, group)

    def step(
        self,
        *args: Any,
        target: Any = None,
        outputs: bool = False,
        loss_everywhere: bool = False,
        microbatches: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> PipelineStep:
        """Run forward and backward of one batch. Gradients accumulate, as with ``backward()``.

        The gradients are of the loss of the step, which `reduction` makes of the microbatches' losses.

        Args:
            args: the inputs of the model, with all microbatches concatenated in dimension 0, or where ``batch_dims``
                says; beside such an input, one with the shape of one microbatch goes to each of them. A graph captured
                with ``dynamic=True`` accepts other sizes than the captured ones, and distributes the rows as evenly as
                possible.
            target: the target for the loss, as ``args``; if the model has an input of that name, that input. Ranks
                without the last stage may leave it out.
            outputs: whether to return the model's outputs. If no rank asks for them in the first step, values that the
                loss does not need are never sent, and later steps cannot return them.
            microbatches: the keyword inputs of each microbatch, in place of ``args`` and ``kwargs``, if you split the
                batch yourself. Their sizes may differ if the graph was captured with ``dynamic=True``. ``target`` is
                then a list as well.
            loss_everywhere: whether every rank gets the losses, as float64, by a broadcast at the end of the step. All
                ranks must give the same.
            kwargs: keyword inputs, as ``args``.

        Raises:
            PipelineError: SK802 for inputs that do not fit, among them a single microbatch in place of a batch, and for
                a batch that may be in several dimensions; SK804 if the ranks do not make the same call with the
                same batch, on all ranks before anything runs; SK803 for a value at a border with another dtype or shape
                than captured; SK805 if this rank or another one failed; SK806 if this version of torch cannot run it.
        """
        kwargs, target = self.with_target({**kwargs, "microbatches": microbatches}, target)
        batch = self._run(True, args, kwargs, target, outputs, loss_everywhere)
        if batch.found is not None:
            made = tuple(batch.outputs[i] for i in self._share) if batch.outputs else None
            return PipelineStep(batch.loss, batch.found, made)
        return PipelineStep(None, None)

    def infer(self, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """Run forward only, without gradients. The arguments are as in `step`.

        Returns:
            The model's output for each microbatch of this replica on the rank of the last stage; ``None`` elsewhere.
        """
        with torch.no_grad():
            batch = self._run(False, args, kwargs, None, True)
        return tuple(batch.outputs[i] for i in self._share) if batch.outputs else None

    def train_only(self, trains: Callable[[str], bool]) -> None:
        """Freeze and unfreeze parameters between steps. All ranks must call it with the same function.

        Args:
            trains: called with each name of a parameter of the unsplit model; false freezes it and drops its gradient.

        Raises:
            PipelineError: SK804 on every rank if the ranks choose differently, SK801 for sharded parameters, SK802 for
                stages of a folder, and for parameters of which the graph has no gradient.
        """
        own, tensors = self.named_parameters(), parameters_and_buffers(self._captured_model())
        whole = {n: t for n, t in tensors.items() if isinstance(t, nn.Parameter)}
        named = names_of(whole)
        chosen = {name: any(map(trains, named[id(parameter)])) for name, parameter in whole.items()}
        every = from_every(chosen, self.group)
        for rank, other in enumerate(every):
            if different := [name for name, flag in every[0].items() if other.get(name) != flag]:
                raise PipelineError(
                    "SK804",
                    f"rank {rank} chooses differently than rank 0 whether {different[0]} trains",
                    "Pass the same function on every rank.",
                    different,
                )
        if sharded := [name for name, parameter in own.items() if isinstance(parameter, DTensor)]:
            raise PipelineError("SK801", f"{sharded[0]} is sharded", "Choose what trains before shard().", sharded)
        signature = self.split.joint.signature if isinstance(self.split, PlannedParts) else None
        parameters = {} if signature is None else signature.parameters
        graded = () if signature is None else set(signature.gradients.values())
        if lost := [name for held, name in parameters.items() if held not in graded and chosen.get(name)]:
            raise PipelineError(
                "SK802",
                f"the training step has no gradient of {lost[0]}, which did not require grad at capture",
                "Call requires_grad_() on it before capture_joint, and freeze it by train_only until it trains.",
                lost,
            )
        for name, parameter in (*whole.items(), *own.items()):
            if name in chosen and (parameter.is_floating_point() or parameter.is_complex()):
                parameter.requires_grad_(chosen[name])
                # A gradient of earlier steps would otherwise be applied again in each step of the optimizer.
                parameter.grad = parameter.grad if chosen[name] else None
        if isinstance(self.split, Split):
            self._chain = chain_of(self.split)
        self._rank_stages.clear()
        self._fixed = FixedAtCapture(self.modules, own)

    def evaluation(self, gm: fx.GraphModule, reduction: Reduction | None = None) -> Pipeline:
        """Make a pipeline of a capture in another mode, which shares the parameters and buffers of this one.

        All ranks must call it. An optimizer step changes both. The schedule, the microbatches and the ranks are the
        same, and each stage gets the nodes that read its weights::

            evaluation = pipe.evaluation(sk.capture(model.eval(), **inputs_of_one_microbatch))
            loss = evaluation.evaluate(**batch)

        Args:
            gm: the capture of the same model, for example in eval mode.
            reduction: as in `splitkit.runtime.pipeline`; by default as in training.

        Raises:
            PipelineError: SK801 if the weights of a node are in several stages, or are sharded; SK802 for stages of a
                folder, which do not know the graph, and without a ``reduction`` if training's is ``"sum"`` and
                this graph lacks an input by which the losses may be divided.
        """
        model = self._captured_model()
        found, own = split_like(gm, self.split), self._reduction if reduction is None else reduction
        known = {str(node.target) for node in found.module.graph.find_nodes(op="placeholder")}
        lost = [name for name in self.inputs if name not in known]
        if lost and own == "sum" and reduction is None:
            reason = f"in training, losses are summed, and this graph does not have the input {lost[0]}"
            remedy = 'Say what its losses are: pipe.evaluation(gm, reduction="mean"), "sum", or weights of your own.'
            raise PipelineError("SK802", reason, remedy, lost)
        dims = {name: dim for name, dim in self._batch_dims.items() if name not in lost}
        made = Pipeline(
            found, self._schedule, self.microbatches, self._loss, own, dims, self.group, self.device, self._seed,
            trained=self,
        )  # fmt: skip
        share_tensors(found, with_every_name(self.saved_tensors(), model), self.meshes)
        return made

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Run forward only, without gradients, and return the loss of a batch on every rank, as float64.

        The graph runs in the mode in which it was captured; see `evaluation`.

        Args:
            args: the inputs of the model, as of `step`.
            target: the target for the loss, as of `step`.
            kwargs: keyword inputs, as of `step`.
        """
        kwargs, target = self.with_target(kwargs, target)
        with torch.no_grad():
            batch = self._run(False, args, kwargs, target, True, evaluates=True)
            with naming_failures(self._progress):
                if batch.outputs:
                    loss = self._loss
                    found = [
                        (loss_without_grad(out) if loss is None else loss(out, batch.targets[i])).reshape(())
                        for i, out in sorted(batch.outputs.items())
                    ]
                    self._set_losses(batch, torch.stack(found))
                return self._from_last(batch)[0]

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``, as `torch.nn.utils.clip_grad_norm_` does.

        All ranks must call it, between `step` and the optimizer's step. A parameter of several ranks counts once.

        Args:
            max_norm: the largest norm that is not scaled; ``inf`` only computes the norm.
            norm_type: the exponent of the norm, positive; ``inf`` for the largest absolute value.

        Returns:
            The norm of all gradients before clipping, float64, the same on every rank.

        Raises:
            PipelineError: SK802 for a ``max_norm`` or ``norm_type`` that is not a positive number.
        """
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            if not is_number(value) or value <= 0:
                raise PipelineError("SK802", f"{name} is {shown(value)}", "Give a positive number.")
        held = [(p, p.grad) for p in self.parameters() if p.grad is not None]
        norms = [
            _norm(grad, norm_type, self.device) * copies_of(p, self.meshes) ** (-1 / norm_type)
            for p, grad in held
            if self._shared_parameters.counts(p)
        ]
        own = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=self.device)
        total = own.to(torch.float64)
        with naming_lost_ranks(self._progress, "for all ranks to clip gradients"):
            for ranks in (*self.meshes.values(), self.group):
                every = [torch.zeros_like(total) for _ in range(dist.get_world_size(ranks))]
                # Norms are gathered, not summed as powers, which could overflow.
                dist.all_gather(every, total, group=ranks)
                total = torch.linalg.vector_norm(torch.stack(every), norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for _, grad in held:
            local_tensor(grad).mul_(factor)
        return total

    def shard(self, mesh: DeviceMesh | None = None) -> None:
        """Shard the parameters of each stage over its replicas with FSDP2; call it before creating the optimizer.

        Each rank then holds its share of the parameters, gradients and optimizer state. Parameters that are shared with
        stages on other ranks are not sharded. For other settings, call ``fully_shard`` on each of `modules`.

        Args:
            mesh: for parameters that are sharded along another dimension of a mesh, as by tensor parallelism: the
                dimension of the same mesh along which the stages have replicas.

        Raises:
            PipelineError: SK801 if there is only one pipeline, or parameters that are sharded already and no ``mesh``.
        """
        if self.replicas.mesh is None:
            what = "there is one pipeline to shard over"
            raise PipelineError("SK801", what, "Give all parts several replicas: splitkit train --dp 2 --fsdp.")
        if mesh is None and any(is_sharded(parameter) for part in self.modules for parameter in part.parameters()):
            raise PipelineError(
                "SK801",
                "the parameters are sharded already, and FSDP2 needs another dimension of the same mesh",
                'Give the dimension along which the stages have replicas: pipe.shard(mesh["dp"]).',
            )
        tied = set(self._shared_parameters.tied)
        for part in self.modules:
            fully_shard(part, mesh=mesh or self.replicas.mesh["dp"], ignored_params=tied)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their names in the graph that was split."""
        return {name: p for name, p in self.named_tensors().items() if isinstance(p, nn.Parameter)}

    def parameters(self) -> list[nn.Parameter]:
        """Return this rank's parameters, each once, for an optimizer.

        A rank without parameters has a single empty one, because torch's optimizers refuse an empty list.
        """
        return list({id(p): p for p in self.named_parameters().values()}.values()) or [self._empty]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's share of the model's state dict, under the names of the unsplit model."""
        return {name: t.detach() for name, t in self.saved_tensors().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's parameters and buffers from the state dict of the unsplit model, or of any pipeline of it.

        Raises:
            PipelineError: SK802 for a missing name or a different shape; nothing is loaded then.
        """
        own = self.saved_tensors()
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                what = f"has the shape {list(state[name].shape)}" if name in state else "is not in the state"
                raise PipelineError(
                    "SK802", f"{name}{list(tensor.shape)} {what}", "Load a state of the model that was captured."
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(shard_like(tensor, state[name]))
        self._weights_changed = True

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters and buffers by their names in the graph that was split."""
        return tensors_of_stages(self._chain, self.stages)

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """Return `named_tensors` without non-persistent buffers and constants of the graph."""
        saved = self.every_saved()
        return {name: t for name, t in self.named_tensors().items() if name in saved}

    def every_saved(self) -> dict[str, torch.Tensor]:
        """Return `saved_tensors` of all stages, which other ranks train."""
        names = self.split.qualified_names
        return {names.get(name, name): t for name, t in self.split.module.state_dict().items()}

    def compare_optimizer(self, optimizer: Optimizer) -> None:
        """Compare the optimizers of the ranks, now and in each `compare_ranks`. All ranks must call it, before a step.

        Ranks compare how often ``optimizer.step`` is called from now on, and the options (``lr``, ...) of their
        parameter groups: of groups with the same ``name``, of parameters that several ranks have, and otherwise the
        options that groups took from the optimizer's defaults. `open_checkpoints` calls it.

        Raises:
            PipelineError: SK804 on every rank; names the ranks, and the option.
        """
        self._optimizer = ComparedOptimizer(optimizer)
        self._compare_optimizers()

    def compare_ranks(self) -> None:
        """Refuse to go on if the ranks have diverged. All ranks must call it.

        They compare the parameters and buffers of which several ranks have a copy (tied ones, and those of replicas),
        and their optimizers, if `compare_optimizer` was called. Each checkpoint calls it, and the first `infer` or
        `evaluate` after a training step.

        Raises:
            PipelineError: SK804 on every rank; names the ranks, and the parameter or option.
        """
        self._compare_optimizers()
        trained = self._trained
        held = {**copies(self._chain, self.stages, self._others), **copies(trained._chain, trained.stages)}
        with naming_lost_ranks(self._progress, "for all ranks to compare their weights"):
            require_same_tensors(held, self.group, LOADED)
        self._others.settle()
        self._weights_changed, trained._compared_at = False, trained.steps

    def _compare_optimizers(self) -> None:
        trained = self._trained
        own = trained._optimizer
        facts = None if own is None else own.facts(copies(trained._chain, trained.stages))
        with naming_lost_ranks(self._progress, "for all ranks to compare their optimizers"):
            require_same_optimizers(facts, self.group)

    @property
    def _trained(self) -> Pipeline:
        """The pipeline that trains these weights: this one, or the one that it evaluates."""
        return self if self._trains is None else self._trains._trained

    def with_target(self, kwargs: Mapping[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
        """Return the keyword inputs and the target of a step; a target that the model takes is among the inputs."""
        return self._inputs.with_target(kwargs, target)

    @property
    def inputs(self) -> Mapping[str, torch.Tensor | None]:
        """Input of the graph -> a tensor on ``meta`` as in one microbatch at capture; ``None`` if it is no tensor."""
        return self._chain.facts.inputs

    @property
    def needs(self) -> frozenset[str]:
        """The inputs that this rank reads, and ``target`` for a loss that it computes; others may be left out here."""
        read = {node for stage in self.stages for node in self._chain.inputs(stage)}
        last = self._chain.stages - 1 in self.stages
        if last:
            read |= set(self._chain.split.module.graph.output_node().all_input_nodes)
        names = {str(node.target) for node in read if node.op == "placeholder"} | self._chain.facts.sizes.inputs.keys()
        return frozenset(names | {"target"} if last and self._loss is not None else names)

    def broadcast(self, batch: Any) -> Any:
        """Return rank 0's batch on every rank. All ranks must call it; those other than rank 0 may give ``None``."""
        first = self.rank == 0
        leaves, spec = pytree.tree_flatten(batch)
        # Tensors are sent as they are, and described by empty ones; other values are pickled.
        plain = [torch.empty(x.shape, dtype=x.dtype, device="meta") if _is_tensor(x) else x for x in leaves]
        with naming_lost_ranks(self._progress, "for all ranks to get a batch from rank 0"):
            sent: list[Any] = [pytree.tree_unflatten(plain, spec) if first else None]
            dist.broadcast_object_list(sent, group=self.group, group_src=0)
            likes, spec = pytree.tree_flatten(sent[0])
            for i, like in enumerate(likes):
                if _is_tensor(like):
                    given = leaves[i] if first else torch.empty(like.shape, dtype=like.dtype, device=self.device)
                    likes[i] = given.to(self.device).contiguous()
                    dist.broadcast(likes[i], group=self.group, group_src=0)
        return pytree.tree_unflatten(likes, spec)

    def divide(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, is_last: bool = True) -> DividedBatch:
        """Split the inputs and the target of a step, after `with_target`; ``is_last`` asks for the shares of losses."""
        return self._inputs.divide(args, kwargs, target, self._reduction if is_last else None)

    def seed_of(self, step: int, microbatch: int) -> int:
        """Return the seed of a microbatch of a step. It does not depend on the number of stages."""
        return (self._seed * 1_000_003 + step * self.microbatches + microbatch) % 2**63

    def loss_of(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of one microbatch."""
        return (self._loss or own_loss)(output, target)

    @property
    def borders(self) -> tuple[tuple[str, ...], ...]:
        """Border -> the names of the nodes whose values cross it in training, from each stage to the next."""
        stages = self._rank_stages.get(True)
        wanted = (stages.last_stage if stages else last_stage_of(self._chain, self._loss, True, False)).wanted
        edges = (self._chain.border(stage, wanted) for stage in range(self._chain.stages - 1))
        return tuple(tuple(self._chain.value(node).name for node in edge) for edge in edges)

    @property
    def torch_stages(self) -> tuple[PipelineStage, ...]:
        """Torch's stages of this rank for training, for the sizes of the last step; empty before the first step."""
        stages = self._rank_stages.get(True)
        return () if stages is None else stages.stages

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The parts of this rank."""
        return tuple(self.split.parts[self._chain.keys[stage]] for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        """The most bytes that saved values of this rank took on the host at once in the last step."""
        stages = self._rank_stages.get(True)
        return 0 if stages is None else stages.batch.queue.host_most

    def _captured_model(self) -> nn.Module:
        found = captured_model(self.split)
        if found is None:
            raise PipelineError(
                "SK802", "stages of a folder do not know the graph", "Make the pipeline of a split: pipeline(split)."
            )
        return found

    def _run(
        self,
        train: bool,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Any,
        keep: bool,
        loss_everywhere: bool = False,
        evaluates: bool = False,
    ) -> Batch:
        kind: Kind = "step" if train and not loss_everywhere else "step(loss_everywhere=True)" if train else "infer"
        has_loss = (train or evaluates) and self._chain.stages - 1 in self.stages
        divided, outputs, compares = self._agreement.begin(
            lambda: self._prepared(kind, args, kwargs, target, keep, has_loss)
        )
        if compares:
            self.compare_ranks()
        made = self._rank_stages.get(train)
        if made is None:
            made = self._rank_stages[train] = self._stages_for(train, outputs)
        made.set_sizes(divided.sizes, self._agreement.together)
        batch = made.batch
        batch.inputs, batch.sizes, batch.targets, batch.keep = divided.inputs, divided.sizes, divided.targets, keep
        batch.seeds = [self.seed_of(self.steps, i) for i in range(self.microbatches)]
        batch.outputs, batch.losses, batch.found = {}, {}, None
        batch.queue.clear()
        self.steps += train
        with naming_failures(self._progress), self._shared_parameters.added_up() if train else nullcontext():
            with nullcontext() if self._channel is None else self._channel.step():
                made.step()
            if batch.losses:
                losses = torch.cat([batch.losses[i].flatten() for i in self._share])
                self._set_losses(batch, losses)
            if loss_everywhere:
                batch.loss, batch.found = self._from_last(batch)
        if not train:
            reshard(self.modules)
        return batch

    def _prepared(
        self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, keep: bool, has_loss: bool
    ) -> tuple[PipelineCall, DividedBatch]:
        """Return a call for the other ranks to compare, and its microbatches.

        Raises:
            PipelineError: SK802, SK801 for what this rank cannot run; `StepAgreement.begin` tells the others.
        """
        train = kind != "infer"
        if train:
            require_gradients(self._is_forward_alone)
        made = self._rank_stages.get(train)
        if keep and made is not None and made.last_stage.own is not None:
            raise PipelineError(
                "SK802",
                "outputs are asked for after steps that did not ask for them",
                "Ask in the first step: step(..., outputs=True).",
            )
        self._fixed.require_modes()
        self._fixed.require_autocast(self.device)
        if train:
            self._fixed.require_flags(self.named_parameters())
        divided = self.divide(args, kwargs, target, has_loss)
        if train:
            sum_shards(self.modules, self.replicas, self._shared_parameters.tied)
        # only the loss reads the target, so that other ranks may leave it out
        targets = {} if target is None and self._chain.stages - 1 not in self.stages else {"the target": target}
        changed = self._weights_changed or bool(self._others.written())
        trained = self._trained
        compares = changed or (not train and trained.steps != trained._compared_at)
        call = PipelineCall(kind, self.steps, divided.whole, targets, keep, compares, divided.undivided)
        return call, divided

    def _stages_for(self, train: bool, outputs: bool) -> RankStages:
        last_stage = last_stage_of(self._chain, self._loss, train, outputs)
        parts = zip(self.stages, self.modules, strict=True)
        moving = {n for n, part in parts if isinstance(part, PlannedStage) and part.graphs.offloaded}
        row = row_of_rank(self.order, self.replicas) if train else ()
        batch = Batch(self._progress, self._share, channel=self._channel, queue=HostQueue(row, moving))
        return RankStages(self._chain, last_stage, batch, self.order, self.stages, self.device, self.replicas)

    def _set_losses(self, batch: Batch, losses: torch.Tensor) -> None:
        """Keep the losses of this replica, ``[share]``, as the losses and the loss of the step."""
        batch.found = self.replicas.gathered(losses, self.microbatches)
        batch.loss = reduced(batch.found, batch.sizes.shares)

    def _from_last(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the losses of the last stage on every rank, as float64, which holds any dtype."""
        every = torch.zeros(1 + self.microbatches, dtype=torch.float64, device=self.device)
        if batch.found is not None:
            every[1:] = batch.found
            every[0] = reduced(every[1:], batch.sizes.shares)
        source = self.replicas.ranks[self.order.rank_of[-1]][0]
        dist.broadcast(every, group=self.group, group_src=source)
        return every[0], every[1:]

    @property
    def _share(self) -> range:
        """The microbatches of this replica."""
        return self.replicas.share(self.microbatches)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _norm(grad: torch.Tensor, norm_type: float, device: torch.device) -> torch.Tensor:
    """Return the norm of a gradient, or of this rank's shard of it, in at least single precision."""
    own = local_tensor(grad.detach())
    if own.dtype in (torch.float16, torch.bfloat16):
        own = own.float()
    norm: torch.Tensor = torch.linalg.vector_norm(own, norm_type)
    return norm.to(device)
