"""Converts the state of a training run to JSON data and back; its tensors are kept apart, by name.

State is what ``state_dict()`` of schedulers and data loaders returns, what an optimizer keeps, and what users add:
numbers, strings, containers of these, tensors, numpy arrays. Nothing is pickled; what is not data is refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from splitkit.engine.serialization.argument_data import decode_argument, dtype_of, encode_argument, name_of_dtype
from splitkit.engine.serialization.json_fields import JsonField
from splitkit.errors import FileError


def encode_state(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON-ready data.

    Args:
        value: the value.
        where: the path of the value, such as ``scheduler.last_epoch``; tensors are named by it.
        tensors: name -> tensor; the tensors of the value are added.

    Raises:
        FileError: SK506 if the value cannot be represented; names its path.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        require_storable(where, value)
        tensors[where] = value.detach()
        return {"tensor": {"name": where, "dtype": name_of_dtype(value.dtype), "shape": list(value.shape)}}
    if kind is np.ndarray and value.dtype.kind in "biuf":
        return {"array": encode_state(torch.from_numpy(value.copy()), where, tensors)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"numpy": [value.dtype.name, encode_argument(value.item(), where)]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is list:
        return [encode_state(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": [encode_state(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]}
    if kind in (dict, OrderedDict, Counter):
        name = "counter" if kind is Counter else "dict"
        return {name: [[_leaf(key, where), encode_state(v, f"{where}.{key}", tensors)] for key, v in value.items()]}
    return _leaf(value, where)


def require_storable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that `torch.distributed.checkpoint` would not write as it is.

    Raises:
        FileError: SK506.
    """
    kind, layout = type(tensor), tensor.layout
    plain = kind in (torch.Tensor, nn.Parameter, nn.Buffer) or isinstance(tensor, DTensor)
    if plain and layout == torch.strided and not tensor.is_meta and not tensor.is_quantized:
        return
    what = "has no data" if tensor.is_meta else f"is a {kind.__name__} with the layout {layout}"
    raise FileError(
        "SK506",
        f"a checkpoint cannot hold {name}, which {what}",
        "Use plain dense tensors, and load the weights first.",
        [name],
    )


def decode_state(data: JsonField, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `encode_state` has encoded.

    Args:
        data: the data.
        tensors: name -> tensor, see `empty_tensors`.

    Raises:
        FileError: SK505 if the data is damaged.
    """
    value = data.value
    if isinstance(value, list):
        return [decode_state(item, tensors) for item in data.items()]
    if not isinstance(value, dict) or len(value) != 1:
        return decode_argument(data, {})
    ((kind, inner),) = data.fields()
    if kind == "tensor":
        name = inner["name"].text()
        if name not in tensors:
            raise inner.damaged("a tensor of the checkpoint")
        return tensors[name]
    if kind == "array":
        return decode_state(inner, tensors).numpy()
    if kind == "numpy":
        return _numpy(inner)
    if kind == "bytes":
        return _bytes(inner)
    if kind == "tuple":
        return tuple(decode_state(item, tensors) for item in inner.items())
    if kind in ("dict", "counter"):
        pairs = dict(_pair(item, tensors) for item in inner.items())
        return Counter(pairs) if kind == "counter" else pairs
    return decode_argument(data, {})


def empty_tensors(data: JsonField) -> dict[str, torch.Tensor]:
    """Return name -> an uninitialized tensor on the CPU, for every tensor in encoded data.

    Raises:
        FileError: SK505 if the data is damaged.
    """
    found: dict[str, torch.Tensor] = {}
    if isinstance(data.value, list):
        for item in data.items():
            found |= empty_tensors(item)
    elif isinstance(data.value, dict):
        for kind, inner in data.fields():
            if kind == "tensor" and isinstance(inner.value, dict):
                found[inner["name"].text()] = torch.empty(inner["shape"].sizes(), dtype=dtype_of(inner["dtype"]))
            else:
                found |= empty_tensors(inner)
    return found


def _leaf(value: Any, where: str) -> Any:
    if not isinstance(value, list | dict | torch.fx.Node):
        try:
            return encode_argument(value, where)
        except FileError:
            pass  # its text is about the arguments of a node
    raise FileError(
        "SK506",
        f"a checkpoint cannot hold {where}, which is a {type(value).__name__}",
        "Keep numbers, strings, tensors, and lists, tuples or dicts of these; the state_dict of an object is one.",
        [where],
    )


def _pair(data: JsonField, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    if not isinstance(data.value, list) or len(data.value) != 2:
        raise data.damaged("a key and a value")
    first, second = data.items()
    key = decode_argument(first, {})
    if isinstance(key, list | dict | slice):
        raise first.damaged("a key")
    return key, decode_state(second, tensors)


def _numpy(data: JsonField) -> Any:
    items = list(data.items())
    try:
        kind = np.dtype(items[0].text())
        if kind.kind in "biuf":
            return kind.type(decode_argument(items[1], {}))
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise data.damaged("a number of numpy") from error
    raise data.damaged("a number of numpy")


def _bytes(data: JsonField) -> bytes:
    try:
        return bytes.fromhex(data.text())
    except ValueError as error:
        raise data.damaged("bytes") from error
