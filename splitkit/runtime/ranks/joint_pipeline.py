"""Runs a training step in stages on the ranks of a process group: its own graphs inside torch's pipeline schedules."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.checks import is_whole, shown
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import PipelineError
from splitkit.graph.storages import parameters_and_buffers
from splitkit.pipeline.order import PipelineOrder
from splitkit.plans.plan_file import fingerprint
from splitkit.runtime.ranks.batch_dims import BatchDims, division
from splitkit.runtime.ranks.faults import Progress, global_ranks, naming_failures, naming_lost_ranks, time_limit
from splitkit.runtime.ranks.joint_stage import (
    BorderSlots,
    HostQueue,
    JointBatch,
    JointStage,
    StageOutputs,
    border_slots,
)
from splitkit.runtime.ranks.microbatches import checked_dims, cut_inputs, no_batch, require_fit
from splitkit.runtime.ranks.order_runner import microbatches_or_usual, placed_order, torch_schedule
from splitkit.runtime.ranks.rank_agreement import differs, from_every, require_process_group
from splitkit.runtime.ranks.rank_device import device_of_rank, place_graphs
from splitkit.runtime.ranks.replicas import RngHandover, microbatch_seed, replicas, row_of_rank
from splitkit.runtime.ranks.stage import handed_loss
from splitkit.runtime.ranks.stage_weights import OtherTensors, require_same_copies
from splitkit.runtime.ranks.step_agreement import PipelineCall, StepAgreement, digest_of_tensors
from splitkit.runtime.ranks.step_losses import PipelineStep, Reduction, checked_reduction, reduced, shares_of

_EACH = "or concatenate the microbatches in dimension 0"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class JointSource(Protocol):
    """The joint graph that was divided: a `splitkit.frontends.joint_capture.Joint`."""

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph."""

    @property
    def signature(self) -> Any:
        """The meaning of its inputs and outputs."""

    @property
    def model(self) -> nn.Module:
        """The model, which has the parameters and buffers."""

    @property
    def flow(self) -> Any:
        """The facts about the graph."""


def joint_pipeline(
    joint: JointSource,
    step: StagedStep,
    schedule: str | PipelineOrder = "1f1b",
    microbatches: int | None = None,
    *,
    reduction: Reduction = "mean",
    batch_dims: BatchDims | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    compiled: bool = False,
) -> JointPipeline:
    """Run the stages of a training step on the ranks of a process group, under a pipeline schedule.

    Call it on every rank with the same joint graph, stages and arguments, and then call `JointPipeline.step` with the
    same batch. Each stage does exactly what the plan says: it saves, recomputes and defers as planned::

        joint = splitkit.capture_joint(model, **inputs_of_one_microbatch)
        step = joint.split(splitkit.policies.Pipeline(4, schedule="zbv", microbatches=8))
        pipe = splitkit.runtime.joint_pipeline(joint, step, "zbv", 8)
        pipe.step(**batch)
        optimizer.step()

    Under zero-bubble schedules, stages with a weight graph run it when the schedule says; other stages run all of
    backward in the input part. Each rank holds the whole model; only the parameters of its stages get gradients.

    Args:
        joint: the joint graph, captured with the inputs of one microbatch.
        step: its stages: what ``joint.split(plan)`` returns.
        schedule: the name of a schedule, or an order of your own.
        microbatches: per step; by default as many as the order has, or 8.
        reduction: what the loss of a step is of the losses of its microbatches, as in `splitkit.runtime.pipeline`. A
            function is called with the inputs of a microbatch by the names of the model's arguments.
        batch_dims: input -> the dimension that holds its batch, for inputs in which it is not 0.
        group: the ranks; by default the whole default process group.
        device: the device of this rank, as in `splitkit.runtime.pipeline`.
        seed: the seed of random numbers: microbatch i of step s begins with the seed that `JointPipeline.seed_of`
            returns, on any number of stages.
        compiled: whether each graph of a stage is compiled with ``torch.compile``.

    Raises:
        PipelineError: SK801 for stages that cannot run on several ranks (a gradient that does not match a received
            activation, a loss before the last stage, parameters that DDP or FSDP manage); SK804 if the ranks differ.
        ScheduleError: SK330 if the schedule does not allow these numbers of stages, ranks and microbatches.
    """
    return JointPipeline(joint, step, schedule, microbatches, reduction, batch_dims, group, device, seed, compiled)


