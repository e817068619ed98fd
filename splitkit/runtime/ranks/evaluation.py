"""Splits a graph that was captured in another mode like the graph that is trained; refuses changes of mode otherwise.

Each stage gets the nodes that read its weights, and a node without weights is in the first stage that has its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.split import Split, plan, split
from splitkit.errors import PipelineError
from splitkit.graph.dataflow import Dataflow, analyze, waits_for
from splitkit.graph.shards import MeshGroup, local_tensor, mesh_groups
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.devices.accelerators import replace_tensors, tables_of
from splitkit.runtime.ranks.planned_chain import captured_model
from splitkit.runtime.ranks.planned_stage import PlannedStage, graphs_of
from splitkit.runtime.ranks.stage_chain import StageSource
from splitkit.runtime.ranks.step_agreement import form_of

_REMEDY = "Capture the same model: evaluation = pipe.evaluation(sk.capture(model.eval(), **inputs_of_one_microbatch))."


def split_like(gm: fx.GraphModule, trained: StageSource) -> Split:
    """Split a graph so that each stage reads the parameters and buffers of the same stage of another split.

    Args:
        gm: a capture of the same model, for example in eval mode.
        trained: the stages that train.

    Raises:
        PipelineError: SK801 if a node reads weights of several stages, or of a stage before one of its inputs, or if a
            stage would get no nodes.
    """
    keys = tuple(trained.names)
    stages = _stages(gm, _stages_of_tensors(trained), len(keys))
    made = plan(gm, lambda node: keys[stages[node]])
    parts = {key: replace(part, replicas=trained.plan.parts[key].replicas) for key, part in made.parts.items()}
    found = split(gm, replace(made, parts=parts))
    if tuple(found.names) != keys:
        lost = [str(key) for key in keys if key not in found.names]
        what = f"the stages {', '.join(lost)} would be empty" if lost else "the stages would run in another order"
        raise PipelineError("SK801", f"in this graph, {what}", _REMEDY)
    return found


def share_tensors(
    found: Split, tensors: Mapping[str, torch.Tensor], meshes: Mapping[MeshGroup, Any] = MappingProxyType({})
) -> None:
    """Replace the parameters and buffers of a split by a pipeline's, where it has them.

    Args:
        found: the split, which is changed.
        tensors: name in the unsplit model -> parameter or buffer.
        meshes: dimensions of meshes over which tensors were sharded before the capture, of which a graph reads pieces.

    Raises:
        PipelineError: SK801 for a tensor of another shape or dtype, or one that was sharded later.
    """
    replaced = dict[int, torch.Tensor]()
    for name, old in parameters_and_buffers(found.module).items():
        new = tensors.get(found.qualified_names.get(name, name))
        if new is None or new is old:
            continue
        if isinstance(new, DTensor):
            new = _piece(name, old, new, meshes)
        if new.shape != old.shape or new.dtype != old.dtype:
            looks = f"{form_of(old)}, and in the pipeline {form_of(new)}"
            raise PipelineError("SK801", f"{name} is {looks}", _REMEDY, [name])
        replaced[id(old)] = new
    replace_tensors(tables_of(found.module), replaced)


def _piece(name: str, old: torch.Tensor, new: DTensor, meshes: Mapping[MeshGroup, Any]) -> torch.Tensor:
    """Return this rank's piece of a tensor; raise SK801 if it was sharded after the capture, or another one is read."""
    piece = local_tensor(new.detach())
    if piece.shape != old.shape or not mesh_groups([new]).keys() <= meshes.keys():
        raise PipelineError("SK801", f"{name} is sharded", "Evaluate before shard(), or without it.", [name])
    return nn.Parameter(piece, requires_grad=False) if isinstance(new, nn.Parameter) else piece


def _stages_of_tensors(trained: StageSource) -> dict[str, set[int]]:
    """Return name in the unsplit model -> the stages that have the tensor."""
    stage_of = {child: stage for stage, child in enumerate(trained.names.values())}
    stages: dict[int, set[int]] = {}
    model = captured_model(trained)
    assert model is not None, "stages of a folder are refused before"
    tensors = parameters_and_buffers(model)
    for name in parameters_and_buffers(trained.module):
        child, original = name.split(".")[0], trained.qualified_names.get(name, name)
        if child in stage_of and original in tensors:
            stages.setdefault(id(tensors[original]), set()).add(stage_of[child])
    return {name: stages[id(tensor)] for name, tensor in tensors.items() if id(tensor) in stages}


