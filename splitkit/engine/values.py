"""Arguments of nodes as JSON-ready data: numbers, strings, dtypes, devices, and containers of these and of nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from splitkit.errors import FileError
from splitkit.fields import JsonField


def encode(value: Any, where: str) -> Any:
    """A value as data.

    Args:
        value: of an argument; a node stands for its result.
        where: whose argument it is, for the error.

    Raises:
        FileError: SK506 for what is not data.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [encode(item, where) for item in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [encode(item, where) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, where), encode(item, where)] for key, item in value.items()]}
    if kind is slice:
        return {"slice": [encode(item, where) for item in (value.start, value.stop, value.step)]}
    if kind in (float, complex):
        return {kind.__name__: repr(value)}
    for name, (torch_kind, _) in _OF_TORCH.items():
        if isinstance(value, torch_kind):
            return {name: str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": None}
    raise FileError(
        "SK506",
        f"{where} is given a {kind.__name__}, which cannot be written as data",
        "Give the model constants that are numbers, strings, dtypes, devices or tensors.",
    )


def decode(data: JsonField, nodes: Mapping[str, Node]) -> Any:
    """The value of data.

    Args:
        data: as `encode` made it.
        nodes: those that it may name.

    Raises:
        FileError: SK505.
    """
    value = data.value
    if isinstance(value, list):
        return [decode(item, nodes) for item in data.items()]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise data.damaged("an object of one field")
    ((kind, inner),) = data.fields()
    if kind == "node":
        if inner.text() not in nodes:
            raise inner.damaged("the name of a node before it")
        return nodes[inner.text()]
    if kind == "tuple":
        return tuple(decode(item, nodes) for item in inner.items())
    if kind == "dict":
        return dict(_pair(item, nodes) for item in inner.items())
    if kind == "slice" and isinstance(inner.value, list) and len(inner.value) == 3:
        return slice(*(decode(item, nodes) for item in inner.items()))
    if kind in ("float", "complex"):
        return _number(kind, inner)
    if kind in _OF_TORCH:
        return _of_torch(kind, inner)
    if kind == "ellipsis":
        return Ellipsis
    raise data.damaged("a value")


def _pair(data: JsonField, nodes: Mapping[str, Node]) -> tuple[Any, Any]:
    items = [decode(item, nodes) for item in data.items()]
    if len(items) != 2 or isinstance(items[0], list | dict | slice | Node):
        raise data.damaged("a key and a value")
    return items[0], items[1]


def _number(kind: str, data: JsonField) -> float | complex:
    try:
        return float(data.text()) if kind == "float" else complex(data.text())
    except ValueError as error:
        raise data.damaged("a number") from error


def _of_torch(kind: str, data: JsonField) -> Any:
    wanted, make = _OF_TORCH[kind]
    try:
        found = make(data.text())
    except RuntimeError as error:
        raise data.damaged(f"a {kind}") from error
    if not isinstance(found, wanted):
        raise data.damaged(f"a {kind}")
    return found


def _of_name(name: str) -> Any:
    return getattr(torch, name, None)


_OF_TORCH: Mapping[str, tuple[Any, Any]] = {
    "dtype": (torch.dtype, _of_name),
    "device": (torch.device, torch.device),
    "layout": (torch.layout, _of_name),
    "memory_format": (torch.memory_format, _of_name),
}


def dtype_of(data: JsonField) -> torch.dtype:
    """The dtype that a field names."""
    found = _of_name(data.text())
    if not isinstance(found, torch.dtype):
        raise data.damaged("a dtype")
    return found


def name_of_dtype(dtype: torch.dtype) -> str:
    """The name that `dtype_of` reads."""
    return str(dtype).removeprefix("torch.")
