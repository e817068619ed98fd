"""Sums the gradients of parameters of which several ranks have a copy.

Stages on several ranks may read the same parameter, and each replica has all parameters of its stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from splitkit.runtime.ranks.replicas import Replicas, subgroup
from splitkit.runtime.ranks.stage_chain import Chain

BUCKET = 25 * 2**20
"""Bytes of gradients in one all-reduce of replicas: the default of torch's DDP (25 MiB), not tuned here."""


def owners_of_shared(chain: Chain) -> list[dict[str, int]]:
    """Return for each parameter that several stages read: its name in the split -> the stage that reads it by it."""
    split = chain.split
    stage_of = {split.names[key]: stage for stage, key in enumerate(chain.keys)}
    groups = [[(name, name.split(".")[0]) for name in names] for names in split.shared]
    return [{name: stage_of[child] for name, child in group if child in stage_of} for group in groups]


class SharedParameters:
    """The parameters that this rank shares with other ranks.

    Stages of one rank share the parameter object, so that autograd sums their gradients.

    Attributes:
        tied: the parameters that this rank shares with stages on other ranks.
    """

    def __init__(
        self,
        chain: Chain,
        rank_of: Sequence[int],
        replicas: Replicas,
        group: dist.ProcessGroup | None,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        split = chain.split
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        elsewhere: set[int] = set()
        for owners in owners_of_shared(chain):
            places = tuple(sorted({rank_of[stage] for stage in owners.values()}))
            if len(places) < 2:
                continue
            if places not in groups:
                groups[places] = subgroup(group, [rank for place in places for rank in replicas.ranks[place]])
            if replicas.place in places:
                name = next(name for name, stage in owners.items() if rank_of[stage] == replicas.place)
                self._shared.append((split.module.get_parameter(name), groups[places]))
                if replicas.place != places[0]:
                    elsewhere.add(id(self._shared[-1][0]))
        self.tied = tuple(parameter for parameter, _ in self._shared)
        shared = {id(parameter) for parameter in self.tied}
        self._counted_elsewhere, self._is_first = frozenset(elsewhere), replicas.own == 0
        self._across = replicas.replica_group
        self._replicated = [p for p in parameters if id(p) not in shared] if self._across is not None else []

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether a sum over all parameters of the model takes this one from this rank: one copy, or every shard."""
        if isinstance(parameter, DTensor):
            return True
        return self._is_first and id(parameter) not in self._counted_elsewhere

    @contextmanager
    def added_up(self) -> Iterator[None]:
        """Wrap a step: what it adds to the gradient of one copy is added to the gradients of all copies."""
        held = [*(parameter for parameter, _ in self._shared), *self._replicated]
        before = [parameter.grad for parameter in held]
        for parameter in held:
            parameter.grad = None
        try:
            yield
            for parameter, group in self._shared:
                if parameter.requires_grad:
                    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    # Gloo sums memory element by element, and strides may differ between ranks.
                    parameter.grad = found.contiguous()
                    dist.all_reduce(parameter.grad, group=group)
            _add_up([p for p in self._replicated if p.grad is not None], self._across)
        finally:
            for parameter, grad in zip(held, before, strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def _add_up(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """All-reduce gradients over a group whose ranks have the same parameters in the same order."""
    for bucket in _buckets(parameters):
        flat = torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None])
        dist.all_reduce(flat, group=group)
        for parameter, total in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
            parameter.grad = total.view_as(parameter)  # the old gradient may be expanded, or alias another


def _buckets(tensors: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield runs of consecutive tensors of one dtype with at most `BUCKET` bytes, or a single larger tensor."""
    bucket: list[nn.Parameter] = []
    held = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or held + tensor.nbytes > BUCKET):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    if bucket:
        yield bucket
