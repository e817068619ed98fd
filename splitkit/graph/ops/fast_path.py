"""Find the effects of most nodes by one lookup: their target only computes, or returns a view of its first argument."""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit._torch import inputs_of
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.declared import QUICK, declared_facts
from splitkit.graph.ops.facts import PURE, Effects, Facts, replace_effects
from splitkit.graph.ops.functions import is_ambient, is_pure_python, signature_facts, torch_name
from splitkit.graph.ops.schemas import named_facts, schema_facts
from splitkit.graph.ops.tuples import find_attribute, is_iterator, is_stock, is_sum, is_tuple
from splitkit.graph.ops.value_kinds import Memo, ValueKind, follow, may_be_array, may_pass_out, value_kind
from splitkit.graph.storages import value_of

_Known = tuple[object, bool, bool, bool]
# In `QUICK`: id(target) -> (target, is it a view of its first argument, must that and the result be known as tensors,
# is the result no tuple?); by identity, as the hash of an operator is slow. The target is kept alive, so that its id
# is not given to another.


def quick_effects(node: Node, root: nn.Module, memo: Memo) -> Effects | None:
    """Return the effects of a node that calls no module if its target decides them, else ``None``."""
    target = node.target
    known = QUICK.get(id(target)) or _learn(target)
    if known is None:
        return None
    _, is_view, wants_tensors, _ = known
    kwargs = node.kwargs
    if kwargs and ("out" in kwargs or "inplace" in kwargs):
        return None
    if wants_tensors and not _is_about_tensors(node) and not _takes_single_values(node, root, memo):
        return _joined(node, root, memo)
    if not is_view:
        return PURE
    first = node.args[0] if node.args else None
    return replace_effects(PURE, aliases=(first,)) if isinstance(first, Node) else None


def _joined(node: Node, root: nn.Module, memo: Memo) -> Effects | None:
    """Return the effects of a sum of tuples, which holds their items; ``None`` if it may be another sum."""
    if (node.target is not operator.add and node.target is not operator.mul) or any(map(is_iterator, inputs_of(node))):
        return None
    if value_of(node) is None and _has_literal(node):
        memo.tuples[node] = True
    return replace_effects(PURE, aliases=tuple(inputs_of(node))) if is_tuple(node, root, memo.tuples) else None


def _has_literal(node: Node) -> bool:
    """Whether one of the arguments is a literal tuple or list."""
    return any(isinstance(a, (tuple, list)) for a in node.args)


def _learn(target: Any) -> _Known | None:
    known: _Known | None
    if isinstance(target, (OpOverloadPacket, HigherOrderOperator)) or declared_facts(target) is not None:
        return None
    if isinstance(target, OpOverload):
        facts = schema_facts(target)
        known = (target, bool(facts.aliases), False, not facts.yields_tuple) if facts.plain or _is_view(facts) else None
    elif isinstance(target, str):
        known = _of_name(target, wants_tensors=True)
    elif is_pure_python(target) or target is operator.getitem:
        known = (target, target is operator.getitem, True, False)
    else:
        known = _of_name(target, wants_tensors=False)
    if known is not None:  # users' functions, which may hold on to tensors, are not remembered
        QUICK[id(target)] = known
    return known


def _is_view(facts: Facts) -> bool:
    """Whether a callable returns its first argument or a view of it, and does nothing else."""
    effects = facts.writes or facts.everything or facts.random or facts.impure or facts.check or facts.ambient
    return not effects and not facts.rule and [position for position, _ in facts.aliases] == [0]


def _of_name(target: Any, wants_tensors: bool) -> _Known | None:
    """Return what the name of a function or method of torch says."""
    name = torch_name(target)
    if name is None or name in _NOT_PLAIN or is_ambient(target):
        return None
    if isinstance(getattr(target, "__self__", None), logging.Logger):
        return None
    facts = signature_facts(target, name)
    if facts.rule or "inplace" in facts.names or "out" in facts.names:
        return None
    single = name not in _TUPLES and name not in op_tables.MAKE_FOREIGN and "return_indices" not in facts.names
    if name in op_tables.ALIASING:
        return target, True, wants_tensors, single and not op_tables.ALIASING[name]
    if name in op_tables.FUNCTIONS:
        return target, False, wants_tensors, single and not op_tables.FUNCTIONS[name]
    overloads = named_facts(name)
    if not overloads or not all(f.plain or _is_view(f) for f in overloads):
        return None
    single = single and not any(f.yields_tuple for f in overloads)
    return target, any(f.aliases for f in overloads), wants_tensors, single


