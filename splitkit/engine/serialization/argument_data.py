"""Convert arguments of nodes to JSON-ready data and back: constants, nodes, and containers of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from splitkit.engine.serialization.json_fields import JsonField
from splitkit.errors import FileError


def encode_argument(value: Any, where: str) -> Any:
    """Return an argument as JSON-ready data.

    Args:
        value: the argument; a node stands for its result.
        where: the owner of the argument, for the error message.

    Raises:
        FileError: SK506 if the value cannot be represented.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [encode_argument(item, where) for item in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [encode_argument(item, where) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode_argument(key, where), encode_argument(item, where)] for key, item in value.items()]}
    if kind is slice:
        return {"slice": [encode_argument(item, where) for item in (value.start, value.stop, value.step)]}
    if kind in (float, complex):
        return {kind.__name__: repr(value)}
    for name, (torch_kind, _) in _OF_TORCH.items():
        if isinstance(value, torch_kind):
            return {name: str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": None}
    raise FileError(
        "SK506",
        f"{where} has an argument of type {kind.__name__}, which cannot be written as data",
        "Give the model constants that are numbers, strings, dtypes, devices or tensors.",
    )


def decode_argument(data: JsonField, nodes: Mapping[str, Node]) -> Any:
    """Return the argument that `encode_argument` has encoded.

    Args:
        data: the data.
        nodes: the nodes that it may name.

    Raises:
        FileError: SK505 if the data is damaged.
    """
    value = data.value
    if isinstance(value, list):
        return [decode_argument(item, nodes) for item in data.items()]
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
        return tuple(decode_argument(item, nodes) for item in inner.items())
    if kind == "dict":
        return dict(_pair(item, nodes) for item in inner.items())
    if kind == "slice" and isinstance(inner.value, list) and len(inner.value) == 3:
        return slice(*(decode_argument(item, nodes) for item in inner.items()))
    if kind in ("float", "complex"):
        return _number(kind, inner)
    if kind in _OF_TORCH:
        return _of_torch(kind, inner)
    if kind == "ellipsis":
        return Ellipsis
    raise data.damaged("a value")


def _pair(data: JsonField, nodes: Mapping[str, Node]) -> tuple[Any, Any]:
    items = [decode_argument(item, nodes) for item in data.items()]
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
    """Return the dtype that a field names; raise SK505 for any other text."""
    found = _of_name(data.text())
    if not isinstance(found, torch.dtype):
        raise data.damaged("a dtype")
    return found


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name that `dtype_of` reads."""
    return str(dtype).removeprefix("torch.")
