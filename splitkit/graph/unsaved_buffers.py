"""Keeps the values of buffers that no checkpoint has beside a graph that was captured on ``meta``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from splitkit._torch import meta_of

_KEY = "splitkit.unsaved_buffers"


def keep_values(gm: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Note the values of buffers of a graph module that are on ``meta`` and in no state dict.

    Args:
        gm: the graph module.
        values: name of a buffer -> its value, on the CPU.
    """
    if values:
        meta_of(gm)[_KEY] = dict(values)


def kept_values(root: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return what `keep_values` noted: name of a buffer -> its value; empty for a module with nothing noted."""
    found: Mapping[str, torch.Tensor] = getattr(root, "meta", {}).get(_KEY, {})
    return found


def known_value(root: nn.Module, names: Iterable[str], tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a tensor on ``meta`` on the CPU, if no checkpoint is needed for it.

    Args:
        root: the graph module.
        names: the names of the tensor.
        tensor: the tensor. Without elements, it has no value that could be lost: caches begin with such constants.
    """
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    kept = kept_values(root)
    return next((kept[name] for name in names if name in kept), None)
