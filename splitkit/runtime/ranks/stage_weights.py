"""Weights of stages on ranks: sharded over the replicas of a stage (torch's FSDP2), and compared between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from splitkit import _torch
from splitkit.errors import PipelineError
from splitkit.graph.shards import PIECES, is_sharded, is_sharded_over
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.ranks.planned_chain import captured_model
from splitkit.runtime.ranks.rank_agreement import differs, from_every, ranks_text
from splitkit.runtime.ranks.replicas import Replicas
from splitkit.runtime.ranks.stage_chain import Chain
from splitkit.runtime.ranks.step_agreement import digest_of_tensors, form_of


def sum_shards(modules: Sequence[nn.Module], replicas: Replicas, tied: Sequence[nn.Parameter]) -> None:
    """Make FSDP2 sum gradients, as replicas do; by default it takes their mean.

    Args:
        modules: the parts of this rank.
        replicas: which ranks run the same stages.
        tied: the parameters, before sharding, that several stages have, on this rank or on others.

    Raises:
        PipelineError: SK801 if a parameter is sharded over other ranks than the replicas of its stage, or if a tied one
            is sharded.
    """
    sharded = [each for part in modules for each in part.modules() if isinstance(each, FSDPModule)]
    if not sharded:
        return
    own = replicas.replica_group
    across = [dist.get_rank()] if own is None else dist.get_process_group_ranks(own)
    left_whole = {id(parameter) for parameter in tied}
    for name, parameter in (pair for part in modules for pair in part.named_parameters()):
        if isinstance(parameter, DTensor) and not (id(parameter) in left_whole or is_sharded_over(parameter, across)):
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
            f"a parameter {list(lost[0].shape)} is sharded, and another stage has it, too",
            "Use Pipeline.shard(), which leaves it whole, or put all nodes that read it into one stage.",
        )
    for each in sharded:
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # Gloo has only sum


def reshard(modules: Iterable[nn.Module]) -> None:
    """Free the whole parameters that FSDP2 keeps after a forward without backward: gradients belong to the shards."""
    for each in (each for part in modules for each in part.modules()):
        if isinstance(each, FSDPModule):
            each.reshard()


def shard_like(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the part of the whole tensor ``source`` that belongs in ``tensor``: its shard, if it is sharded."""
    if not isinstance(tensor, DTensor) or isinstance(source, DTensor):
        return source
    return distribute_tensor(source.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)


# Compares the parameters and buffers of the ranks before they train, and at checkpoints and evaluations.
#
# Nothing is overwritten: no rank can know which of two copies is the right one.


_BUILT = (
    "Build the same model on every rank: call torch.manual_seed with one seed before you make it, or load the same "
    "weights before you capture it. Weights of single stages can be loaded later: Pipeline.load_state_dict."
)
LOADED = (
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
    without: Collection[str] = (),
) -> None:
    """Refuse ranks that hold different models. All ranks must call it, before the stages train.

    Each rank compares the tensors of its own stages with the same tensors on rank 0, which usually holds the whole
    model, and on other ranks that hold them too. Tensors on ``meta`` do not count.

    Args:
        chain: the stages.
        stages: the stages of this rank.
        group: the ranks.
        also: name -> further tensors that this rank has; they are the same on all ranks that have the name.
        without: the names of tensors that are not compared.

    Raises:
        PipelineError: SK804 on every rank; names the first tensor that differs, and the ranks.
    """
    own = range(chain.stages) if dist.get_rank(group) == 0 else stages
    held = _by_one_name(chain, {**(also or {}), **tensors_of_stages(chain, own)})
    require_same_tensors({name: tensor for name, tensor in held.items() if name not in without}, group, _BUILT)


def require_same_beside(chain: Chain, stages: Iterable[int], group: dist.ProcessGroup) -> None:
    """Refuse different copies of what the ranks along a dimension of a mesh do not share out among them.

    Raises:
        PipelineError: SK804 on every rank of the group; names the first tensor that differs, and the ranks.
    """
    pieces: Collection[str] = getattr(captured_model(chain.split), "meta", {}).get(PIECES, ())
    held = _by_one_name(chain, tensors_of_stages(chain, stages))
    same = {name: tensor for name, tensor in held.items() if not (is_sharded(tensor) or name in pieces)}
    require_same_tensors(same, group, _BUILT)


class OtherTensors:
    """The tensors that this rank has, but that only stages of other ranks train.

    If something writes one, such as the optimizer of another pipeline of the same weights, those stages miss it.
    """

    def __init__(self, chain: Chain, stages: Iterable[int]) -> None:
        known = {id(t) for t in tensors_of_stages(chain, stages).values()}
        every = tensors_of_stages(chain, range(chain.stages))
        self._versions = {name: (t, _torch.version_of(t)) for name, t in every.items() if id(t) not in known}

    def written(self) -> dict[str, torch.Tensor]:
        """Return the weights that were written since `settle`, by name."""
        return {name: t for name, (t, before) in self._versions.items() if _torch.version_of(t) != before}

    def settle(self) -> None:
        """Take them as they are now."""
        self._versions = {name: (t, _torch.version_of(t)) for name, (t, _) in self._versions.items()}


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


