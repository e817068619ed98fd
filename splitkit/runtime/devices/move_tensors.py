"""Moves tensors of a model to their devices in place, so that every holder of a shared tensor sees the move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from splitkit._torch import FakeTensor, attributes_of
from splitkit.errors import PipelineError
from splitkit.graph.storages import storage_key
from splitkit.runtime.devices.accelerators import same_device

Span = tuple[int, int]  # bytes of a storage: [start, stop)


def move_tensors(root: nn.Module, held: nn.Module, homes: Mapping[int, torch.device]) -> None:
    """Move tensors to their devices, with their gradients.

    Args:
        root: the module whose tensors are moved.
        held: a module with top-level tables of its own, whose children are those of ``root``.
        homes: id of a tensor -> its device; other tensors stay where they are.

    Raises:
        PipelineError: SK807 for a tensor without data, SK808 for tensors that share memory and have different devices.
            Nothing is moved then.
    """
    tables = [t for m in (root, held) for t in tables_of(m)]
    found = {id(t): t for table in tables for t in table.values() if isinstance(t, torch.Tensor) and id(t) in homes}
    groups = _sharing(list(found.values()))
    for group in groups:
        _require_one(group, homes, tables)
        _require_data(group, homes, tables)
    for group in groups:
        device = homes[id(group[0])]
        new = group if same_device(group[0].device, device) else _moved(group, device)
        for tensor, moved in zip(group, new, strict=True):
            if moved is not tensor:
                replace_tensor(tables, tensor, moved)


def tables_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return all dictionaries that may hold tensors in a module and its submodules."""
    found: list[dict[str, Any]] = []
    for inner in module.modules():
        held = attributes_of(inner)
        found += [held.parameters, held.buffers, vars(inner)]
    return list({id(table): table for table in found}.values())


def _sharing(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors that overlap in memory, directly or through others."""
    by_storage: dict[Any, list[tuple[Span, torch.Tensor]]] = {}
    for tensor in tensors:
        by_storage.setdefault(storage_key(tensor), []).append((_span(tensor), tensor))
    groups: list[list[torch.Tensor]] = []
    for rows in by_storage.values():
        end = -1
        for (start, stop), tensor in sorted(rows, key=lambda row: row[0]):
            if start >= end:
                groups.append([])
            groups[-1].append(tensor)
            end = max(end, stop)
    return groups


def _span(tensor: torch.Tensor) -> Span:
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0
    start = tensor.storage_offset()
    last = start + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start) * tensor.element_size(), (int(last) + 1) * tensor.element_size()


def _names(group: list[torch.Tensor], tables: list[dict[str, Any]]) -> list[str]:
    found = (name for t in group for table in tables for name, value in table.items() if value is t)
    return list(dict.fromkeys(found))


def _require_data(group: list[torch.Tensor], homes: Mapping[int, torch.device], tables: list[dict[str, Any]]) -> None:
    for tensor in group:
        if tensor.is_meta and homes[id(tensor)].type != "meta":
            names = _names([tensor], tables)
            raise PipelineError(
                "SK807",
                f"{names[0]} is on meta and has no data to move",
                "Load the weights: splitkit.load(split, folder, devices).",
                names,
            )


def _require_one(group: list[torch.Tensor], homes: Mapping[int, torch.device], tables: list[dict[str, Any]]) -> None:
    devices = {homes[id(t)] for t in group}
    if len(devices) > 1:
        names = _names(group, tables)
        raise PipelineError(
            "SK808",
            f"{' and '.join(names)} share memory, but are read on different devices: {', '.join(map(str, devices))}",
            "Give the parts that read them one device, or clone one of them before the capture.",
            names,
        )


def _moved(group: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    with torch.no_grad():
        if len(group) == 1:
            return [_put(group[0], group[0].detach().to(device))]
        storage = torch.empty(0, dtype=torch.uint8, device=group[0].device).set_(group[0].untyped_storage()).to(device)
        return [
            _put(
                tensor,
                torch.empty(0, dtype=tensor.dtype, device=device).set_(
                    storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
                ),
            )
            for tensor in group
        ]


def _put(tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Give a tensor new memory; return a new tensor where torch cannot do that (fake tensors, some backends)."""
    grad = None if tensor.grad is None else tensor.grad.to(new.device)
    made = tensor
    if isinstance(tensor, FakeTensor) or isinstance(new, FakeTensor) or not _set_data(tensor, new):
        made = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    if grad is not None:
        made.grad = grad
    return made


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> bool:
    grad, tensor.grad = tensor.grad, None
    try:
        tensor.data = new
    except RuntimeError:  # ``data`` refuses another tensor type, as on XLA
        tensor.grad = grad
        return False
    return True


def replace_tensor(tables: list[dict[str, Any]], old: torch.Tensor, new: torch.Tensor) -> None:
    """Put another tensor in the place of one, wherever a dictionary has it."""
    for table in tables:
        for name, value in table.items():
            if value is old:
                table[name] = new
