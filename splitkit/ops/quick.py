"""Most nodes compute something fresh and do nothing else, and their target says so: one dictionary lookup."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.ops import tables
from splitkit.ops.ambient import is_ambient
from splitkit.ops.declared import declared_facts, on_declare
from splitkit.ops.names import computes, signature_facts, torch_name
from splitkit.ops.schema import named_facts, schema_facts

# id(target) -> (target, always, on tensors). By identity, as the hash of an operator is slow; the target is kept alive
# so that its id is not given to another.
_KNOWN: dict[int, tuple[object, bool, bool]] = {}
on_declare(_KNOWN.clear)


def is_surely_pure(node: Node) -> bool:
    """Whether `effects_of` would find nothing. ``False`` means: look closer."""
    if node.op == "call_module":
        return False
    target = node.target
    known = _KNOWN.get(id(target)) or _learn(target)
    if known[1]:
        return not node.kwargs or not ("out" in node.kwargs or "inplace" in node.kwargs)
    return known[2] and not node.kwargs and _is_about_tensors(node)


def _learn(target: Any) -> tuple[object, bool, bool]:
    known = (target, _is_pure(target), _is_pure_on_tensors(target))
    if any(known[1:]) or isinstance(target, OpOverload):  # not of users' functions, which may hold on to tensors
        _KNOWN[id(target)] = known
    return known


def _is_pure(target: Any) -> bool:
    """Pure whatever the arguments are, but for ``out`` and ``inplace``."""
    if isinstance(target, str) or declared_facts(target) is not None:
        return False
    if isinstance(target, OpOverload):
        return schema_facts(target).plain
    return not computes(target) and _is_plain_name(target)


def _is_pure_on_tensors(target: Any) -> bool:
    """Pure but for lists, dicts and iterators."""
    if isinstance(target, OpOverload) or declared_facts(target) is not None:
        return False
    return _is_plain_name(target) if isinstance(target, str) else computes(target)


def _is_plain_name(target: Any) -> bool:
    name = None if isinstance(target, (OpOverloadPacket, HigherOrderOperator)) else torch_name(target)
    if name is None or name in _NOT_PLAIN or is_ambient(target):
        return False
    if isinstance(getattr(target, "__self__", None), logging.Logger):
        return False
    facts = signature_facts(target, name)
    if facts.rule or "inplace" in facts.names or "out" in facts.names:
        return False
    overloads = named_facts(name)
    return name in tables.FUNCTIONS or (bool(overloads) and all(f.plain for f in overloads))


_NOT_PLAIN = frozenset(
    (
        *tables.CALLS_BACK,
        *tables.CHECKS,
        *tables.GENERATOR_STATE,
        *tables.IN_PLACE_METHODS,
        *tables.ALIASING,
        "retain_grad",
        "requires_grad_",
        "sort",
    )
)


def _is_about_tensors(node: Node) -> bool:
    """What it takes first and what it yields are tensors or symbolic sizes, by their meta."""
    first = node.args[0] if node.args else None
    return isinstance(first, Node) and _has_value(first) and _has_value(node)


def _has_value(node: Node) -> bool:
    value = node.meta.get("val", node.meta.get("example_value"))
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
