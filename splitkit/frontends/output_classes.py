"""Register classes of outputs, and of caches among inputs, that pytree does not know.

A graph returns tensors and puts them into the containers that the model returns. pytree knows tuples, dicts and
registered classes. Any other object that holds tensors is flattened and rebuilt as ``copy.copy`` does, with
``__reduce_ex__`` and without its ``__init__``::

    DynamicCache(layers=[DynamicLayer(keys, values, ...), ...])   <==>   keys, values, ... and an `_ObjectState`

Its class is registered with ``torch.utils._pytree`` when it first occurs, as transformers does for its own exports. The
registration lasts as long as the process, since later calls of the graph need it. What is not a tensor has to be the
same in every call, except that a device on which the object has a tensor follows that tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from splitkit._torch import pytree

_VALUES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)  # what a graph computes
_NEVER = (nn.Module, type, FunctionType, ModuleType)


class _TensorSlot:
    """Marks the place of a tensor among the constants of an `_ObjectState`."""


class _DeviceSlot:
    """Marks the place of the device of the tensor before it, which differs from part to part."""


@dataclass(frozen=True)
class _PathKey(pytree.GetAttrKey):
    """The path to a tensor in an object; its ``name`` is a word, since export makes names of inputs from it."""

    path: str

    def __str__(self) -> str:
        return f".{self.path}"


@dataclass(frozen=True)
class _ObjectState:
    """An object without its tensors.

    Attributes:
        make: the function that creates an empty object.
        spec: pytree specification of the object's state.
        constants: the leaves of the state, with a slot in place of each tensor, and of its device.
    """

    make: Any
    spec: Any
    constants: tuple[Any, ...]


@contextmanager
def outputs_opened(model: nn.Module) -> Iterator[None]:
    """Register the classes of the model's outputs before export looks at them."""

    def look(module: nn.Module, args: Any, output: Any) -> None:
        register_classes_of(output)

    with model.register_forward_hook(look):
        yield


def register_caches_among(inputs: Any) -> None:
    """Register the class of every cache of transformers among inputs, so that a graph takes its tensors as inputs."""
    for leaf in filter(is_cache, pytree.tree_leaves(inputs)):
        register_classes_of(leaf)


def is_cache(value: object) -> bool:
    """Whether an object is a cache of transformers."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


def has_states(layer: Any) -> bool:
    """Whether a layer of a cache has states of constant size, as Mamba's, with or without keys and values."""
    return hasattr(layer, "recurrent_states")


def state_tensors(cache: Any) -> list[torch.Tensor]:
    """Return the states in a cache of transformers: of their sizes only the number of sequences varies."""
    layers = [layer for layer in getattr(cache, "layers", ()) if has_states(layer)]
    tables = [table for layer in layers for table in (layer.conv_states, layer.recurrent_states)]
    return [state for table in tables for state in table.values() if state is not None]


def register_classes_of(value: Any) -> None:
    """Register the class of every object in ``value`` that holds tensors and that pytree does not know."""
    for leaf in pytree.tree_leaves(value):
        if _is_object(leaf) and _has_values(leaf, set()):
            if (kind := type(leaf)) not in pytree.SUPPORTED_NODES:
                pytree.register_pytree_node(kind, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)
            register_classes_of(_state(leaf)[1])


def held_values(leaf: Any) -> Any:
    """Return the state of an object that pytree does not know, if it holds tensors or is a dataclass; else ``None``."""
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    return _state(leaf)[1]["state"] if _is_object(leaf) and _has_values(leaf, set()) else None


def named_leaves(value: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return (path, leaf) pairs of a value and its spec; paths are numbers if a class was registered without paths."""
    try:
        leaves, spec = pytree.tree_flatten_with_path(value, _is_size)
        return [(pytree.keystr(path), leaf) for path, leaf in leaves], spec
    except ValueError:  # Did not find a flatten_with_keys_fn
        flat, spec = pytree.tree_flatten(value, _is_size)
        return [(f"[{i}]", leaf) for i, leaf in enumerate(flat)], spec


def _is_size(value: Any) -> bool:
    """Return whether a value is a ``torch.Size``, which pytree would rebuild as a tuple."""
    return isinstance(value, torch.Size) and all(type(n) is int for n in value)


def _is_object(leaf: Any) -> bool:
    return not isinstance(leaf, (*_VALUES, *_NEVER)) and type(leaf).__module__ not in ("builtins", "torch")


def _has_values(leaf: Any, seen: set[int]) -> bool:
    """Return whether an object holds tensors, also in objects inside it."""
    if id(leaf) in seen:
        return False
    seen.add(id(leaf))
    try:
        inner = pytree.tree_leaves(_state(leaf)[1])
    except Exception:  # what cannot be copied is left to torch, which says that it does not know it
        return False
    return any(isinstance(x, _VALUES) or (_is_object(x) and _has_values(x, seen)) for x in inner)


def _state(value: Any) -> tuple[Any, dict[str, Any]]:
    """What makes an empty object like ``value``, and all that is to be put into it."""
    reduced = value.__reduce_ex__(4)
    make, args, state, items, pairs = (*reduced, None, None, None)[:5]
    return make, {"args": args, "state": state, "items": list(items or ()), "pairs": list(pairs or ())}


def _flatten(value: Any) -> tuple[list[Any], _ObjectState]:
    named, frame = _taken_apart(value)
    return [tensor for _, tensor in named], frame


def _flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], _ObjectState]:
    named, frame = _taken_apart(value)
    return [(_PathKey(re.sub(r"\W+", "_", name), name), tensor) for name, tensor in named], frame


def _taken_apart(value: Any) -> tuple[list[tuple[str, Any]], _ObjectState]:
    make, state = _state(value)
    register_classes_of(state)
    named, spec = named_leaves(state)
    tensors = [(_readable(name), leaf) for name, leaf in named if isinstance(leaf, _VALUES)]
    devices = {leaf.device for _, leaf in named if isinstance(leaf, torch.Tensor)}
    constants = tuple(_constant(leaf, devices) for _, leaf in named)
    return tensors, _ObjectState(make, spec, constants)


def _constant(leaf: Any, devices: set[torch.device]) -> Any:
    if isinstance(leaf, torch.device) and devices == {leaf}:
        return _DeviceSlot
    return _TensorSlot if isinstance(leaf, _VALUES) else leaf


def _readable(name: str) -> str:
    """Return ``layers[0].keys`` for ``['state']['layers'][0].keys``."""
    return re.sub(r"\['(\w+)'\]", r".\1", re.sub(r"^\['\w+'\]", "", name)).lstrip(".")


def _unflatten(tensors: Iterable[Any], frame: _ObjectState) -> Any:
    # the five items of the protocol of `__reduce_ex__`: function, arguments, state, list items, dict items
    given = list(tensors)
    left, device = iter(given), next((t.device for t in given if isinstance(t, torch.Tensor)), None)
    leaves = [next(left) if c is _TensorSlot else device if c is _DeviceSlot else c for c in frame.constants]
    state = pytree.tree_unflatten(leaves, frame.spec)
    made = frame.make(*state["args"])
    if (inner := state["state"]) is not None:
        _put_into(made, inner)
    for item in state["items"]:
        made.append(item)
    for key, item in state["pairs"]:
        made[key] = item
    return made


def _put_into(made: Any, state: Any) -> None:
    """Set the state of an object as pickle does: a dict, or a dict and the slots."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    fields, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if fields:
        made.__dict__.update(fields)
    for name, value in (slots or {}).items():
        setattr(made, name, value)
