"""Parameters that several stages read: each rank has a copy, and all get the sum of their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from splitkit.runtime.chain import Chain


class Ties:
    """The parameters that stages of several ranks read.

    On one rank the copies are one object, and autograd adds up what its stages find.
    """

    def __init__(self, chain: Chain, rank_of: Sequence[int], group: dist.ProcessGroup | None) -> None:
        split = chain.split
        stage_of = {split.names[key]: stage for stage, key in enumerate(chain.keys)}
        me = dist.get_rank(group)
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for names in split.shared:
            owners = {name: stage_of[child] for name in names if (child := name.split(".")[0]) in stage_of}
            ranks = tuple(sorted({rank_of[stage] for stage in owners.values()}))
            if len(ranks) < 2:
                continue
            if ranks not in groups:  # made by all ranks in one order, as torch asks
                groups[ranks] = dist.new_group([_global(group, r) for r in ranks])
            if me in ranks:
                name = next(name for name, stage in owners.items() if rank_of[stage] == me)
                self._shared.append((split.module.get_parameter(name), groups[ranks]))

    @contextmanager
    def added_up(self) -> Iterator[None]:
        """Around a step: what it adds to the gradient of one copy is added to all."""
        before = [parameter.grad for parameter, _ in self._shared]
        for parameter, _ in self._shared:
            parameter.grad = None
        try:
            yield
            for parameter, group in self._shared:
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(parameter.grad, group=group)
        finally:
            for (parameter, _), grad in zip(self._shared, before, strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def _global(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
