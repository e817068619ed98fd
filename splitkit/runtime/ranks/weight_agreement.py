"""Compares the parameters and buffers of the ranks before they train, and at checkpoints and evaluations.

Nothing is overwritten: no rank can know which of two copies is the right one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from splitkit import _torch
from splitkit.errors import PipelineError
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.ranks.digests import digest_of_tensors, form_of
from splitkit.runtime.ranks.rank_agreement import differs, from_every, ranks_text
from splitkit.runtime.ranks.stage_chain import Chain

_BUILT = (
    "Build the same model on every rank: call torch.manual_seed with one seed before you make it, or load the same "
    "weights before you capture it. Weights of single stages can be loaded later: Pipeline.load_state_dict."
)
_LOADED = (
    "Load the same weights on every rank: Pipeline.load_state_dict with one state dict. While they train, change them "
    "on every rank in the same way. If another pipeline trains the same weights, plan both so that each weight is on "
    "the same rank."
)


def tensors_of_stages(chain: Chain, stages: Iterable[int]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of stages that this process has, by their names in the graph that was split."""
    split, found = chain.split, dict[str, torch.Tensor]()
    children = dict(split.module.named_children())
    for stage in stages:
        child = split.names[chain.keys[stage]]
        held = parameters_and_buffers(children[child]) if child in children else {}
        own = {f"{child}.{name}": t for name, t in held.items()} | chain.own(stage)
        found |= {split.qualified_names.get(name, name): t for name, t in own.items()}
    return found


def require_same_model(
    chain: Chain,
    stages: Iterable[int],
    group: dist.ProcessGroup | None,
    also: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Refuse ranks that hold different models. All ranks must call it, before the stages train.

    Each rank compares the tensors of its own stages with the same tensors on rank 0, which usually holds the whole
    model, and on other ranks that hold them too. Tensors on ``meta`` do not count.

    Args:
        chain: the stages.
        stages: the stages of this rank.
        group: the ranks.
        also: name -> further tensors that this rank has; they are the same on all ranks that have the name.

    Raises:
        PipelineError: SK804 on every rank; names the first tensor that differs, and the ranks.
    """
    own = range(chain.stages) if dist.get_rank(group) == 0 else stages
    _require_same(_by_one_name(chain, {**(also or {}), **tensors_of_stages(chain, own)}), group, _BUILT)


class OtherTensors:
    """The tensors that this rank has, but that only stages of other ranks train.

    If something writes one, such as the optimizer of another pipeline of the same weights, those stages miss it.
    """

    def __init__(self, every: Mapping[str, torch.Tensor], own: Iterable[torch.Tensor]) -> None:
        known = {id(t) for t in own}
        self._versions = {name: (t, _torch.version_of(t)) for name, t in every.items() if id(t) not in known}

    @classmethod
    def of(cls, chain: Chain, stages: Iterable[int]) -> OtherTensors:
        """Return the weights of a rank that runs these stages."""
        return cls(tensors_of_stages(chain, range(chain.stages)), tensors_of_stages(chain, stages).values())

    def written(self) -> dict[str, torch.Tensor]:
        """Return the weights that were written since `settle`, by name."""
        return {name: t for name, (t, before) in self._versions.items() if _torch.version_of(t) != before}

    def settle(self) -> None:
        """Take them as they are now."""
        self._versions = {name: (t, _torch.version_of(t)) for name, (t, _) in self._versions.items()}


def require_same_copies(
    held: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, others: OtherTensors
) -> None:
    """Refuse different copies of a tensor that the stages of several ranks have. All ranks must call it.

    Args:
        held: the tensors of this rank's stages, and others that were written, by names that are the same on all ranks.
        group: the ranks.
        others: is taken as it is now if nothing differs.

    Raises:
        PipelineError: SK804 as in `require_same_model`.
    """
    _require_same(held, group, _LOADED)
    others.settle()


def copies(chain: Chain, stages: Iterable[int], others: OtherTensors | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of stages of which other ranks may have copies, by names that are the same on all ranks.

    Shards of FSDP2 are not copies, and do not count. Of ``others``, the written ones are among them.
    """
    return _by_one_name(chain, {**(others.written() if others else {}), **tensors_of_stages(chain, stages)})


def _by_one_name(chain: Chain, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors whose elements can be compared; a parameter with several names has the same name on all ranks."""
    split = chain.split
    groups = [[split.qualified_names.get(name, name) for name in names] for names in split.shared]
    first = {name: names[0] for names in groups for name in names}
    return {
        first.get(name, name): tensor
        for name, tensor in held.items()
        if not tensor.is_meta and not isinstance(tensor, DTensor)
    }


def _require_same(held: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, remedy: str) -> None:
    holders = Counter(name for names in from_every(list(held), group) for name in names)
    own = {name: (_form(t), digest_of_tensors([t])) for name, t in held.items() if holders[name] > 1}
    every = from_every(own, group)
    names = dict.fromkeys(name for digests in every for name in digests)
    found = {name: {rank: digests[name] for rank, digests in enumerate(every) if name in digests} for name in names}
    different = [name for name, of in found.items() if len(set(of.values())) > 1]
    if not different:
        return
    name = different[0]
    reason = differs(
        {rank: form for rank, (form, _) in found[name].items()}, f"{name} is {{}} on {{}}, and {{}} on {{}}"
    )
    reason = reason or differs(found[name], f"{name} has other values on {{1}} than on {{3}}")
    if len(different) > 1:
        where = {rank for n in different for rank, of in found[n].items() if of != next(iter(found[n].values()))}
        reason += f"; {len(different)} of {len(names)} tensors differ, on {ranks_text(sorted(where))}"
    raise PipelineError("SK804", reason, remedy, different)


def _form(tensor: torch.Tensor) -> str:
    return f"{form_of(tensor)}{' with gradient' if tensor.requires_grad else ''}"
