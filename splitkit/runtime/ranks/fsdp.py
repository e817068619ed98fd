"""Shards the parameters of parts over the replicas of their stage, with torch's FSDP2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from splitkit.errors import PipelineError
from splitkit.runtime.ranks.replicas import Replicas


def shard(modules: Sequence[nn.Module], replicas: Replicas, tied: Sequence[nn.Parameter]) -> None:
    """Shard the parts of this rank over the replicas of their stage, except tied parameters: `Pipeline.shard`.

    Raises:
        PipelineError: SK801 if there is only one pipeline.
    """
    if replicas.mesh is None:
        what = "there is one pipeline to shard over"
        raise PipelineError("SK801", what, "Give all parts several replicas: splitkit train --dp 2 --fsdp.")
    for part in modules:
        fully_shard(part, mesh=replicas.mesh["dp"], ignored_params=set(tied))


def sum_shards(modules: Sequence[nn.Module], replicas: Replicas, tied: Sequence[nn.Parameter]) -> None:
    """Make FSDP2 sum gradients, as replicas do; by default it takes their mean.

    Args:
        modules: the parts of this rank.
        replicas: which ranks run the same stages.
        tied: the parameters, before sharding, that this rank shares with stages on other ranks.

    Raises:
        PipelineError: SK801 if a parameter is sharded over other ranks than the replicas of its stage, or if a tied one
            is sharded.
    """
    sharded = [each for part in modules for each in part.modules() if isinstance(each, FSDPModule)]
    if not sharded:
        return
    across = (
        [dist.get_rank()] if replicas.replica_group is None else dist.get_process_group_ranks(replicas.replica_group)
    )
    for name, parameter in (pair for part in modules for pair in part.named_parameters()):
        if isinstance(parameter, DTensor) and sorted(parameter.device_mesh.mesh.flatten().tolist()) != sorted(across):
            raise PipelineError(
                "SK801",
                f"{name} is sharded over {parameter.device_mesh}, and its stage has replicas on the ranks {across}",
                'Use Pipeline.shard(), or fully_shard(part, mesh=pipe.replicas.mesh["dp"]).',
                [name],
            )
    held = {id(parameter) for part in modules for parameter in part.parameters()}
    if lost := [parameter for parameter in tied if id(parameter) not in held]:
        raise PipelineError(
            "SK801",
            f"a parameter {list(lost[0].shape)} is sharded, and stages on other ranks have a copy of it",
            "Use Pipeline.shard(), which leaves it whole, or put all nodes that read it into one stage.",
        )
    for each in sharded:
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # Gloo has only sum


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be sharded. All replicas must call it, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the part of the whole tensor ``source`` that belongs in ``tensor``: its shard, if it is sharded."""
    if not isinstance(tensor, DTensor) or isinstance(source, DTensor):
        return source
    return distribute_tensor(source.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
