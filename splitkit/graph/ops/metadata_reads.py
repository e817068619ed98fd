"""Nodes that read a tensor's metadata (sizes, strides, dtype, device) and not its memory.

There are two kinds. A node may ask for sizes only: ``empty_like(a)`` gives the same before and after ``a.neg_()``. Or
it is a view: ``a.view(-1)`` refers to the same memory before and after ``a.neg_()``, and only its readers see what is
there then. Ops that may copy (``reshape``, ``contiguous``, ``to``) and items by a tensor index are not views.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import Effects, argument_nodes, first_argument
from splitkit.graph.ops.functions import torch_name
from splitkit.graph.ops.tuples import Known, is_tuple
from splitkit.graph.ops.value_kinds import ValueKind, value_kind
from splitkit.graph.symbols import value_of

_NAMES = (("self", "input", "tensor"), ("other", "the_template"))  # of the first argument and the second


def sizes_only(node: Node) -> tuple[Node, ...]:
    """Return the arguments of which a node reads only metadata."""
    positions = _positions(node)
    if not positions:
        return ()
    args, kwargs = list[object](node.args), dict[str, object](node.kwargs)
    asked: dict[Node, None] = {}
    for position in positions:
        given = args[position] if position < len(args) else _pop(kwargs, _NAMES[position])
        if position < len(args):
            args[position] = None
        if isinstance(given, Node) and _is_plain(given):
            asked[given] = None
        else:
            args.append(given)
    return tuple(a for a in asked if a not in argument_nodes((args, kwargs)))


def _pop(kwargs: dict[str, object], names: tuple[str, ...]) -> object:
    return next((kwargs.pop(name) for name in names if name in kwargs), None)


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
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        schema = target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name
        return op_tables.SIZES_OF.get(schema.removeprefix("aten::"), ())
    name = torch_name(target)
    return op_tables.SIZES_OF.get(name, ()) if name else ()


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
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        schema = target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name
        return schema.removeprefix("aten::") in op_tables.VIEWS
    if str(getattr(target, "__module__", "")).startswith("torch.nn"):  # F.unfold copies
        return False
    return torch_name(target) in op_tables.VIEWS


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