class JointPipeline:
    """See `joint_pipeline`.

    Attributes:
        order: the actions of each rank.
        rank: the rank of this process in the group.
        stages: the numbers of this rank's stages.
        microbatches: per step.
        modules: the modules of this rank's stages.
        steps: the number of steps that have begun; seeds depend on it.
    """

    def __init__(
        self,
        joint: JointSource,
        step: StagedStep,
        schedule: str | PipelineOrder,
        microbatches: int | None,
        reduction: Reduction,
        batch_dims: BatchDims | None,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        seed: int,
        compiled: bool,
    ) -> None:
        require_process_group()
        if not is_whole(seed):
            raise PipelineError("SK802", f"the seed is {shown(seed)}", "Give a whole number.")
        self._joint, self._step, self._seed, self.steps = joint, step, int(seed), 0
        self.group, self.rank = group, dist.get_rank(group)
        self.device = device_of_rank(device, group)
        microbatches = microbatches_or_usual(schedule, microbatches)
        what = schedule if isinstance(schedule, str) else schedule.ranks
        how = "a function" if callable(reduction) else reduction
        dims = sorted((batch_dims or {}).items())
        same = {"microbatches": microbatches, "seed": seed, "reduction": how, "dimensions of the batch": dims}
        _require_same(joint, step, {"schedule": str(what), **{name: str(value) for name, value in same.items()}}, group)
        self._words = _names_of_inputs(joint)
        self._reduction = checked_reduction(reduction, self._likes)
        self._named = checked_dims(batch_dims, {name: like.dim() for name, like in self._likes.items()})
        ranks = dist.get_world_size(group)
        self.order = placed_order(schedule, 1, len(step.stages), microbatches, ranks)
        self.microbatches = self.order.microbatches
        places = replicas(1, group, self.device)
        self.stages = tuple(s for s, rank in enumerate(self.order.rank_of) if rank == places.place)
        row = row_of_rank(self.order, places)
        limits = global_ranks(group), self.device, time_limit(group)
        borders = [border_slots(a, b, i) for i, (a, b) in enumerate(zip(step.stages, step.stages[1:], strict=False))]
        names = [stage.sent for stage in step.stages[:-1]]
        self._progress = Progress(row, self.order.rank_of, places, names, *limits)
        self._agreement = StepAgreement(group, self.device, self._progress)
        _require_trainable(joint)
        _require_outputs(joint, step)
        moving = {number for number in self.stages if step.stages[number].offloaded}
        self._batch = JointBatch(self._progress, queue=HostQueue(row, moving))
        self._ties, self._groups = self._tied(group)
        self._agreement.together(self._place)
        self.modules = tuple(self._module(number, borders, compiled) for number in self.stages)
        self._own, self._others = self._weights()
        own = [
            PipelineStage(
                module,
                module.number,
                len(step.stages),
                self.device,
                input_args=module.input_tensors,
                output_args=module.output_tensors,
                group=places.pipeline_group,
                dw_builder=module.weight_runner,
            )
            for module in self.modules
        ]
        self._schedule = torch_schedule(self.order, own, handed_loss)

    def step(self, *args: Any, **kwargs: Any) -> PipelineStep:
        """Run forward and backward of one batch. Gradients accumulate in the parameters, as with ``backward()``.

        The gradients are of the loss of the step, which `reduction` makes of the microbatches' losses.

        Args:
            args: the inputs of the model, with all microbatches concatenated in dimension 0, or where ``batch_dims``
                says; beside such an input, one with the shape of one microbatch goes to each of them.
            kwargs: keyword inputs, as ``args``.

        Raises:
            PipelineError: SK802 for inputs that do not fit, SK804 if the ranks do not make the same call with the same
                batch, SK805 if a rank failed.
        """
        (self._batch.primals, self._batch.shares), agreed = self._agreement.begin(lambda: self._prepared(args, kwargs))
        if agreed.weights:
            with naming_lost_ranks(self._progress, "for all ranks to compare their weights"):
                require_same_copies({**self._others.written(), **self._own}, self.group, self._others)
        self._batch.seeds = [self.seed_of(self.steps, i) for i in range(self.microbatches)]
        self._batch.losses.clear()
        self._batch.queue.clear()
        self.steps += 1
        with naming_failures(self._progress):
            number = torch.arange(self.microbatches)
            last = len(self._step.stages) - 1 in self.stages
            self._schedule.step(microbatch=number, target=number if last else None, return_outputs=False)
            self._add_ties()
        if not self._batch.losses:
            return PipelineStep(None, None)
        losses = torch.stack([self._batch.losses[i] for i in range(self.microbatches)])
        return PipelineStep(reduced(losses, self._batch.shares), losses)

    @property
    def host_bytes(self) -> int:
        """The most bytes that saved values of this rank took on the host at once in the last step."""
        return self._batch.queue.host_most

    @property
    def model(self) -> nn.Module:
        """The model, which each rank holds as a whole."""
        return self._joint.model

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the stages of this rank read and that have gradients, each once.

        On a rank without any it is an empty parameter, since torch's optimizers refuse an empty list.
        """
        found = {id(p): p for module in self.modules for p in module.outputs.gradients.values()}
        return list(found.values()) or [self.modules[0].anchor]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of `parameters` by their names in the model."""
        own = {id(p) for p in self.parameters()}
        return {name: p for name, p in self._joint.model.named_parameters() if id(p) in own}

    def seed_of(self, step: int, microbatch: int) -> int:
        """Return the seed of a microbatch of a step. It does not depend on the number of stages."""
        return microbatch_seed(self._seed, step, self.microbatches, microbatch)

    def _prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[PipelineCall, Any]:
        """Return a call for the other ranks to compare; the inputs of each microbatch by placeholder, and the shares.

        Raises:
            PipelineError: SK802 for inputs that do not fit, and where gradients are off.
        """
        require_gradients()
        signature, count = self._joint.signature, self.microbatches
        leaves = signature.leaves(tuple(args), kwargs)
        values = {self._words[name]: leaves[leaf] for name, leaf in signature.inputs.items()}
        given = {n: v for n, v in values.items() if n in self._likes and isinstance(v, torch.Tensor)}
        parts = {name: [self._likes[name].shape] * count for name in given}
        found = division({name: value.shape for name, value in given.items()}, parts, self._named)
        require_fit(given, self._likes, parts, found, self._named, _EACH, other="")
        call = PipelineCall("step", self.steps, values, weights=bool(self._others.written()))
        if not found.rows and count > 1 and (refused := no_batch(given, count, _EACH)):
            raise refused
        divided = cut_inputs(values, found, count, self.device)
        primals = [{name: own[self._words[name]] for name in signature.inputs} for own in divided]
        return call, (primals, shares_of(self._reduction, (1,) * count, divided))

    @cached_property
    def _likes(self) -> dict[str, torch.Tensor]:
        """Input -> a tensor of the shape and dtype of one microbatch."""
        nodes = self._joint.graph_module.graph.find_nodes(op="placeholder")
        found = {self._words[n.name]: n.meta["val"] for n in nodes if n.name in self._words}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def _place(self) -> None:
        """Move what the stages of this rank read to its device."""
        signature, nodes = self._joint.signature, self._joint.graph_module.graph.find_nodes(op="placeholder")
        held = [n for n in nodes if n.name in signature.parameters or n.name in signature.buffers]
        captured = frozenset(n.meta["val"].device.type for n in held)
        stages = [self._step.stages[number] for number in self.stages]
        graphs = [g for s in stages for g in (s.forward, s.backward, s.weight) if g is not None]
        updated = [name for i, name in signature.updates.items() if any(i in stage.outputs for stage in stages)]
        own = list(self._own_values([*updated, *(name for stage in stages for name in stage.primals)]).values())
        trained = [p for number in self.stages for p in self._trained(number).values()]
        place_graphs(self._joint.model, graphs, [*own, *trained], self.device, captured)

    def _module(self, number: int, borders: Sequence[BorderSlots], compiled: bool) -> JointStage:
        step, signature = self._step, self._joint.signature
        graphs, last = step.stages[number], number + 1 == len(step.stages)
        values = self._own_values(graphs.primals)
        written = {i: name for i, name in signature.updates.items() if i in graphs.outputs}
        updates = {i: self._own_values([name])[name] for i, name in written.items()}
        likes = {n.name: n.meta["val"] for n in self._joint.graph_module.graph.find_nodes(op="placeholder")}
        tangents = [
            (of == signature.loss, torch.ones(likes[name].shape, dtype=likes[name].dtype, device=self.device))
            for name, of in signature.tangents.items()
        ]
        ways = borders[number - 1] if number else None, None if last else borders[number]
        return JointStage(
            number,
            graphs,
            StageOutputs(signature.loss if last else None, updates, tangents if last else (), self._trained(number)),
            values,
            ways,
            self._rng(number),
            self._batch,
            frozenset(self._ties),
            compiled,
        )

    def _own_values(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers among some placeholders."""
        signature, model = self._joint.signature, self._joint.model
        found: dict[str, torch.Tensor] = {}
        for name in names:
            if name in signature.parameters:
                found[name] = model.get_parameter(signature.parameters[name])
            elif name in signature.buffers:
                found[name] = model.get_buffer(signature.buffers[name])
        return found

    def _weights(self) -> tuple[dict[str, torch.Tensor], OtherTensors]:
        """Return the parameters and buffers of this rank's stages, and the others."""
        every = parameters_and_buffers(self._joint.model)
        outputs = [module.outputs for module in self.modules]
        held = [t for module in self.modules for t in module.own.values()]
        held += [t for found in outputs for t in (*found.gradients.values(), *found.updates.values())]
        own = {id(t) for t in held}
        return {name: t for name, t in every.items() if id(t) in own}, OtherTensors(every, held)

    def _trained(self, number: int) -> dict[int, nn.Parameter]:
        """Return position of a gradient -> its parameter, for all parameters that a stage reads or has gradients of."""
        signature = self._joint.signature
        return {
            position: self._joint.model.get_parameter(signature.parameters[name])
            for position, name in self._gradients.items()
            if number in self._holders[position]
        }

    @cached_property
    def _gradients(self) -> dict[int, str]:
        """Position of the gradient of a parameter among all gradients -> the placeholder of the parameter."""
        signature = self._joint.signature
        found = ((position - signature.forward_outputs, name) for position, name in signature.gradients.items())
        return {position: name for position, name in found if name in signature.parameters}

    @cached_property
    def _holders(self) -> dict[int, list[int]]:
        """Position of a gradient -> the stages that compute a term of it, or read its parameter."""
        return {
            position: [
                number
                for number, stage in enumerate(self._step.stages)
                if name in stage.primals or position in (*stage.gradients, *stage.weight_gradients)
            ]
            for position, name in self._gradients.items()
        }

    def _rng(self, number: int) -> RngHandover:
        flow = self._joint.flow
        names = {n.name for n, effect in flow.effects.items() if effect.random}
        draws = [
            s for s, stage in enumerate(self._step.stages) if any(n.name in names for n in stage.forward.graph.nodes)
        ]
        first, last = (min(draws), max(draws)) if draws else (0, 0)
        return RngHandover(number, number in draws, first < number <= last, first <= number < last, self.device)

    def _tied(self, group: dist.ProcessGroup | None) -> tuple[dict[int, list[int]], dict[int, Any]]:
        """Return gradient of several stages -> the ranks that hold its parameter, and -> their process group.

        A stage that reads a parameter without computing a term of its gradient needs the sum as well, because its rank
        has a copy of the parameter. All ranks must call this.
        """
        ranks = {
            position: sorted({self.order.rank_of[s] for s in stages})
            for position, stages in self._holders.items()
            if len(stages) > 1
        }
        every = global_ranks(group)
        made: dict[tuple[int, ...], Any] = {}
        for found in ranks.values():
            if len(found) > 1 and tuple(found) not in made:
                made[tuple(found)] = dist.new_group([every[r] for r in found])
        return ranks, {position: made.get(tuple(found)) for position, found in ranks.items()}

    def _add_ties(self) -> None:
        """Add the sum of the terms of each tied gradient to its parameter, on every rank that has a term."""
        for position, ranks in self._ties.items():
            if self.rank not in ranks:
                continue
            holders = [m for m in self.modules if position in m.outputs.gradients]
            parameter = holders[0].outputs.gradients[position]
            terms = [m.terms.pop(position) for m in reversed(holders) if position in m.terms]
            total = terms[0] if terms else torch.zeros_like(parameter)
            for term in terms[1:]:
                total = total + term
            if self._groups[position] is not None:
                total = total.contiguous()  # the ranks' terms may be transposed differently
                dist.all_reduce(total, group=self._groups[position])
            parameter.grad = total if parameter.grad is None else parameter.grad + total


def _names_of_inputs(joint: JointSource) -> dict[str, str]:
    """Return placeholder -> the name of the model's argument; its own if it is nested in an argument."""
    signature = joint.signature
    args, kwargs = pytree.tree_unflatten(list(range(signature.structure.num_leaves)), signature.structure)
    positional = [p.name for p in inspect.signature(joint.model.forward).parameters.values() if p.kind in _POSITIONAL]
    named = {**dict(zip(positional, args, strict=False)), **kwargs}
    name_of = {leaf: name for name, leaf in named.items() if isinstance(leaf, int)}
    return {name: name_of.get(leaf, name) for name, leaf in signature.inputs.items()}


def _require_trainable(joint: JointSource) -> None:
    """Refuse parameters whose gradients others handle by hooks, which do not fire for gradients written by hand."""
    managed = (nn.parallel.DistributedDataParallel,)
    wrapped = [name or "the model" for name, module in joint.model.named_modules() if isinstance(module, managed)]
    sharded = [name for name, p in joint.model.named_parameters() if isinstance(p, DTensor)]
    if wrapped or sharded:
        raise PipelineError(
            "SK801",
            f"{(wrapped or sharded)[0]} is managed by {'DDP' if wrapped else 'FSDP'}, whose hooks do not see gradients "
            "that a stage writes",
            "Use the plain model; for sharded stages, use splitkit.runtime.pipeline with a split.",
            wrapped or sharded,
        )


def _require_outputs(joint: JointSource, step: StagedStep) -> None:
    """Refuse a loss that is not computed in the last stage, and updates that stages on other ranks would miss."""
    signature = joint.signature
    if signature.loss not in step.stages[-1].outputs:
        raise PipelineError(
            "SK801",
            "the loss is not computed in the last stage",
            "Plan it there, because torch starts backward in the last stage.",
        )
    makers = {position: number for number, stage in enumerate(step.stages) for position in stage.outputs}
    if lost := [i for i, name in signature.updates.items() if i in makers and name not in signature.buffers]:
        raise PipelineError(
            "SK801", "the step writes to an input, which ranks do not share", "Capture a model that copies it.", lost
        )
    for position, name in signature.updates.items():
        maker = makers.get(position)
        readers = [number for number, stage in enumerate(step.stages) if name in stage.primals and number != maker]
        if maker is not None and readers:
            raise PipelineError(
                "SK801",
                f"stage {maker} updates {signature.buffers[name]}, and stage {readers[0]} reads it: "
                "its next microbatch would miss the update",
                "Put all nodes that read it, and the one that computes its new value, into one stage: "
                "splitkit.extend.stage_plan(joint.flow, stages).",
                [name],
            )


def _require_same(
    joint: JointSource, step: StagedStep, facts: Mapping[str, str], group: dist.ProcessGroup | None
) -> None:
    """Raise SK804 on every rank if the ranks are about to run different things, or hold different weights."""
    plan = {name: value for name, value in step.plan.to_dict().items() if name != "prices"}
    own = {
        "version of torch": torch.__version__,
        "graph": fingerprint(joint.graph_module.graph),
        "plan": hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest(),
        **facts,
        "model": _digest_of(joint.model),
    }
    every = from_every(own, group)
    for name in own:
        text = differs(
            {rank: facts[name] for rank, facts in enumerate(every)}, f"the {name} is {{}} on {{}}, {{}} on {{}}"
        )
        if text:
            raise PipelineError(
                "SK804", text, "Start every rank with the same files and arguments, and seed the model in the same way."
            )


def _digest_of(model: nn.Module) -> str:
    tensors = pytree.tree_leaves([dict(model.named_parameters()), dict(model.named_buffers())])
    return str(digest_of_tensors(tensors))


# Refuses changes to stages that would not do what they do to a model, because the capture has fixed it.


def autocasts_of(parts: Sequence[fx.GraphModule]) -> frozenset[tuple[str, torch.dtype]]:
    """Return the types of devices and the dtypes of the autocasts that graphs enter."""
    regions = [node for part in parts for node in part.graph.nodes if node.target is _torch.ENTER_AUTOCAST]
    entered: Any = (node.args[:2] for node in regions if node.args[2:3] != (False,))
    return frozenset(entered)


def require_gradients() -> None:
    """Refuse a step where gradients are off.

    Raises:
        PipelineError: SK802.
    """
    if not torch.is_grad_enabled():
        raise PipelineError(
            "SK802",
            "gradients are off, and a step runs backward",
            "Call step outside torch.no_grad() and torch.inference_mode(); forward alone is Pipeline.infer.",
        )


class FixedAtCapture:
    """The modes of the parts of a rank, and which of its parameters train, when the pipeline was made."""

    def __init__(self, parts: Sequence[fx.GraphModule], parameters: Mapping[str, nn.Parameter]) -> None:
        # Modules that a graph calls, as after symbolic_trace, follow their own mode.
        self._modes = [(part, part.training) for part in parts if not part.graph.find_nodes(op="call_module")]
        self._flags = {name: parameter.requires_grad for name, parameter in parameters.items()}

        self._autocasts = autocasts_of(parts)

    def require_autocast(self, device: torch.device) -> None:
        """Refuse an autocast around a call, unless it was around the capture too.

        Inside it, stages would compute other dtypes than those that the graph says cross the borders.

        Raises:
            PipelineError: SK802.
        """
        if not torch.is_autocast_enabled(device.type):
            return
        dtype = torch.get_autocast_dtype(device.type)
        if (device.type, dtype) not in self._autocasts:
            name = str(dtype).removeprefix("torch.")
            raise PipelineError(
                "SK802",
                f"autocast to {name} is active around the call, but was not active around the capture",
                f"Call capture inside torch.autocast(..., {dtype}); the call needs no autocast then.",
            )

    def require_modes(self) -> None:
        """Refuse parts whose mode has changed.

        Raises:
            PipelineError: SK802.
        """
        for part, mode in self._modes:
            if part.training != mode:
                called = "train" if part.training else "eval"
                raise PipelineError(
                    "SK802",
                    f"{called}() was called on a part, which has no effect: dropout and BatchNorm stay as captured",
                    "Capture the model in the other mode, and run that with the same weights: "
                    f"pipe.evaluation(sk.capture(model.{called}(), **inputs_of_one_microbatch)). Undo it with "
                    f"{'eval' if part.training else 'train'}().",
                )

    def require_flags(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Refuse parameters whose ``requires_grad`` has changed: it decides which gradients cross borders.

        Raises:
            PipelineError: SK802.
        """
        for name, parameter in parameters.items():
            if parameter.requires_grad != self._flags[name]:
                raise PipelineError(
                    "SK802",
                    f"requires_grad of {name} is {parameter.requires_grad}, and was {self._flags[name]} when the "
                    "pipeline was made: the other ranks do not know that",
                    "Tell all ranks: pipe.train_only(lambda name: ...).",
                    [name],
                )
