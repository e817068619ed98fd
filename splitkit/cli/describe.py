"""Describes nodes and values as plain data."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node


def named_value(node: Node) -> dict[str, Any]:
    """Return the name and the type of a node's value."""
    return {"name": node.name, **value_data(node.meta.get("val"))}


def value_data(value: object) -> dict[str, Any]:
    """Return the shape and dtype of a tensor, the ``items`` of a tuple, or the type of anything else."""
    if isinstance(value, torch.Tensor):
        return {"shape": [size_data(s) for s in value.shape], "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple | list):
        return {"shape": None, "dtype": None, "items": [value_data(v) for v in value]}
    return {"shape": None, "dtype": None if value is None else type(value).__name__}


def tensor_text(value: object) -> str:
    """Return ``float32[2, 8, 64]``."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(tensor_text, value))})"
    data = value_data(value)
    return f"{data['dtype']}{data['shape'] if data['shape'] is not None else ''}"


def size_data(size: int | torch.SymInt) -> int | str:
    """Return a size as a number, or as its symbol if it varies; torch may keep a symbol for a size that is fixed."""
    return int(str(size)) if str(size).isdigit() else str(size)
