"""Find the kind of a node's value: a tensor, a plain value, or an object whose methods may do anything.

``meta["val"]`` decides if there is one, then the annotation of an input (``node.type``), then how the graph uses the
value: one that is asked for a method or attribute that tensors do not have is an object. An input about which nothing
is known is assumed to be a tensor (`splitkit.graph.dataflow`), and a split that relies on that checks each call.
"""

from __future__ import annotations

import inspect
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node
from torch.fx.tensor_type import TensorType

from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import Effects, argument_nodes, first_argument, unknown_effects
from splitkit.graph.ops.functions import is_python, torch_name
from splitkit.graph.ops.tuples import Known, ModuleEffects, find_attribute, is_stock, is_tuple
from splitkit.graph.storages import value_of

# Effects of methods of objects that are not tensors: numpy's ``sort`` is in place, others may do anything.


_KNOWN = (
    *(torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.UntypedStorage, torch.TypedStorage),
    *(int, float, complex, bool, str, tuple, list, dict, set, frozenset, nn.Module),
)
_OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)


@dataclass(frozen=True)
class Memo:
    """Cached answers, valid while the graphs do not change, so that no chain of nodes is followed twice.

    Attributes:
        modules: module -> the effects of calling it, ``None`` if unknown.
        tuples: node -> whether it yields a tuple.
        kinds: node -> the kind of its value.
        arrays: node -> whether it may yield an array.
        arrays_or_tensors: the same, where an input of unknown kind is assumed to be a tensor.
        single: node -> whether it surely yields a tensor or number: no container, iterator, array or object.
    """

    modules: dict[nn.Module, ModuleEffects | None] = field(default_factory=dict)
    tuples: Known = field(default_factory=dict)
    kinds: dict[Node, ValueKind] = field(default_factory=dict)
    arrays: dict[Node, bool] = field(default_factory=dict)
    arrays_or_tensors: dict[Node, bool] = field(default_factory=dict)
    single: dict[Node, bool] = field(default_factory=dict)


def foreign_effects(node: Node, root: nn.Module, memo: Memo) -> Effects | None:
    """Return the effects of a method of something other than a tensor; ``None`` if it counts as a tensor's method."""
    subject = node.args[0] if node.args else None
    if not isinstance(subject, Node):
        return None
    name = str(node.target)
    if name in op_tables.AMBIENT:
        return None
    kind = value_kind(subject, root, memo.kinds)
    if kind is ValueKind.ARRAY and hasattr(np.ndarray, name):
        return Effects(tuple(node.all_input_nodes), tuple(node.all_input_nodes))
    if not hasattr(torch.Tensor, name) or kind is ValueKind.OBJECT:
        return unknown_effects(node)
    in_place = name in op_tables.IN_PLACE_ELSEWHERE or (name == "add" and not node.users)  # a set's
    if in_place and name != "add" and not node.users and subject.op == "placeholder" and value_of(subject) is None:
        return unknown_effects(node)  # without readers, the call makes sense only in place
    if not (in_place or may_pass_out(node, name)):
        return None
    return unknown_effects(node) if may_be_array(subject, root, memo, or_tensor=in_place) else None


def operand_effects(node: Node, root: nn.Module, memo: Memo) -> Effects | None:
    """Return the effects of a Python operator on an object, which may define it; ``None`` if it takes no object."""
    if node.target is getattr or not any(
        value_kind(n, root, memo.kinds) is ValueKind.OBJECT for n in node.all_input_nodes
    ):
        return None
    return None if node.target in _HANDS_ON else unknown_effects(node)


# These functions pass objects on unchanged, or ask only for their identity or class.
_HANDS_ON = (
    tuple,
    list,
    dict,
    isinstance,
    id,
    type,
    callable,
    hasattr,
    operator.is_,
    operator.is_not,
    setattr,
    delattr,
)


def may_pass_out(node: Node, name: str) -> bool:
    """Whether an argument is in the position of the ``out`` of an array's method."""
    place = 1 + op_tables.OUT_AFTER.get(name, len(node.args))
    return any(isinstance(a, Node) for a in node.args[place:])


