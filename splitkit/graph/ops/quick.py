"""Most nodes compute something fresh, or a view of their first argument, and their target says so: one lookup."""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.graph.ops import tables
from splitkit.graph.ops.barriers import is_ambient
from splitkit.graph.ops.containers import is_iterator
from splitkit.graph.ops.declared import declared_facts, on_declare
from splitkit.graph.ops.facts import PURE, Effects, Facts, view_of
from splitkit.graph.ops.foreign import followed, has_out, may_be_array
from splitkit.graph.ops.kinds import ValueKind, kind_of
from splitkit.graph.ops.memo import Memo
from splitkit.graph.ops.modules import is_stock, lookup
from splitkit.graph.ops.names import computes, signature_facts, torch_name
from splitkit.graph.ops.schema import named_facts, schema_facts
from splitkit.graph.ops.tuples import is_sum, is_tuple
from splitkit.graph.symbols import value_of

_Known = tuple[object, bool, bool, bool]
# id(target) -> (target, is it a view of its first argument, must that and the result be known as tensors, is the result
# no tuple?); by identity, as the hash of an operator is slow. The target is kept alive, so that its id is not given to
# another.
_KNOWN: dict[int, _Known] = {}
on_declare(_KNOWN.clear)


def quick_effects(node: Node, root: nn.Module, memo: Memo) -> Effects | None:
    """What a node does, if its target alone says so; ``None`` means: look closer."""
    if node.op == "call_module":
        return None
    target = node.target
    known = _KNOWN.get(id(target)) or _learn(target)
    if known is None:
        return None
    _, is_view, wants_tensors, _ = known
    kwargs = node.kwargs
    if kwargs and ("out" in kwargs or "inplace" in kwargs):
        return None
    if wants_tensors and not _is_about_tensors(node) and not _takes_single_values(node, root, memo):
        return None
    if not is_view:
        return PURE
    first = node.args[0] if node.args else None
    return view_of(first) if isinstance(first, Node) else None


def _learn(target: Any) -> _Known | None:
    known: _Known | None
    if isinstance(target, (OpOverloadPacket, HigherOrderOperator)) or declared_facts(target) is not None:
        return None
    if isinstance(target, OpOverload):
        facts = schema_facts(target)
        known = (target, bool(facts.aliases), False, not facts.yields_tuple) if facts.plain or _is_view(facts) else None
    elif isinstance(target, str):
        known = _of_name(target, wants_tensors=True)
    elif computes(target) or target is operator.getitem:
        known = (target, target is operator.getitem, True, False)
    else:
        known = _of_name(target, wants_tensors=False)
    if known is not None:  # users' functions, which may hold on to tensors, are not remembered
        _KNOWN[id(target)] = known
    return known


def _is_view(facts: Facts) -> bool:
    """Does it pass on its first argument, and do nothing else?"""
    effects = facts.writes or facts.everything or facts.random or facts.impure or facts.check or facts.ambient
    return not effects and not facts.rule and [position for position, _ in facts.aliases] == [0]


def _of_name(target: Any, wants_tensors: bool) -> _Known | None:
    """What the name of a function or method of torch says."""
    name = torch_name(target)
    if name is None or name in _NOT_PLAIN or is_ambient(target):
        return None
    if isinstance(getattr(target, "__self__", None), logging.Logger):
        return None
    facts = signature_facts(target, name)
    if facts.rule or "inplace" in facts.names or "out" in facts.names:
        return None
    single = name not in _TUPLES and name not in tables.MAKE_FOREIGN and "return_indices" not in facts.names
    if name in tables.ALIASING:
        return target, True, wants_tensors, single and not tables.ALIASING[name]
    if name in tables.FUNCTIONS:
        return target, False, wants_tensors, single and not tables.FUNCTIONS[name]
    overloads = named_facts(name)
    if not overloads or not all(f.plain or _is_view(f) for f in overloads):
        return None
    single = single and not any(f.yields_tuple for f in overloads)
    return target, any(f.aliases for f in overloads), wants_tensors, single


_TUPLES = frozenset((*tables.TUPLE_IF, "where", "size", "stride", "atleast_1d", "atleast_2d", "atleast_3d"))
_NOT_PLAIN = frozenset(
    (
        *tables.CALLS_BACK,
        *tables.CHECKS,
        *tables.GENERATOR_STATE,
        *tables.IN_PLACE_METHODS,
        "retain_grad",
        "requires_grad_",
        "sort",
    )
)


def _is_about_tensors(node: Node) -> bool:
    """Is a method's tensor one, or what a Python function computes? By their meta; sizes will do as well."""
    subject = node
    if node.op == "call_method" or node.target is operator.getitem:
        first = node.args[0] if node.args else None
        if not isinstance(first, Node):
            return False
        subject = first
    return isinstance(value_of(subject), _TENSORS)


def _takes_single_values(node: Node, root: nn.Module, memo: Memo) -> bool:
    """The same for graphs without values: do its arguments come from ops that yield nothing but tensors and numbers?"""
    if node.op == "call_method":
        subject = node.args[0] if node.args else None
        name = str(node.target)
        if not hasattr(torch.Tensor, name) or not isinstance(subject, Node) or has_out(node, name):
            return False
        return _is_single(subject, root, memo)
    inputs = node.all_input_nodes
    if node.target is operator.getitem:
        if len(inputs) == 1 and not is_iterator(inputs[0]) and is_tuple(inputs[0], root, memo.tuples):
            return True
        return all(_is_single(n, root, memo) for n in inputs)
    if is_sum(node) and any(isinstance(a, (tuple, list)) for a in node.args):
        return False
    others = [n for n in inputs if not _is_single(n, root, memo)]
    if inputs and inputs[0] not in others:  # whatever it is taken for, the result is taken for
        memo.single[node] = True
    # An input that nothing is known of may be an array, but is taken for no container.
    return all(n.op == "placeholder" and _says_nothing(n, root, memo) for n in others)


def _says_nothing(value: Node, root: nn.Module, memo: Memo) -> bool:
    """Whether neither a value nor an annotation says that an input is something else than a tensor."""
    return value_of(value) is None and kind_of(value, root, memo.origins.kinds) in (ValueKind.OPEN, ValueKind.TENSOR)


def _is_single(value: Node, root: nn.Module, memo: Memo) -> bool:
    known = memo.single.get(value)
    return followed(value, lambda node: _yields_one(node, root, memo), memo.single) if known is None else known


def _yields_one(node: Node, root: nn.Module, memo: Memo) -> bool | Node:
    """Whether a node is sure to yield one tensor or number; or the node that decides it."""
    value, target = value_of(node), node.target
    if value is not None:
        return isinstance(value, _TENSORS)
    if node.op == "placeholder" or is_iterator(node):
        return False
    if node.op == "get_attr":
        return isinstance(lookup(root, target), torch.Tensor)
    if node.op == "call_module":
        return is_stock(lookup(root, target)) and is_tuple(node, root, memo.tuples) is False
    source = node.args[0] if node.args else None
    if not node.kwargs and (node.op == "call_function" or (isinstance(source, Node) and memo.single.get(source))):
        known = _KNOWN.get(id(target)) or _learn(target)
        if known is not None and known[3]:
            return True
    if is_tuple(node, root, memo.tuples) is not False or may_be_array(node, root, memo.origins, or_tensor=True):
        return False
    if target not in (operator.getitem, getattr) or not isinstance(source, Node):
        return True
    return True if is_tuple(source, root, memo.tuples) else source


_TENSORS = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
