"""Describes the state of an optimizer by the names of parameters, so that it fits any number of stages.

The options of a parameter group (``lr``, ``weight_decay``, ...) belong to the parameters that are in it. On loading, a
group takes the options of its parameters, wherever they were before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from splitkit.engine.graph_data import decode_argument, decode_pair, dtype_of, encode_argument, name_of_dtype
from splitkit.engine.json_fields import JsonField
from splitkit.errors import FileError, PipelineError
from splitkit.graph.storages import names_of

PREFIX = "optimizer."


def require_known(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer with parameters that have no name.

    Raises:
        PipelineError: SK802.
    """
    known = {id(parameter) for parameter in named.values()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.numel() and id(parameter) not in known:  # a rank without parameters has an empty one
                raise PipelineError(
                    "SK802",
                    f"the optimizer has a parameter {list(parameter.shape)} that the pipeline does not have",
                    "Give it pipe.parameters(), after pipe.shard() if the stages are sharded.",
                )


def encode_optimizer(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the class, the groups and the state of an optimizer as JSON-ready data.

    Args:
        optimizer: the optimizer.
        named: name -> parameter.
        tensors: name -> tensor; the tensors of the state are added.

    Raises:
        FileError: SK506 for what is not data, and for a sharded tensor that is not like its parameter.
    """
    names = names_of(named)
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        held = [name for parameter in group["params"] for name in names.get(id(parameter), ())]
        groups.append({"options": _encode_options(group, number), "parameters": held})
    state = {}
    for name, parameter in named.items():
        if held_state := optimizer.state.get(parameter):
            for key, value in held_state.items():
                _require_alike(f"{PREFIX}{name}.{key}", value, parameter)
            state[name] = encode_state(dict(held_state), PREFIX + name, tensors)
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}


def merge_optimizers(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one description of the optimizers of all ranks.

    Raises:
        PipelineError: SK804 if the ranks have optimizers of several classes.
    """
    kinds = {each["class"] for each in every}
    if len(kinds) > 1:
        raise PipelineError(
            "SK804",
            f"the ranks have different optimizers: {', '.join(sorted(kinds))}",
            "Create the same one on every rank.",
        )
    groups: list[dict[str, Any]] = []
    for each in every:
        for number, group in enumerate(each["groups"]):
            like = next((g for g in groups if (g["number"], g["options"]) == (number, group["options"])), None)
            if like is None:
                groups.append(like := {"number": number, "options": group["options"], "parameters": []})
            like["parameters"] = list(dict.fromkeys([*like["parameters"], *group["parameters"]]))
    return {"class": every[0]["class"], "groups": groups, "state": {k: v for e in every for k, v in e["state"].items()}}


def prepare_optimizer(
    data: JsonField, optimizer: Optimizer, named: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return name -> uninitialized tensors for this optimizer's state.

    They are on the device of its parameter and sharded like it, except the number of steps, which torch's optimizers
    keep on the CPU unless they are fused or capturable.

    Raises:
        FileError: SK505 for damaged data, SK507 if it is the state of another optimizer or of other parameters.
    """
    kind = data["class"].text()
    if kind != type(optimizer).__name__:
        raise _other(f"the checkpoint has the state of {kind}, but this optimizer is a {type(optimizer).__name__}")
    found: dict[str, torch.Tensor] = {}
    states = dict(data["state"].fields())
    grouped = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in named.items():
        if name in states and id(parameter) in grouped:
            group = grouped[id(parameter)]
            on_device = bool(group.get("capturable") or group.get("fused"))
            for key, like in empty_tensors(states[name]).items():
                if key == f"{PREFIX}{name}.step" and not on_device:
                    found[key] = like
                else:
                    found[key] = _like(key, like, parameter)
    return found


def load_optimizer(
    data: JsonField, optimizer: Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Set the options and the state of an optimizer.

    Args:
        data: the description.
        optimizer: the optimizer.
        named: name -> parameter.
        tensors: the filled tensors of `prepare_optimizer`.

    Raises:
        FileError: SK505 for damaged data, SK507 if parameters of one group had different options, or none.
    """
    groups = list(data["groups"].items())
    of_name = {name.text(): group for group in groups for name in group["parameters"].items()}
    names: dict[int, str] = {id(parameter): name for name, parameter in named.items()}
    for number, group in enumerate(optimizer.param_groups):
        held = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        if lost := [name for name in held if name not in of_name]:
            raise _other(f"the optimizer that was saved did not train {lost[0]}", lost[:1])
        found = [of_name[name] for name in held] or [g for g in groups if g["number"].whole() == number]
        for name, other in zip(held, found, strict=False):
            if other["options"].value != found[0]["options"].value:
                raise _other(f"{held[0]} and {name} had different options (lr, ...), and are in one group now", [name])
        if found:
            options = decode_state(found[0]["options"], {})
            group.update({key: _restored(group.get(key), value) for key, value in options.items()})
    states = dict(data["state"].fields())
    optimizer.state.clear()
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in named.items():
        if name in states and id(parameter) in trained:
            optimizer.state[parameter] = decode_state(states[name], tensors)


def _encode_options(group: Mapping[str, Any], number: int) -> Any:
    """Encode the options of a group. A tensor with one element is saved as a number: groups differ by rank."""
    options = {key: _as_number(value) for key, value in group.items() if key != "params"}
    tensors: dict[str, torch.Tensor] = {}
    data = encode_state(options, f"param_groups.{number}", tensors)
    if tensors:
        name, tensor = next(iter(tensors.items()))
        raise FileError(
            "SK506",
            f"a checkpoint cannot hold {name}, a tensor {list(tensor.shape)} among the options of a group",
            "Keep numbers in the options of parameter groups.",
            [name],
        )
    return data


def _as_number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not value.dim():
        return value.item()
    return tuple(map(_as_number, value)) if type(value) is tuple else value


def _restored(held: Any, value: Any) -> Any:
    """Return the new value of an option. A tensor keeps its identity, since a compiled step may hold it."""
    if isinstance(held, torch.Tensor) and isinstance(value, int | float):
        return held.fill_(value)
    if type(held) is tuple and type(value) is tuple and len(held) == len(value):
        return tuple(map(_restored, held, value))
    return value


def _like(name: str, like: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return an uninitialized tensor of a shape and dtype, on the device of a parameter and sharded like it."""
    if like.shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=like.dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and like.dim():
        raise _unlike(name, parameter)
    return like.to(parameter.device)


def _require_alike(name: str, value: Any, parameter: nn.Parameter) -> None:
    sized = isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    if sized and isinstance(parameter, DTensor) and value.shape != parameter.shape:
        raise _unlike(name, parameter)


def _unlike(name: str, parameter: nn.Parameter) -> FileError:
    return FileError(
        "SK506",
        f"{name} does not have the shape of its parameter, {list(parameter.shape)}, which is sharded",
        "Use an optimizer whose state is like the parameters, or train without --fsdp and Pipeline.shard.",
        [name],
    )


def _other(reason: str, names: list[str] | None = None) -> FileError:
    return FileError("SK507", reason, "Create the optimizer as in the run that wrote the checkpoint.", names or [])


# Converts the state of a training run to JSON data and back; its tensors are kept apart, by name.
#
# State is what ``state_dict()`` of schedulers and data loaders returns, what an optimizer keeps, and what users add:
# numbers, strings, containers of these, tensors, numpy arrays. Nothing is pickled; what is not data is refused.


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

    def tensor(given: JsonField) -> torch.Tensor:
        name = given["name"].text()
        if name not in tensors:
            raise given.damaged("a tensor of the checkpoint")
        return tensors[name]

    kinds: dict[str, Callable[[JsonField], Any]] = {
        "tensor": tensor,
        "array": lambda given: decode_argument(given, kinds).numpy(),
        "numpy": _numpy,
        "bytes": _bytes,
        "counter": lambda given: Counter(dict(decode_pair(item, kinds) for item in given.items())),
    }
    return decode_argument(data, kinds)


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