def may_be_array(value: Node, root: nn.Module, memo: Memo, *, or_tensor: bool) -> bool:
    """Whether a value may be a numpy array, found by following it to its origin: ``numpy()``, an object, unknown code.

    Args:
        value: the node that yields it.
        root: the module that owns the graph's attributes.
        memo: the answers for other nodes.
        or_tensor: whether a tensor supports the call as well; then an unknown input is assumed to be a tensor.
    """
    known = memo.arrays_or_tensors if or_tensor else memo.arrays
    return follow(value, lambda node: _made_array(node, root, memo, or_tensor), known)


def _made_array(value: Node, root: nn.Module, memo: Memo, or_tensor: bool) -> bool | Node:
    """Return whether a node may yield an array, or the argument that decides that."""
    known, target = value_of(value), value.target
    if known is None and value.op == "get_attr":
        known = find_attribute(root, target)
    if known is not None:
        return not isinstance(known, _KNOWN)
    if value.op == "placeholder":
        kind = value_kind(value, root, memo.kinds)
        return kind is ValueKind.ARRAY or (kind is ValueKind.OPEN and not or_tensor)
    if value.op == "call_module":
        module = find_attribute(root, target)
        return not is_stock(module) and not isinstance(module, fx.GraphModule)
    if isinstance(target, _OPERATORS):
        return False
    name = torch_name(target)
    if name in op_tables.MAKE_FOREIGN:
        return True
    if value.op == "call_function" and not is_python(value):
        return name is None
    inputs = value.all_input_nodes  # a method or an operator of an array yields an array
    return inputs[0] if inputs else False


def follow(value: Node, step: Callable[[Node], bool | Node], known: dict[Node, bool]) -> bool:
    """Follow steps from node to node until one returns an answer, and note it for all nodes on the way."""
    way: list[Node] = []
    while value not in known:
        way.append(value)
        found = step(value)
        if isinstance(found, bool):
            known[value] = found
        else:
            value = found
    known.update(dict.fromkeys(way, known[value]))
    return known[value]


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
                has = str(key) in getattr(value, "__dict__", {})
                value = inspect.getattr_static(value, str(key)) if has else _UNKNOWN
        except Exception:
            return _UNKNOWN
        if isinstance(value, torch.Tensor):
            return value
    return value


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
    if any(annotated is known for known in _ANY):
        return ValueKind.OPEN
    if isinstance(annotated, (typing.TypeVar, typing.ForwardRef)):
        annotated = getattr(annotated, "__forward_arg__", None)
        return ValueKind.OPEN if annotated is None else _of_words(annotated)
    if isinstance(annotated, str):
        return _of_words(annotated)
    origin_ = typing.get_origin(annotated)
    if origin_ in (typing.Union, types.UnionType):
        kinds = (_of_type(a) for a in typing.get_args(annotated) if a is not type(None))
        return min(kinds, key=_FIRST.index, default=ValueKind.PLAIN)
    if origin_ is typing.Literal:
        return ValueKind.PLAIN
    return _of_class(origin_ if origin_ is not None else annotated)


def _bare(annotated: Any) -> Any:
    while True:
        if typing.get_origin(annotated) is typing.Annotated:
            annotated = typing.get_args(annotated)[0]
        elif hasattr(annotated, "__supertype__"):  # NewType
            annotated = annotated.__supertype__
        else:
            return annotated


_FIRST = (ValueKind.OBJECT, ValueKind.ARRAY, ValueKind.OPEN, ValueKind.TENSOR, ValueKind.PLAIN)
"""What a value of several kinds counts as: the first of them."""


def _of_words(text: str) -> ValueKind:
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    if words == {"Any"}:
        return ValueKind.OPEN
    return ValueKind.TENSOR if all(map(_KNOWN_WORDS.fullmatch, words)) else ValueKind.OBJECT


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


# Nodes that read a tensor's metadata (sizes, strides, dtype, device) and not its memory.
#
# There are two kinds. A node may ask for sizes only: ``empty_like(a)`` gives the same before and after ``a.neg_()``. Or
# it is a view: ``a.view(-1)`` refers to the same memory before and after ``a.neg_()``, and only its readers see what is
# there then. Ops that may copy (``reshape``, ``contiguous``, ``to``) and items by a tensor index are not views.


