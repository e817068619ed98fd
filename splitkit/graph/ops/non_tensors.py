"""Effects of methods of objects that are not tensors: numpy's ``sort`` is in place, others may do anything."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import Effects, unknown_effects
from splitkit.graph.ops.functions import is_python, torch_name
from splitkit.graph.ops.module_effects import find_attribute, is_stock
from splitkit.graph.ops.value_kinds import ValueKind, value_kind
from splitkit.graph.symbols import value_of

_KNOWN = (
    *(torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.UntypedStorage, torch.TypedStorage),
    *(int, float, complex, bool, str, tuple, list, dict, set, frozenset, nn.Module),
)
_OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)


@dataclass(frozen=True)
class Origins:
    """Cached answers about the origins of a graph's values, so that no chain of nodes is followed twice.

    Attributes:
        kinds: node -> the kind of its value.
        arrays: node -> whether it may yield an array.
        arrays_or_tensors: the same, where an input of unknown kind is assumed to be a tensor.
    """

    kinds: dict[Node, ValueKind] = field(default_factory=dict)
    arrays: dict[Node, bool] = field(default_factory=dict)
    arrays_or_tensors: dict[Node, bool] = field(default_factory=dict)


def foreign_effects(node: Node, root: nn.Module, origins: Origins) -> Effects | None:
    """Return the effects of a method of something other than a tensor; ``None`` if it counts as a tensor's method."""
    subject = node.args[0] if node.args else None
    if not isinstance(subject, Node):
        return None
    name = str(node.target)
    if name in op_tables.AMBIENT:
        return None
    kind = value_kind(subject, root, origins.kinds)
    if kind is ValueKind.ARRAY and hasattr(np.ndarray, name):
        return Effects(tuple(node.all_input_nodes), tuple(node.all_input_nodes))
    if not hasattr(torch.Tensor, name) or kind is ValueKind.OBJECT:
        return unknown_effects(node)
    in_place = name in op_tables.IN_PLACE_ELSEWHERE or (name == "add" and not node.users)  # a set's
    if in_place and name != "add" and not node.users and subject.op == "placeholder" and value_of(subject) is None:
        return unknown_effects(node)  # without readers, the call makes sense only in place
    if not (in_place or may_pass_out(node, name)):
        return None
    return unknown_effects(node) if may_be_array(subject, root, origins, or_tensor=in_place) else None


def operand_effects(node: Node, root: nn.Module, origins: Origins) -> Effects | None:
    """Return the effects of a Python operator on an object, which may define it; ``None`` if it takes no object."""
    if node.target is getattr or not any(
        value_kind(n, root, origins.kinds) is ValueKind.OBJECT for n in node.all_input_nodes
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


def may_be_array(value: Node, root: nn.Module, origins: Origins, *, or_tensor: bool) -> bool:
    """Whether a value may be a numpy array, found by following it to its origin: ``numpy()``, an object, unknown code.

    Args:
        value: the node that yields it.
        root: the module that owns the graph's attributes.
        origins: the answers for other nodes.
        or_tensor: whether a tensor supports the call as well; then an unknown input is assumed to be a tensor.
    """
    known = origins.arrays_or_tensors if or_tensor else origins.arrays
    return follow(value, lambda node: _made_array(node, root, origins, or_tensor), known)


def _made_array(value: Node, root: nn.Module, origins: Origins, or_tensor: bool) -> bool | Node:
    """Return whether a node may yield an array, or the argument that decides that."""
    known, target = value_of(value), value.target
    if known is None and value.op == "get_attr":
        known = find_attribute(root, target)
    if known is not None:
        return not isinstance(known, _KNOWN)
    if value.op == "placeholder":
        kind = value_kind(value, root, origins.kinds)
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
