"""Views that only take a reference: they read sizes and strides, and never the memory itself.

``a.view(-1)`` gives the same tensor before and after ``a.neg_()``; who reads it later sees what is there then. Ops that
may copy (``reshape``, ``contiguous``, ``to``) are none of these, nor are items by an index that is a tensor.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.graph.ops import tables
from splitkit.graph.ops.facts import Effects, first_argument
from splitkit.graph.ops.kinds import ValueKind, kind_of
from splitkit.graph.ops.names import torch_name
from splitkit.graph.ops.tuples import Known, is_tuple
from splitkit.graph.symbols import value_of


def base_of_view(node: Node, effect: Effects, root: nn.Module, known: Known) -> Node | None:
    """The tensor that ``node`` takes a reference to and reads nothing of; ``None`` if it may read.

    Args:
        node: a node.
        effect: what it does.
        root: the module that owns the graph's attributes.
        known: what is known of which nodes yield tuples.
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
        return node.args[1] in tables.VIEW_ATTRIBUTES and _is_tensor(base, root, known)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        schema = target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name
        return schema.removeprefix("aten::") in tables.VIEWS
    if str(getattr(target, "__module__", "")).startswith("torch.nn"):  # F.unfold copies
        return False
    return torch_name(target) in tables.VIEWS


def _is_tensor(base: Node, root: nn.Module, known: Known) -> bool:
    value = value_of(base)
    if value is not None:
        return isinstance(value, torch.Tensor)
    return is_tuple(base, root, known) is False and kind_of(base, root) is ValueKind.TENSOR


def _is_basic(index: object) -> bool:
    """Is it an index that makes a view: numbers, slices, None, Ellipsis?"""
    items = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or type(i) is int or _is_number(i) or isinstance(i, slice) for i in items)


def _is_number(index: object) -> bool:
    return isinstance(index, Node) and isinstance(value_of(index), (int, torch.SymInt))


def _is_strided(base: Node) -> bool:
    """Sparse tensors copy; what is not known is taken to be strided."""
    value = value_of(base)
    return not isinstance(value, torch.Tensor) or value.layout == torch.strided
