"""Views a training step in stages, as its plan has divided it, as a chain of stages that ranks run like any other.

The parent calls a module for each stage, with the inputs that the stage reads and all that the stage before sends::

    stage 0 ──x, mask──▶ stage 1 ──y, mask──▶ stage 2 ──▶ {"loss": loss}        stage 1 returns the mask as well
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.engine.codegen.part_modules import ties_of
from splitkit.engine.split import Split
from splitkit.engine.staged_step import JointSource, StagedStep
from splitkit.errors import PipelineError
from splitkit.graph.storages import names_of, parameters_and_buffers
from splitkit.plans.parts import PartKey
from splitkit.runtime.folder.load import StageFolder
from splitkit.runtime.ranks.border_values import BorderValue, meta_like
from splitkit.runtime.ranks.planned_stage import BorderSlots, PlannedStage, StageTask, border_slots
from splitkit.runtime.ranks.stage_chain import (
    Chain,
    ChainFacts,
    StageParts,
    StageSource,
    chain_of,
    identity_of,
    stage_of_calls,
)
from splitkit.short_repr import brief
from splitkit.training.stage_parts import StagePart

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class PlannedParts(StageParts):
    """The stages of a training step; the part of each is its forward part.

    Attributes:
        joint: the joint graph that was divided.
    """

    joint: JointSource

    __repr__ = brief


def captured_graph(source: StageSource) -> fx.GraphModule | None:
    """Return the graph that was divided into stages; ``None`` for stages of a folder."""
    if isinstance(source, PlannedParts):
        graph: fx.GraphModule = source.joint.graph_module
        return graph
    return source.flow.root if isinstance(source, Split) else None


def captured_model(source: StageSource) -> nn.Module | None:
    """Return the module that holds all parameters and buffers; ``None`` for stages of a folder."""
    return source.joint.model if isinstance(source, PlannedParts) else captured_graph(source)


def with_every_name(held: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return tensors by name, under each name that they have in the model: captures choose one of a tied weight's."""
    groups = {name: group for group in names_of(parameters_and_buffers(model)).values() for name in group}
    return {other: tensor for name, tensor in held.items() for other in groups.get(name, [name])}


def chain_of_any(split: Split | StagedStep | StageFolder) -> Chain:
    """Return the chain of the stages of a split, of a training step, or of a folder.

    Raises:
        PipelineError: SK801 as `chain_of` and `chain_of_step`.
    """
    if isinstance(split, StageFolder):
        return split.chain
    return chain_of(split) if isinstance(split, Split) else chain_of_step(split)


def chain_of_step(step: StagedStep) -> Chain:
    """Return the chain of the stages of a training step.

    Raises:
        PipelineError: SK801 for stages that cannot run on several ranks: a loss before the last stage, a buffer that
            one stage updates and another reads, a model that DDP manages, a value that cannot be sent.
    """
    joint = step.source
    if joint is None:
        raise PipelineError(
            "SK801",
            "these stages do not know the joint graph that they were divided from",
            "Divide it by joint.split(plan).",
        )
    _require_trainable(joint)
    borders = [border_slots(a, b) for a, b in zip(step.stages, step.stages[1:], strict=False)]
    _require_outputs(joint, step)
    saved = joint.model.state_dict().keys()
    stages = [_stage(joint, step, number, borders, saved) for number in range(len(step.stages))]
    parts: dict[PartKey, PlannedStage] = {StagePart("forward", i): stage for i, stage in enumerate(stages)}
    names: dict[PartKey, str] = {key: f"stage_{i}" for i, key in enumerate(parts)}
    leaves = _leaves(joint)
    module, values = _parent(joint, leaves, dict(zip(names.values(), stages, strict=True)))
    signature = joint.signature
    known = {**signature.parameters, **signature.buffers}
    qualified = {
        f"{names[key]}.held.{placeholder}": known[placeholder]
        for key, stage in parts.items()
        for placeholder in parameters_and_buffers(stage.held)
    }
    source = PlannedParts(module, step.plan, parts, names, qualified, tuple(_shared(module)), joint)
    return Chain(source, stage_of_calls(source), _facts(joint, step, leaves, values))


@dataclass(frozen=True)
class _Leaf:
    """A leaf of the arguments of the model.

    Attributes:
        name: the name of the argument; if it is nested in an argument, the name of its placeholder.
        placeholder: the name of its placeholder in the joint graph; empty if the graph does not have it.
        like: a tensor on ``meta`` of the shape and dtype of one microbatch, if it is a tensor.
    """

    name: str
    placeholder: str
    like: torch.Tensor | None


def _leaves(joint: JointSource) -> list[_Leaf]:
    """Return the leaves of ``(args, kwargs)``, in order."""
    structure = joint.signature.structure
    args, kwargs = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    named = {leaf: name for name, leaf in zip(_arguments(joint), (*args, *kwargs.values()), strict=True)
             if isinstance(leaf, int)}  # fmt: skip
    placeholders, likes = {leaf: name for name, leaf in joint.signature.inputs.items()}, _likes(joint)
    found: list[_Leaf] = []
    for leaf in range(structure.num_leaves):
        placeholder = placeholders.get(leaf, "")
        name = named.get(leaf) or placeholder or f"leaf_{leaf}"
        found.append(_Leaf(name, placeholder, likes.get(placeholder)))
    return found


