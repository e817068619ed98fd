"""Find the kind of a node's value: a tensor, a plain value, or an object whose methods may do anything.

``meta["val"]`` decides if there is one, then the annotation of an input (``node.type``), then how the graph uses the
value: one that is asked for a method or attribute that tensors do not have is an object. An input about which nothing
is known is assumed to be a tensor (`splitkit.graph.assumed_tensors`), and a split that relies on that checks each call.
"""

from __future__ import annotations

import inspect
import operator
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import Node
from torch.fx.tensor_type import TensorType

from splitkit.graph.ops.functions import is_python, torch_name
from splitkit.graph.ops.module_effects import find_attribute
from splitkit.graph.symbols import value_of


class ValueKind(Enum):
    """The kind of a value."""

    TENSOR = 0  # a tensor, or a number in its place
    PLAIN = 1  # a container, a string, a dtype: no methods of tensors
    ARRAY = 2  # a numpy array
    OBJECT = 3  # anything else
    OPEN = 4  # unknown


_NUMBERS = (int, float, complex, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_TENSORS = (torch.Tensor, *_NUMBERS)
_CONTAINERS = (list, tuple, dict, set, frozenset, torch.Size)
_PLAIN = (
    *(*_CONTAINERS, str, bytes, type(None), slice, range, type(Ellipsis), Iterator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.UntypedStorage, torch.TypedStorage),
)
_DEEP = 8  # levels of containers and attributes that are followed; bounds the time for chains of getitem
_READS = (getattr, operator.getitem)
_ANY = (None, Any, object, inspect.Parameter.empty)
_KNOWN_WORDS = re.compile(r"torch|typing|\w*Tensor|Parameter|Optional|Union|None|int|float|bool|complex|str")


def value_kind(node: Node, root: nn.Module | None, known: dict[Node, ValueKind] | None = None) -> ValueKind:
    """Return the kind of a node's value.

    Args:
        node: any node.
        root: the module that owns the graph's attributes.
        known: the answers for other nodes of the graph, a cache that this call adds to.
    """
    if known is None:
        return _kind(node, root)
    if node not in known:
        known[node] = _kind(node, root)
    return known[node]


def _kind(node: Node, root: nn.Module | None) -> ValueKind:
    source, path = read_from(node)
    value = value_of(source)
    if value is None and source.op == "get_attr":
        value = find_attribute(root, source.target)
    if value is not None:
        return _of_value(_member(value, path))
    if source.op == "placeholder":
        return _of_input(source, path)
    if source.op == "call_module":
        return _of_result(getattr(find_attribute(root, source.target), "forward", None), path)
    if source.op == "call_function" and not is_python(source) and torch_name(source.target) is None:
        return _of_result(source.target, path)
    return ValueKind.TENSOR


def read_from(node: Node) -> tuple[Node, list[Node]]:
    """Return the node that a value is read from through attributes and items, and these reads in order."""
    path: list[Node] = []
    while value_of(node) is None and node.target in _READS and isinstance(node.args[0], Node) and len(path) < _DEEP:
        path.append(node)
        node = node.args[0]
    return node, path[::-1]


_UNKNOWN = object()


def _member(value: Any, path: Sequence[Node]) -> Any:
    """Return the result of reading attributes and items of a value."""
    for read in path:
        key = read.args[1]
        try:
            if read.target is operator.getitem:
                value = value[key] if type(value) in _CONTAINERS else _UNKNOWN
            else:
                value = inspect.getattr_static(value, str(key)) if _has(value, str(key)) else _UNKNOWN
        except Exception:
            return _UNKNOWN
        if isinstance(value, torch.Tensor):
            return value
    return value


def _has(value: object, name: str) -> bool:
    return name in getattr(value, "__dict__", {})


def _of_value(value: object) -> ValueKind:
    if isinstance(value, _TENSORS):
        return ValueKind.TENSOR
    if type(value) in _CONTAINERS or (isinstance(value, _PLAIN) and not isinstance(value, _CONTAINERS)):
        return ValueKind.PLAIN
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ValueKind.PLAIN
    return ValueKind.ARRAY if type(value) is np.ndarray else ValueKind.OBJECT


# ---------------------------------------------------------------- annotations


def _of_input(source: Node, path: Sequence[Node]) -> ValueKind:
    annotated = source.type
    if str(source.target).startswith("*"):
        annotated = None
    for read in path:
        annotated = _step(annotated, read)
    found = _of_type(annotated)
    used = (path[-1] if path else source) if found is ValueKind.OPEN else None
    return ValueKind.OBJECT if used is not None and _is_used_as_object(used) else found


def _is_used_as_object(node: Node) -> bool:
    """Whether the graph asks a value for an attribute or method that no tensor has."""
    for user in node.users:
        if user.args and user.args[0] is node:
            name = user.target if user.op == "call_method" else user.args[1] if user.target is getattr else None
            if isinstance(name, str) and not hasattr(torch.Tensor, name):
                return True
    return False


def _of_result(function: object, path: Sequence[Node]) -> ValueKind:
    """Return the kind of what opaque code returns, by its annotation."""
    annotated = getattr(inspect.unwrap(function), "__annotations__", {}).get("return") if callable(function) else None
    for read in path:
        annotated = _step(annotated, read)
    return _of_type(annotated)


def _of_type(annotated: Any) -> ValueKind:
    """Return the kind of the values that an annotation allows."""
    annotated = _bare(annotated)
    if annotated in _ANY if _is_hashable(annotated) else False:
        return ValueKind.OPEN
    if isinstance(annotated, (typing.TypeVar, typing.ForwardRef)):
        annotated = getattr(annotated, "__forward_arg__", None)
        return ValueKind.OPEN if annotated is None else _of_words(annotated)
    if isinstance(annotated, str):
        return _of_words(annotated)
    origin_ = typing.get_origin(annotated)
    if origin_ in (typing.Union, types.UnionType):
        return _agreed({_of_type(a) for a in typing.get_args(annotated) if a is not type(None)})
    if origin_ is typing.Literal:
        return ValueKind.PLAIN
    return _of_class(origin_ if origin_ is not None else annotated)


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _bare(annotated: Any) -> Any:
    while True:
        if typing.get_origin(annotated) is typing.Annotated:
            annotated = typing.get_args(annotated)[0]
        elif hasattr(annotated, "__supertype__"):  # NewType
            annotated = annotated.__supertype__
        else:
            return annotated


def _agreed(kinds: set[ValueKind]) -> ValueKind:
    for kind in (ValueKind.OBJECT, ValueKind.ARRAY, ValueKind.OPEN, ValueKind.TENSOR):
        if kind in kinds:
            return kind
    return ValueKind.PLAIN


def _of_words(text: str) -> ValueKind:
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    return (
        ValueKind.OPEN
        if words == {"Any"}
        else ValueKind.TENSOR
        if all(map(_KNOWN_WORDS.fullmatch, words))
        else ValueKind.OBJECT
    )


def _of_class(kind: Any) -> ValueKind:
    if isinstance(kind, TensorType) or _is_tensor_class(kind):
        return ValueKind.TENSOR
    if not isinstance(kind, type):
        return ValueKind.OBJECT
    if kind is np.ndarray:
        return ValueKind.ARRAY
    if issubclass(kind, _NUMBERS):
        return ValueKind.TENSOR
    if kind in _PLAIN or kind in (Sequence, Mapping) or kind.__module__ in ("collections.abc", "typing"):
        return ValueKind.PLAIN
    return ValueKind.PLAIN if issubclass(kind, tuple) and hasattr(kind, "_fields") else ValueKind.OBJECT


def _is_tensor_class(kind: Any) -> bool:
    """Whether a class is Tensor, a subclass, ``torch.LongTensor`` or a jaxtyping annotation of a tensor."""
    if isinstance(kind, type) and issubclass(kind, torch.Tensor):
        return True
    if isinstance(array := getattr(kind, "array_type", None), type) and issubclass(array, torch.Tensor):
        return True
    name, module = getattr(kind, "__name__", ""), str(getattr(kind, "__module__", ""))
    return name.endswith("Tensor") and module.split(".")[0] == "torch"


class _Hidden:
    """The annotation of an object's attribute that its class does not annotate."""


def _step(annotated: Any, read: Node) -> Any:
    """Return the annotation of an item or attribute of a value, ``None`` if there is none."""
    annotated = _bare(annotated)
    origin_, args = typing.get_origin(annotated), typing.get_args(annotated)
    if origin_ in (typing.Union, types.UnionType):
        steps = [_step(a, read) for a in args if a is not type(None)]
        return steps[0] if len(steps) == 1 else typing.Union[tuple(steps)] if all(steps) else None  # noqa: UP007
    kind = _of_type(annotated)
    if kind in (ValueKind.TENSOR, ValueKind.ARRAY):
        return annotated
    if kind is ValueKind.OBJECT or (read.target is getattr and isinstance(annotated, type) and kind is ValueKind.PLAIN):
        hints = _hints(annotated) if isinstance(annotated, type) else {}
        return hints.get(str(read.args[1])) or _Hidden
    if read.target is getattr:
        return None
    if origin_ is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        index = read.args[1]
        return args[index] if isinstance(index, int) and -len(args) <= index < len(args) else None
    if origin_ is tuple:
        return args[0]
    return args[-1] if args else None


def _hints(kind: type) -> Mapping[str, Any]:
    try:
        hints = dict(typing.get_type_hints(kind))
    except Exception:  # annotations may use names that exist only for type checkers
        hints = {}
    getters = {name: p.fget for one in kind.__mro__ for name, p in vars(one).items() if isinstance(p, property)}
    return {**{n: getattr(f, "__annotations__", {}).get("return") for n, f in getters.items()}, **hints}
