"""Sets on all ranks which parameters train, and finds out anew which values at borders have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.ranks.stage_chain import Chain, chain_of


def set_trained(
    split: Split,
    own: Mapping[str, nn.Parameter],
    trains: Callable[[str], bool],
    group: dist.ProcessGroup | None,
) -> Chain:
    """Set ``requires_grad`` of the parameters of the whole model. All ranks must call it.

    Args:
        split: the split, whose graph has all parameters.
        own: the parameters of this rank by their names in the graph that was split.
        trains: called with the names of a parameter; it trains if the result is true for one of them.
        group: the ranks.

    Returns:
        The chain of the stages, with what now has a gradient at the borders.

    Raises:
        PipelineError: SK804 on every rank if the ranks choose different parameters; SK801 for sharded parameters.
    """
    whole = {n: t for n, t in parameters_and_buffers(split.flow.root).items() if isinstance(t, nn.Parameter)}
    named: dict[int, list[str]] = {}
    for name, parameter in whole.items():
        named.setdefault(id(parameter), []).append(name)
    chosen = {name: any(map(trains, named[id(parameter)])) for name, parameter in whole.items()}
    every: list[dict[str, bool]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(every, chosen, group=group)
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
    for name, parameter in (*whole.items(), *own.items()):
        if name in chosen and (parameter.is_floating_point() or parameter.is_complex()):
            parameter.requires_grad_(chosen[name])
            # A gradient of earlier steps would otherwise be applied again in each step of the optimizer.
            parameter.grad = parameter.grad if chosen[name] else None
    return chain_of(split)