def _arguments(joint: JointSource) -> list[str]:
    """Return the names of the arguments of the model with which it was captured."""
    args, kwargs = joint.signature.structure.children()
    known = [p.name for p in inspect.signature(joint.model.forward).parameters.values() if p.kind in _POSITIONAL]
    positional = [*known, *(f"arg_{i}" for i in range(len(known), args.num_children))][: args.num_children]
    return [*positional, *kwargs.context]


def _likes(joint: JointSource) -> dict[str, torch.Tensor]:
    """Return placeholder -> a tensor on ``meta`` like its value at capture."""
    nodes = joint.graph_module.graph.find_nodes(op="placeholder")
    return {n.name: like for n in nodes if (like := meta_like(n.meta["val"])) is not None}


def _stage(
    joint: JointSource, step: StagedStep, number: int, borders: Sequence[BorderSlots], saved: Collection[str]
) -> PlannedStage:
    """Return the module of a stage; ``saved`` are the names in the state dict of the model."""
    graphs, signature, last = step.stages[number], joint.signature, number + 1 == len(step.stages)
    likes = _likes(joint) if last else {}
    made = {*graphs.gradients, *graphs.weight_gradients}
    gradients = ((position - signature.forward_outputs, name) for position, name in signature.gradients.items())
    trained = {
        position: name
        for position, name in gradients
        if name in signature.parameters and (name in graphs.primals or position in made)
    }
    updates = {i: name for i, name in signature.updates.items() if i in graphs.outputs}
    task = StageTask(
        tuple(name for name in graphs.primals if name in signature.inputs),
        updates,
        trained,
        signature.loss if last else None,
        [(likes[name], of == signature.loss) for name, of in signature.tangents.items()] if last else (),
        borders[number - 1] if number else None,
        None if last else borders[number],
    )
    held = dict[str, torch.Tensor]()
    for name in dict.fromkeys([*graphs.primals, *updates.values(), *trained.values()]):
        if name in signature.parameters:
            held[name] = joint.model.get_parameter(signature.parameters[name])
        elif name in signature.buffers:
            held[name] = joint.model.get_buffer(signature.buffers[name])
    unsaved = {name for name in held if name in signature.buffers and signature.buffers[name] not in saved}
    return PlannedStage(graphs, task, held, unsaved).train(joint.model.training)


def _parent(
    joint: JointSource, leaves: Sequence[_Leaf], stages: Mapping[str, PlannedStage]
) -> tuple[fx.GraphModule, dict[str, BorderValue]]:
    """Return the parent, and node -> how its value crosses a border."""
    graph, values = fx.Graph(), dict[str, BorderValue]()
    inputs = [(leaf.placeholder, graph.placeholder(leaf.name)) for leaf in leaves]
    given, received = {name: node for name, node in inputs if name}, list[fx.Node]()
    loss = BorderValue("loss", torch.empty((), device="meta", requires_grad=True))
    for name, stage in stages.items():
        read = [given[placeholder] for placeholder in stage.task.inputs]
        call = graph.call_module(name, (*read, *received))
        sent = stage.task.after.crossing if stage.task.after is not None else (loss,)
        received = [graph.call_function(operator.getitem, (call, i)) for i in range(len(sent))]
        values |= {node.name: value for node, value in zip(received, sent, strict=True)}
    graph.output(received)
    _, form = pytree.tree_flatten({"loss": 0})
    graph.set_codegen(_torch.pytree_codegen(_arguments(joint), joint.signature.structure, form))
    return fx.GraphModule(dict(stages), graph), values


def _shared(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """Yield the names of each parameter that several stages have."""
    for places in ties_of(module):
        if isinstance(places[0][0][places[0][1]], nn.Parameter):
            yield tuple(name for _, _, name in places)


def _facts(
    joint: JointSource, step: StagedStep, leaves: Sequence[_Leaf], values: Mapping[str, BorderValue]
) -> ChainFacts:
    signature, random = joint.signature, {n.name for n, effect in joint.flow.effects.items() if effect.random}
    nodes = joint.graph_module.graph.find_nodes(op="placeholder")
    held = [n for n in nodes if n.name in signature.parameters or n.name in signature.buffers]
    made = {position for stage in step.stages for position in stage.outputs}
    constants = {leaves[i].name: value for i, value in signature.constants.items()}
    return ChainFacts(
        values,
        {leaf.name: leaf.like for leaf in leaves},
        tuple(any(n.name in random for n in stage.forward.graph.nodes) for stage in step.stages),
        tuple(sorted({signature.buffers[name] for i, name in signature.updates.items() if i in made})),
        identity_of(joint.graph_module.graph, step.plan),
        captured=frozenset(n.meta["val"].device.type for n in held) or frozenset({"cpu"}),
        constants=constants,
    )


def _require_trainable(joint: JointSource) -> None:
    """Refuse parameters whose gradients DDP handles by hooks, which expect forward to be its own."""
    managed = (nn.parallel.DistributedDataParallel,)
    if wrapped := [name or "the model" for name, module in joint.model.named_modules() if isinstance(module, managed)]:
        raise PipelineError(
            "SK801",
            f"{wrapped[0]} is managed by DDP, which expects to run forward itself",
            "Use the plain model; replicas of its stages share a batch: splitkit train --dp 2.",
            wrapped,
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