def require_same_tensors(held: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, remedy: str) -> None:
    """Refuse different copies of a tensor, by names that are the same on all ranks. All ranks must call it.

    Raises:
        PipelineError: SK804 as in `require_same_model`.
    """
    holders = Counter(name for names in from_every(list(held), group) for name in names)
    shown = {name: f"{form_of(t)}{' with gradient' if t.requires_grad else ''}" for name, t in held.items()}
    own = {name: (shown[name], digest_of_tensors([t])) for name, t in held.items() if holders[name] > 1}
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


# Compares the optimizers of the ranks: the options of their parameter groups, and how many steps they have made.
#
# Ranks have other parameters and may have other groups, so that an option may differ for good reasons. It must be the
# same
#
# - for a parameter that several ranks have;
# - for groups that have the same ``name``;
# - for groups without a name that took it from the optimizer's defaults, unless such groups differ on one rank already.


_REMEDY = (
    "Use the same options on every rank. A parameter group that is to differ needs a name of its own: "
    '{"params": pipe.parameters(), "lr": 0.01, "name": "last stage"}.'
)
_NO_OPTIONS = ("params", "param_names", "name")
_SEVERAL = ""  # the value of an option that differs on one rank already

OptimizerFacts = tuple[int | None, dict[str, dict[str, str]]]
"""The steps of an optimizer, and of whom -> option -> value as text; the defaults are of nobody: ``""``."""


class ComparedOptimizer:
    """An optimizer of one rank, from before its first step on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        defaults = getattr(optimizer, "defaults", {})
        self._defaults = [_from_defaults(group, defaults) for group in optimizer.param_groups]
        self._steps: int | None = 0
        try:
            optimizer.register_step_post_hook(self._count)
        except AttributeError:  # of a wrapper such as accelerate's, which takes no hooks
            self._steps = None

    def facts(self, named: Mapping[str, torch.Tensor]) -> OptimizerFacts:
        """Return what other ranks must know.

        Args:
            named: name -> parameter.
        """
        found: dict[str, dict[str, str]] = {}
        of: dict[int, dict[str, str]] = {}
        groups = self.optimizer.param_groups
        added = [set[str]()] * (len(groups) - len(self._defaults))
        for group, defaults in zip(groups, self._defaults + added, strict=False):
            options = _options(group)
            of |= {id(parameter): options for parameter in group["params"]}
            name = group.get("name")
            held = found.setdefault("" if name is None else f" for the group {name!r}", {})
            for option, value in options.items():
                if name is not None or option in defaults:
                    held[option] = value if held.get(option, value) == value else _SEVERAL
        return self._steps, found | {f" for {name}": of[id(p)] for name, p in named.items() if id(p) in of}

    def _count(self, *_: object) -> None:
        # a compiled step would be compiled again for each number
        if self._steps is not None and not torch.compiler.is_compiling():
            self._steps += 1


def require_same_optimizers(own: OptimizerFacts | None, group: dist.ProcessGroup | None) -> None:
    """Refuse optimizers that differ. All ranks must call it; nothing is compared unless all have an optimizer.

    Raises:
        PipelineError: SK804 on every rank; names the ranks, and the option.
    """
    every: list[OptimizerFacts | None] = from_every(own, group)
    held = {rank: facts for rank, facts in enumerate(every) if facts is not None}
    if len(held) < len(every):
        return
    steps = {rank: count for rank, (count, _) in held.items() if count is not None}
    if reason := differs(steps, "the optimizer has made {} steps on {}, and {} on {}") if steps else "":
        raise PipelineError("SK804", reason, "Call optimizer.step() on every rank after each step of the pipeline.")
    values: dict[str, dict[int, str]] = {}
    for rank, (_, found) in held.items():
        for whose, options in found.items():
            for option, value in options.items():
                values.setdefault(option + whose, {})[rank] = value
    for what, of in values.items():
        reason = differs(of, f"the optimizer's {what} is {{}} on {{}}, and {{}} on {{}}")
        if reason and _SEVERAL not in of.values():
            raise PipelineError("SK804", reason, _REMEDY)


def _options(group: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _text(value) for name, value in group.items() if name not in _NO_OPTIONS}
    return {name: text for name, text in found.items() if text}


def _from_defaults(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Return the options that have the optimizer's defaults, as far as no scheduler has changed them."""
    options = _options({name: group.get(f"initial_{name}", group.get(name)) for name in defaults})
    return {name for name, text in _options(defaults).items() if options.get(name) == text}


def _text(value: Any) -> str:
    """Return a text that is the same for equal options; empty for what is no plain data."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, bool | str | None):
        return repr(value)
    return f"{float(value):.15g}" if isinstance(value, Real) else ""