def _stages(gm: fx.GraphModule, homes: Mapping[str, set[int]], count: int) -> dict[Node, int]:
    """Return node -> its stage."""
    flow, found = analyze(gm), dict[Node, int]()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        before = (*node.all_input_nodes, *waits_for(flow, node))
        least = max((found[n] for n in before if n in found), default=0)
        read = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
        allowed = [homes[name] for name in read if name in homes]
        able = {stage for stage in set[int].intersection(*allowed) if stage >= least} if allowed else {least}
        if not able:
            raise PipelineError(
                "SK801",
                f"{node.name} reads {', '.join(read)}, and no stage from {least} on has them",
                _REMEDY,
                [node],
            )
        found[node] = min(able)
    _fill(flow, found, homes, count)
    return found


def _fill(flow: Dataflow, found: dict[Node, int], homes: Mapping[str, set[int]], count: int) -> None:
    """Move a node into each stage that has none, if the weights that it reads, its inputs and its readers allow it.

    A stage with weights of its own, which this graph does not read, stays empty: the graph is of another model.
    """
    after: dict[Node, list[Node]] = {node: [] for node in flow.nodes}
    for node in flow.nodes:
        for before in flow.waits[node]:
            after[before].append(node)
    read = {n: [homes[str(r.target)] for r in n.all_input_nodes if str(r.target) in homes] for n in flow.nodes}
    own = {stage for allowed in homes.values() if len(allowed) == 1 for stage in allowed}
    for stage in sorted({*range(count)} - {found[node] for node in flow.nodes} - own, reverse=True):
        free = [n for n in flow.nodes if all(stage in allowed for allowed in read[n])]
        late = [n for n in reversed(free) if found[n] < stage and all(found[r] >= stage for r in after[n])]
        early = [n for n in free if found[n] > stage and all(found[r] <= stage for r in flow.waits[n])]
        for node in (*late, *early):
            # its place among the stages follows from what it reads, and from what reads it
            if any(found[r] < stage for r in flow.waits[node]) and (after[node] or stage == count - 1):
                found |= dict.fromkeys([node, *(n for n, maker in flow.followers.items() if maker is node)], stage)
                break


# Refuses changes to stages that would not do what they do to a model, because the capture has fixed it.


def autocasts_of(parts: Sequence[nn.Module]) -> frozenset[tuple[str, torch.dtype]]:
    """Return the types of devices and the dtypes of the autocasts that parts enter."""
    nodes = (node for part in parts for gm in graphs_of(part) for node in gm.graph.nodes)
    regions = [node for node in nodes if node.target is _torch.ENTER_AUTOCAST]
    entered: Any = (node.args[:2] for node in regions if node.args[2:3] != (False,))
    return frozenset(entered)


def require_gradients(is_forward_alone: bool) -> None:
    """Refuse a step where gradients are off, or of the forward of a sharded model.

    Raises:
        PipelineError: SK802.
    """
    if is_forward_alone:
        raise PipelineError(
            "SK802",
            "the graph is one rank's forward of a sharded model, which has no gradients",
            "Capture its training step: splitkit.capture(model, ..., training=True).",
        )
    if not torch.is_grad_enabled():
        raise PipelineError(
            "SK802",
            "gradients are off, and a step runs backward",
            "Call step outside torch.no_grad() and torch.inference_mode(); forward alone is Pipeline.infer.",
        )


class FixedAtCapture:
    """The modes of the parts of a rank, and which of its parameters train, when the pipeline was made."""

    def __init__(self, parts: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter]) -> None:
        # Modules that a graph calls, as after symbolic_trace, follow their own mode.
        calling = {part for part in parts for gm in graphs_of(part) if gm.graph.find_nodes(op="call_module")}
        self._modes = [(part, part.training) for part in parts if part not in calling]
        self._flags = {name: parameter.requires_grad for name, parameter in parameters.items()}

        self._autocasts = autocasts_of(parts)
        self._planned = any(isinstance(part, PlannedStage) for part in parts)

    def require_autocast(self, device: torch.device) -> None:
        """Refuse an autocast around a call, unless it was around the capture too.

        Inside it, stages would compute other dtypes than the graph says cross the borders.

        Raises:
            PipelineError: SK802.
        """
        if not torch.is_autocast_enabled(device.type):
            return
        dtype = torch.get_autocast_dtype(device.type)
        if (device.type, dtype) not in self._autocasts:
            name = str(dtype).removeprefix("torch.")
            reason = f"autocast to {name} is active around the call, but was not active around the capture"
            remedy = f"Call capture inside torch.autocast(..., {dtype}); the call needs no autocast then."
            if self._planned:
                remedy = f"Enter torch.autocast(..., {dtype}) in the model's forward, and not around the call."
            raise PipelineError("SK802", reason, remedy)

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
