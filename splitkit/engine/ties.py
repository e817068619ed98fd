"""Parameters and buffers that several modules share stay one where ``nn.Module`` would make them several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from splitkit._torch import attributes_of

Table = dict[str, Any]  # the parameters or the buffers of one module
Tie = list[tuple[Table, str, str]]  # the places of one tensor: table, key, and name seen from the whole


def ties_of(module: nn.Module, recurse: bool = True, every_name: bool = False) -> list[Tie]:
    """The tensors that stand in several places of a module and its children, each with its places.

    Args:
        module: where to look.
        recurse: in its children too.
        every_name: a child that is there under two names counts twice.
    """
    found: dict[int, Tie] = {}
    modules = module.named_modules(remove_duplicate=not every_name) if recurse else [("", module)]
    for path, owner in modules:
        held = attributes_of(owner)
        for table in (held.parameters, held.buffers):  # which torch replaces one by one
            for key, tensor in table.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((table, key, f"{path}.{key}".lstrip(".")))
    return [places for places in found.values() if len(places) > 1]


class Tied(nn.Module):
    """A module in which a tensor that is shared is converted, materialized and loaded once, for all its places.

    ``to_empty()`` of a module on ``meta`` and ``load_state_dict(assign=True)`` make a new Parameter in each module that
    holds one; a whole model that uses its weight twice holds it once, but its parts hold it each.
    """

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:  # 2.11, 2.13, 2.15
        ties = ties_of(self, recurse)
        for _, *others in ties:
            for table, key, _name in others:
                table[key] = None  # passed over
        try:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for (table, key, _name), *others in ties:
                for other, name, _ in others:
                    other[name] = table[key]

    def _load_from_state_dict(  # 2.11, 2.13, 2.15
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            for tie in ties_of(self, every_name=True):
                names = [prefix + name for _, _, name in tie]
                missing_keys += _give_all_the_same(state_dict, names, tie[0][0][tie[0][1]])
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _give_all_the_same(state_dict: dict[str, Any], names: list[str], now: torch.Tensor | None) -> Iterable[str]:
    """Let every name of one tensor mean the same new one, the last that is given; the names that were not there."""
    given = [name for name in names if name in state_dict]
    if not given:
        return ()
    new = state_dict[given[-1]]
    if isinstance(now, nn.Parameter) and isinstance(new, torch.Tensor) and not isinstance(new, nn.Parameter):
        new = nn.Parameter(new, requires_grad=now.requires_grad)
    state_dict.update(dict.fromkeys(names, new))
    return [name for name in names if name not in given]
