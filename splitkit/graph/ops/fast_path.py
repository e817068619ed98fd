"""Find the effects of most nodes by one lookup: their target only computes, or returns a view of its first argument."""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.graph.ops import op_tables
from splitkit.graph.ops.declared import declared_facts, on_declare
from splitkit.graph.ops.facts import PURE, Effects, Facts, view_effects
from splitkit.graph.ops.functions import is_ambient, is_pure_python, signature_facts, torch_name
from splitkit.graph.ops.schemas import named_facts, schema_facts
from splitkit.graph.storages import value_of

_Known = tuple[object, bool, bool]
# id(target) -> (target, is it a view of its first argument, must that and the result be known as tensors?); by
# identity, as the hash of an operator is slow. The target is kept alive, so that its id is not given to another.
_KNOWN: dict[int, _Known] = {}
on_declare(_KNOWN.clear)


def quick_effects(node: Node) -> Effects | None:
    """Return the effects of a node that calls no module if its target decides them, else ``None``."""
    target = node.target
    known = _KNOWN.get(id(target)) or _learn(target)
    if known is None:
        return None
    _, is_view, wants_tensors = known
    kwargs = node.kwargs
    if kwargs and ("out" in kwargs or "inplace" in kwargs):
        return None
    if wants_tensors and not _is_about_tensors(node):
        return None
    if not is_view:
        return PURE
    first = node.args[0] if node.args else None
    return view_effects(first) if isinstance(first, Node) else None


def _learn(target: Any) -> _Known | None:
    known: _Known | None
    if isinstance(target, (OpOverloadPacket, HigherOrderOperator)) or declared_facts(target) is not None:
        return None
    if isinstance(target, OpOverload):
        facts = schema_facts(target)
        known = (target, bool(facts.aliases), False) if facts.plain or _is_view(facts) else None
    elif isinstance(target, str):
        known = _of_name(target, wants_tensors=True)
    elif is_pure_python(target) or target is operator.getitem:
        known = (target, target is operator.getitem, True)
    else:
        known = _of_name(target, wants_tensors=False)
    if known is not None:  # users' functions, which may hold on to tensors, are not remembered
        _KNOWN[id(target)] = known
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
    if name in op_tables.ALIASING:
        return target, True, wants_tensors
    if name in op_tables.FUNCTIONS:
        return target, False, wants_tensors
    overloads = named_facts(name)
    if not overloads or not all(f.plain or _is_view(f) for f in overloads):
        return None
    return target, any(f.aliases for f in overloads), wants_tensors


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


_TENSORS = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