_TUPLES = frozenset((*op_tables.TUPLE_IF, "where", "size", "stride", "atleast_1d", "atleast_2d", "atleast_3d"))
_NOT_PLAIN = frozenset(
    (
        *op_tables.CALLS_BACK,
        *op_tables.CHECKS,
        *op_tables.GENERATOR_STATE,
        *op_tables.IN_PLACE_METHODS,
        "retain_grad",
        "requires_grad_",
        "sort",
    )
)


def _is_about_tensors(node: Node) -> bool:
    """Whether the subject of a method, or the result of a function, is a tensor or a symbolic number by its meta."""
    subject = node
    if node.op == "call_method" or node.target is operator.getitem:
        first = node.args[0] if node.args else None
        if not isinstance(first, Node):
            return False
        subject = first
    value = value_of(subject)
    return value is not None and isinstance(value, _TENSORS)  # the latter is slow for what is none of them


def _takes_single_values(node: Node, root: nn.Module, memo: Memo) -> bool:
    """Whether the arguments of a node without values come from ops that yield only tensors and numbers."""
    if node.op == "call_method":
        subject = node.args[0] if node.args else None
        name = str(node.target)
        if not hasattr(torch.Tensor, name) or not isinstance(subject, Node) or may_pass_out(node, name):
            return False
        if not _is_single(subject, root, memo):
            return False
        if QUICK[id(node.target)][3] and not node.kwargs and value_of(node) is None and not is_iterator(node):
            memo.single[node] = True
        return True
    inputs = node.all_input_nodes
    if node.target is operator.getitem:
        if node.args[0] in inputs and all(map(memo.single.get, inputs)):
            if value_of(node) is None and is_tuple(inputs[0], root, memo.tuples) is False:
                memo.single[node] = True
            return True
        if len(inputs) == 1 and not is_iterator(inputs[0]) and is_tuple(inputs[0], root, memo.tuples):
            return True
        return all(_is_single(n, root, memo) for n in inputs)
    if is_sum(node) and _has_literal(node):
        return False
    single = memo.single
    others = [n for n in inputs if not (single.get(n) or _is_single(n, root, memo))]
    if inputs and inputs[0] not in others:  # the result is assumed to be of the kind of its first argument
        memo.single[node] = True
    # An unknown input may be an array, but is assumed not to be a container.
    return all(n.op == "placeholder" and _says_nothing(n, root, memo) for n in others)


def _says_nothing(value: Node, root: nn.Module, memo: Memo) -> bool:
    """Whether neither a value nor an annotation says that an input is something else than a tensor."""
    return value_of(value) is None and value_kind(value, root, memo.kinds) in (ValueKind.OPEN, ValueKind.TENSOR)


def _is_single(value: Node, root: nn.Module, memo: Memo) -> bool:
    known = memo.single.get(value)
    if known is not None:
        return known
    found = _yields_one(value, root, memo)
    if isinstance(found, Node):
        found = follow(found, lambda node: _yields_one(node, root, memo), memo.single)
    memo.single[value] = found
    return found


def _yields_one(node: Node, root: nn.Module, memo: Memo) -> bool | Node:
    """Return whether a node surely yields one tensor or number, or the node that decides that."""
    value, target = value_of(node), node.target
    if value is not None:
        return isinstance(value, _TENSORS)
    if node.op == "placeholder" or is_iterator(node):
        return False
    if node.op == "get_attr":
        return isinstance(find_attribute(root, target), torch.Tensor)
    if node.op == "call_module":
        return is_stock(find_attribute(root, target)) and is_tuple(node, root, memo.tuples) is False
    source = node.args[0] if node.args else None
    if not node.kwargs and (node.op == "call_function" or (isinstance(source, Node) and memo.single.get(source))):
        known = QUICK.get(id(target)) or _learn(target)
        if known is not None and known[3]:
            return True
    if is_tuple(node, root, memo.tuples) is not False or may_be_array(node, root, memo, or_tensor=True):
        return False
    if target not in (operator.getitem, getattr) or not isinstance(source, Node):
        return True
    return True if is_tuple(source, root, memo.tuples) else source


_TENSORS = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
