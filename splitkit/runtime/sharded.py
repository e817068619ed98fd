"""Parts whose parameters torch's FSDP2 shards over the replicas of their stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from splitkit.errors import PipelineError
from splitkit.runtime.replicas import Replicas


def shard(modules: Sequence[nn.Module], replicas: Replicas, tied: Sequence[nn.Parameter]) -> None:
    """Shard the parts of this rank over the replicas of their stage, tied parameters not: `Pipeline.shard`.

    Raises:
        PipelineError: SK801 where there is one pipeline, or stages have different numbers of replicas.
    """
    if replicas.mesh is None:
        what = (
            "there is one pipeline to shard over" if replicas.are_even else "stages have different numbers of replicas"
        )
        raise PipelineError("SK801", what, "Give all parts as many replicas: splitkit train --dp 2 --fsdp.")
    for part in modules:
        fully_shard(part, mesh=replicas.mesh["dp"], ignored_params=set(tied))


def sum_shards(modules: Sequence[nn.Module], replicas: Replicas, tied: Sequence[nn.Parameter]) -> None:
    """Let FSDP2 add up gradients, as replicas do: by itself it takes their mean.

    Args:
        modules: the parts of this rank.
        replicas: which ranks run the same stages.
        tied: the parameters of this rank of which stages on other ranks have a copy, as they were before.

    Raises:
        PipelineError: SK801 for shards over other ranks than the replicas of the stage, or of a tied parameter.
    """
    sharded = [each for part in modules for each in part.modules() if isinstance(each, FSDPModule)]
    if not sharded:
        return
    across = [dist.get_rank()] if replicas.across is None else dist.get_process_group_ranks(replicas.across)
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
            "Use Pipeline.shard(), which leaves it whole, or put all that reads it into one stage.",
        )
    for each in sharded:
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # gloo has no other


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded; all replicas call it, in one order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """What ``tensor`` may copy of a whole one: its shard, if it is one."""
    if not isinstance(tensor, DTensor) or isinstance(source, DTensor):
        return source
    return distribute_tensor(source.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
