"""Compares the optimizers of the ranks: the options of their parameter groups, and how many steps they have made.

Ranks have other parameters and may have other groups, so that an option may differ for good reasons. It must be the
same

- for a parameter that several ranks have;
- for groups that have the same ``name``;
- for groups without a name that took it from the optimizer's defaults, unless such groups differ on one rank already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from splitkit.errors import PipelineError
from splitkit.runtime.ranks.rank_agreement import differs, from_every

_REMEDY = (
    "Use the same options on every rank. A parameter group that is to differ needs a name of its own: "
    '{"params": pipe.parameters(), "lr": 0.01, "name": "last stage"}.'
)
_NO_OPTIONS = ("params", "param_names", "name")


@dataclass(frozen=True)
class OptimizerFacts:
    """What other ranks must know of an optimizer.

    Attributes:
        steps: how many steps it has made since it was compared first; ``None`` if that cannot be counted.
        names: the name of each group; ``None`` for a group without one.
        options: the options of each group: name -> value as text.
        defaults: for each group, the options that it took from the optimizer's defaults.
        group_of: name of a parameter -> the number of its group.
    """

    steps: int | None
    names: Sequence[str | None]
    options: Sequence[Mapping[str, str]]
    defaults: Sequence[frozenset[str]]
    group_of: Mapping[str, int]


class ComparedOptimizer:
    """An optimizer of one rank, from before its first step on.

    Args:
        optimizer: the optimizer.
    """

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
        groups = self.optimizer.param_groups
        of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
        return OptimizerFacts(
            self._steps,
            [group.get("name") for group in groups],
            [_options(group) for group in groups],
            [*self._defaults, *[frozenset[str]()] * (len(groups) - len(self._defaults))],
            {name: of[id(parameter)] for name, parameter in named.items() if id(parameter) in of},
        )

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
    steps = {rank: facts.steps for rank, facts in held.items()}
    if None not in steps.values() and (reason := differs(steps, "the optimizer has made {} steps on {}, and {} on {}")):
        raise PipelineError("SK804", reason, "Call optimizer.step() on every rank after each step of the pipeline.")
    values: dict[str, dict[int, str]] = {}
    for rank, facts in held.items():
        for what, value in _compared(facts):
            of = values.setdefault(what, {})
            of[rank] = value if of.get(rank, value) == value else ""
    for what, of in values.items():
        reason = differs(of, f"the optimizer's {what} is {{}} on {{}}, and {{}} on {{}}")
        if reason and "" not in of.values():
            raise PipelineError("SK804", reason, _REMEDY)


def _compared(facts: OptimizerFacts) -> Iterator[tuple[str, str]]:
    """Yield the options of a rank, each with the text under which ranks compare it."""
    for name, options, defaults in zip(facts.names, facts.options, facts.defaults, strict=True):
        for option, value in options.items():
            if name is not None:
                yield f"{option} for the group {name!r}", value
            elif option in defaults:
                yield option, value
    for parameter, number in facts.group_of.items():
        for option, value in facts.options[number].items():
            yield f"{option} for {parameter}", value


def _options(group: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _text(value) for name, value in group.items() if name not in _NO_OPTIONS}
    return {name: text for name, text in found.items() if text}


def _from_defaults(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> frozenset[str]:
    """Return the options that have the optimizer's defaults, as far as no scheduler has changed them."""
    return frozenset(
        name
        for name, value in defaults.items()
        if name in group and _text(group.get(f"initial_{name}", group[name])) == _text(value)
    )


def _text(value: Any) -> str:
    """Return a text that is the same for equal options; empty for what is no plain data."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, bool | str | None):
        return repr(value)
    return f"{float(value):.15g}" if isinstance(value, Real) else ""
