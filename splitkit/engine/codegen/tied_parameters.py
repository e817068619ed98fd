"""Keep parameters and buffers shared between modules in operations where ``nn.Module`` would separate them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from splitkit._torch import attributes_of

Table = dict[str, Any]  # the parameters or the buffers of one module, by name
Tie = list[tuple[Table, str, str]]  # the places of one tensor: table, key, and qualified name


def ties_of(module: nn.Module, recurse: bool = True, every_name: bool = False) -> list[Tie]:
    """Return the places of each tensor that a module and its children hold in several places.

    Args:
        module: the module to search.
        recurse: search its children too.
        every_name: count a child that has two names twice.
    """
    found: dict[int, Tie] = {}
    modules = module.named_modules(remove_duplicate=not every_name) if recurse else [("", module)]
    for path, owner in modules:
        held = attributes_of(owner)
        for table in (held.parameters, held.buffers):  # torch replaces the entries one by one
            for key, tensor in table.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((table, key, f"{path}.{key}".lstrip(".")))
    return [places for places in found.values() if len(places) > 1]


class Tied(nn.Module):
    """A module that converts, materializes and loads a shared tensor once, for all of its places.

    ``to_empty()`` of a module on ``meta`` and ``load_state_dict(assign=True)`` make a new Parameter in each module that
    holds one. A whole model may hold a weight once that it uses twice, but each of its parts holds the weight.
    """

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:  # 2.11, 2.13, 2.15
        ties = ties_of(self, recurse)
        for _, *others in ties:
            for table, key, _name in others:
                table[key] = None  # `_apply` skips None
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
                missing_keys += _assign_to_all_names(state_dict, names, tie[0][0][tie[0][1]])
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _assign_to_all_names(state_dict: dict[str, Any], names: list[str], now: torch.Tensor | None) -> Iterable[str]:
    """Give all names of one tensor the last value that is given for any of them; return the names that had none."""
    given = [name for name in names if name in state_dict]
    if not given:
        return ()
    new = state_dict[given[-1]]
    if isinstance(now, nn.Parameter) and isinstance(new, torch.Tensor) and not isinstance(new, nn.Parameter):
        new = nn.Parameter(new, requires_grad=now.requires_grad)
    state_dict.update(dict.fromkeys(names, new))
    return [name for name in names if name not in given]
