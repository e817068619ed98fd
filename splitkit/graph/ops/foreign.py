"""Methods of what is no tensor: a numpy array's ``sort`` is in place, an object's ``mul`` may be anything."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.graph.ops import tables
from splitkit.graph.ops.facts import Effects, unknown
from splitkit.graph.ops.kinds import ValueKind, kind_of
from splitkit.graph.ops.modules import is_stock, lookup
from splitkit.graph.ops.names import is_python, torch_name
from splitkit.graph.symbols import value_of

_KNOWN = (
    *(torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.UntypedStorage, torch.TypedStorage),
    *(int, float, complex, bool, str, tuple, list, dict, set, frozenset, nn.Module),
)
_OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)


@dataclass(frozen=True)
class Origins:
    """What is known of where the values of a graph come from, so that no chain is followed twice.

    Attributes:
        kinds: node -> the kind of what it yields.
        arrays: node -> whether it may yield an array.
        arrays_or_tensors: the same, where an input is taken for a tensor.
    """

    kinds: dict[Node, ValueKind] = field(default_factory=dict)
    arrays: dict[Node, bool] = field(default_factory=dict)
    arrays_or_tensors: dict[Node, bool] = field(default_factory=dict)


def foreign_effects(node: Node, root: nn.Module, origins: Origins) -> Effects | None:
    """What a method does that is not one of a tensor; ``None`` if it may be taken for a tensor's."""
    subject = node.args[0] if node.args else None
    if not isinstance(subject, Node):
        return None
    name = str(node.target)
    if name in tables.AMBIENT:
        return None
    kind = kind_of(subject, root, origins.kinds)
    if kind is ValueKind.ARRAY and hasattr(np.ndarray, name):
        return Effects(tuple(node.all_input_nodes), tuple(node.all_input_nodes))
    if not hasattr(torch.Tensor, name) or kind is ValueKind.OBJECT:
        return unknown(node)
    in_place = name in tables.IN_PLACE_ELSEWHERE or (name == "add" and not node.users)  # a set's
    if in_place and name != "add" and not node.users and subject.op == "placeholder" and value_of(subject) is None:
        return unknown(node)  # for what else would it be called?
    if not (in_place or has_out(node, name)):
        return None
    return unknown(node) if may_be_array(subject, root, origins, or_tensor=in_place) else None


def operand_effects(node: Node, root: nn.Module, origins: Origins) -> Effects | None:
    """What one of Python's operators does that is given an object, which may define it; ``None`` if none is."""
    if node.target is getattr or not any(
        kind_of(n, root, origins.kinds) is ValueKind.OBJECT for n in node.all_input_nodes
    ):
        return None
    return None if node.target in _HANDS_ON else unknown(node)


# These hand objects on as they are, or ask for no more than what they are.
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


def has_out(node: Node, name: str) -> bool:
    """Does a node stand where an array's method takes ``out``?"""
    place = 1 + tables.OUT_AFTER.get(name, len(node.args))
    return any(isinstance(a, Node) for a in node.args[place:])


def may_be_array(value: Node, root: nn.Module, origins: Origins, *, or_tensor: bool) -> bool:
    """Follow a value to what made it: a tensor's ``numpy()``, an object, code that is not known?

    Args:
        value: the array or tensor.
        root: the module that owns the graph's attributes.
        origins: the answers for other nodes.
        or_tensor: a tensor could be called in this way as well, and an input is one by far most often.
    """
    known = origins.arrays_or_tensors if or_tensor else origins.arrays
    return followed(value, lambda node: _made_array(node, root, origins, or_tensor), known)


def _made_array(value: Node, root: nn.Module, origins: Origins, or_tensor: bool) -> bool | Node:
    """Whether a node may yield an array; or the argument that decides it."""
    known, target = value_of(value), value.target
    if known is None and value.op == "get_attr":
        known = lookup(root, target)
    if known is not None:
        return not isinstance(known, _KNOWN)
    if value.op == "placeholder":
        kind = kind_of(value, root, origins.kinds)
        return kind is ValueKind.ARRAY or (kind is ValueKind.OPEN and not or_tensor)
    if value.op == "call_module":
        module = lookup(root, target)
        return not is_stock(module) and not isinstance(module, fx.GraphModule)
    if isinstance(target, _OPERATORS):
        return False
    name = torch_name(target)
    if name in tables.MAKE_FOREIGN:
        return True
    if value.op == "call_function" and not is_python(value):
        return name is None
    inputs = value.all_input_nodes  # a method or an operator of an array yields an array
    return inputs[0] if inputs else False


def followed(value: Node, step: Callable[[Node], bool | Node], known: dict[Node, bool]) -> bool:
    """Take steps from node to node until one gives the answer, which is that of all nodes on the way."""
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