_NAMES = (("self", "input", "tensor"), ("other", "the_template"))  # of the first argument and the second


def sizes_only(node: Node) -> tuple[Node, ...]:
    """Return the arguments of which a node reads only metadata."""
    positions = _positions(node)
    if not positions:
        return ()
    args, kwargs = list[object](node.args), dict[str, object](node.kwargs)
    asked: dict[Node, None] = {}
    for position in positions:
        by_name = next((name for name in _NAMES[position] if name in kwargs), "")
        given = args[position] if position < len(args) else kwargs.pop(by_name, None)
        if position < len(args):
            args[position] = None
        if isinstance(given, Node) and _is_plain(given):
            asked[given] = None
        else:
            args.append(given)
    return tuple(a for a in asked if a not in argument_nodes((args, kwargs)))


def _positions(node: Node) -> tuple[int, ...]:
    """Return the positions of the arguments of which only metadata is read."""
    target: Any = node.target
    if target is getattr:
        return (0,) if len(node.args) > 1 and node.args[1] in op_tables.SIZE_ATTRIBUTES else ()
    if target is len:
        first = node.args[0] if node.args else None
        return (0,) if isinstance(first, Node) and isinstance(value_of(first), torch.Tensor) else ()
    if node.op == "call_module":
        return ()
    name = _name_of(target)
    return op_tables.SIZES_OF.get(name, ()) if name else ()


def _name_of(target: Any) -> str | None:
    """Return the name of an operator, or of a function or method that torch defines; ``None`` for all others."""
    if not isinstance(target, (OpOverload, OpOverloadPacket)):
        return torch_name(target)
    schema = target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name
    return str(schema).removeprefix("aten::")


def _is_plain(argument: Node) -> bool:
    """Whether an argument is a strided tensor or unknown; sparse and nested tensors keep their sizes in memory."""
    value = value_of(argument)
    if value is None:
        return True
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


# ---------------------------------------------------------------- views


def base_of_view(node: Node, effect: Effects, root: nn.Module, known: Known) -> Node | None:
    """Return the tensor that ``node`` is a view of, or ``None`` if the node may read memory.

    Args:
        node: a node.
        effect: what it does.
        root: the module that owns the graph's attributes.
        known: node -> whether it yields a tuple, as far as that has been answered.
    """
    first = first_argument(node)
    if len(first) != 1 or effect.aliases != first or effect.writes or effect.reads_state or not effect.known:
        return None
    if effect.random or effect.impure or effect.check or effect.ambient:
        return None
    (base,) = first
    return base if _is_strided(base) and _only_refers(node, base, root, known) else None


def _only_refers(node: Node, base: Node, root: nn.Module, known: Known) -> bool:
    target: Any = node.target
    if node.op == "call_module" or node.kwargs.keys() & {"out", "inplace"}:
        return False
    if target is operator.getitem:
        return _is_basic(node.args[1]) and _is_tensor(base, root, known)
    if target is getattr:
        return node.args[1] in op_tables.VIEW_ATTRIBUTES and _is_tensor(base, root, known)
    if str(getattr(target, "__module__", "")).startswith("torch.nn"):  # F.unfold copies
        return False
    return _name_of(target) in op_tables.VIEWS


def _is_tensor(base: Node, root: nn.Module, known: Known) -> bool:
    value = value_of(base)
    if value is not None:
        return isinstance(value, torch.Tensor)
    return is_tuple(base, root, known) is False and value_kind(base, root) is ValueKind.TENSOR


def _is_basic(index: object) -> bool:
    """Whether an index makes a view: numbers, slices, None and Ellipsis do, tensors copy."""
    items = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or type(i) is int or _is_number(i) or isinstance(i, slice) for i in items)


def _is_number(index: object) -> bool:
    return isinstance(index, Node) and isinstance(value_of(index), (int, torch.SymInt))


def _is_strided(base: Node) -> bool:
    """Whether a tensor is strided or of unknown layout; ops on sparse tensors copy."""
    value = value_of(base)
    return not isinstance(value, torch.Tensor) or value.layout == torch.strided
