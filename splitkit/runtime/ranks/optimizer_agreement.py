"""Compares the optimizers of the ranks: the options of their parameter groups, and how many steps they have made.

Ranks have other parameters and may have other groups, so that an option may differ for good reasons. It must be the
same

- for a parameter that several ranks have;
- for groups that have the same ``name``;
- for groups without a name that took it from the optimizer's defaults, unless such groups differ on one rank already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
