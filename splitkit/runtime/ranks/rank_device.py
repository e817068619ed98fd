"""Chooses the device of a rank, and puts the stages of the rank on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import fx, nn

from splitkit import _torch
from splitkit.errors import PipelineError
from splitkit.graph.shards import is_sharded, sharded_over
from splitkit.graph.storages import attribute
from splitkit.runtime.devices.accelerators import accelerator_type, move_tensors, with_index
from splitkit.runtime.devices.device_map import follow_device, follows
from splitkit.runtime.ranks.planned_stage import PlannedStage, graphs_of
from splitkit.runtime.ranks.stage_chain import Chain


def device_of_rank(device: torch.device | str | None, group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of this rank, with an index unless it is the CPU.

    Args:
        device: the device that the user gave, if any.
        group: the ranks. By default the device is the current accelerator if the group has a backend for it that is
            not the CPU's, as in ``nccl`` or ``cpu:gloo,cuda:nccl``; otherwise the CPU.
    """
    if device is not None:
        found = torch.device(device)
        return found if found.type == "cpu" else with_index(found)
    kind = accelerator_type()
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    own = backends.get(kind)
    return torch.device("cpu") if own is None or own == backends.get("cpu") else with_index(kind)


def backend_of_rank(local_rank: int) -> str:
    """Make the rank's accelerator the current one, and return torch's backend for it; ``gloo`` if there is none.

    Args:
        local_rank: the number of this process on its machine. If there are more processes than devices, they share.
    """
    kind = accelerator_type()
    try:
        backend = dist.get_default_backend_for_device(kind) if kind else "gloo"
    except ValueError:  # torch has no communication for it
        return "gloo"
    if kind:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return backend


def require_meshes_of(device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
    """Raise SK801 for tensors that are sharded over a mesh of another type of device, on which their gradients are."""
    for tensor in tensors:
        if is_sharded(tensor) and (kind := sharded_over(tensor)) != device.type:
            raise PipelineError(
                "SK801",
                f"the model is sharded over a mesh of {kind}, and this rank's device is {device}",
                f"Give pipeline(..., device={kind!r}); or capture on a mesh of the ranks' devices: init_device_mesh.",
            )


def place_stages(chain: Chain, stages: Sequence[int], device: torch.device) -> None:
    """Move the tensors of stages to a device, and make devices that capture hard-coded follow.

    All parts at hand get the same new code, whichever stages are moved, so that ranks go on to agree on it. It names
    the device without an index: stages run with their device as the current one. A constant on another type of device
    than the graph was captured on, such as a number on the CPU in a model that was captured on ``cuda``, stays there.

    Raises:
        PipelineError: SK801 for an autocast that has no effect where the graph was captured, but has one on the device,
            and for an op that the capture of a joint graph chose for another type of device, and this one lacks; SK807
            for a tensor without data.
    """
    split, type_only = chain.split, torch.device(device.type)
    planned = [graph for part in split.parts.values() if isinstance(part, PlannedStage) for graph in graphs_of(part)]
    for graph in planned:
        _require_kernels(graph, device.type)
    for graph in (split.module, *(graph for part in split.parts.values() for graph in graphs_of(part))):
        _require_effective_autocast(graph, device.type, chain.facts.captured)
        follow_device(graph, type_only, chain.facts.captured)
    parts = [split.parts[chain.keys[stage]] for stage in stages]
    held: list[object] = [value for stage in stages for value in chain.own(stage).values()]
    for part in parts:
        held += [*part.parameters(), *part.buffers()]
    graphs = [graph for part in parts for graph in graphs_of(part)]
    # such as constants that are not buffers
    read = [attribute(g, str(node.target)) for g in graphs for node in g.graph.find_nodes(op="get_attr")]
    constants = [value for value in read if isinstance(value, torch.Tensor)]
    held += [t for t in constants if not planned or follows(t.device, chain.facts.captured)]
    try:
        there = {id(t): device for t in held if isinstance(t, torch.Tensor)}
        move_tensors(nn.ModuleList([split.module, *graphs]), nn.Module(), there)
    except PipelineError as error:
        if not planned:
            raise
        remedy = "Capture the model on the CPU or on an accelerator, with its weights."
        raise PipelineError(error.code, error.reason, remedy, error.nodes) from None


def _require_kernels(gm: fx.GraphModule, kind: str) -> None:
    """Refuse what a joint graph has chosen for its device, such as attention ``_for_cpu``."""
    for node in gm.graph.nodes:
        if not _torch.has_kernel(node.target, kind):
            raise PipelineError(
                "SK801",
                f"{node.name} calls {node.target}, which {kind} does not have: the capture chose it for its own device",
                f"Move the model and the inputs to {kind} before capture_joint.",
                [node],
            )


def _require_effective_autocast(gm: fx.GraphModule, kind: str, captured: frozenset[str]) -> None:
    for node in gm.graph.nodes:
        if node.target is not _torch.ENTER_AUTOCAST or node.args[2:3] == (False,):
            continue
        if node.args[0] == kind and kind not in captured:
            known = " and ".join(sorted(captured))
            raise PipelineError(
                "SK801",
                f"{node.name} enters autocast for {kind}, which did nothing in the capture, on {known}: the dtypes "
                "that cross borders are unknown",
                f"Capture inside torch.autocast({min(captured)!r}, ...), which follows the rank to {kind}; "
                f"or move the model to {kind} before the capture.",
                [node],
            )
