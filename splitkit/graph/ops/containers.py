"""Effects of Python functions and methods on lists, dicts and iterators, which they write, join and exhaust."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Node

from splitkit._torch import inputs_of
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import Effects, first_argument, unknown_effects
from splitkit.graph.ops.functions import is_python
from splitkit.graph.ops.module_effects import find_attribute
from splitkit.graph.ops.tuples import Known, is_tuple
from splitkit.graph.symbols import value_of

_ITERATORS: tuple[Any, ...] = (iter, reversed, enumerate, zip, map, filter)
_JOINS = (operator.or_, operator.and_, operator.xor, operator.sub)  # of sets and dicts
_GROWS = (operator.iadd, operator.iconcat, operator.ior, operator.ixor, "__iadd__", "__ior__", "__setitem__")


def container_effects(node: Node, root: nn.Module, known: Known) -> Effects | None:
    """Return the effects of a Python function or method on containers and iterators; ``None`` if it takes neither.

    ``known`` holds the answers of `is_tuple` about the graph.
    """
    target: Any = node.target
    everything = tuple(inputs_of(node))
    if target in _GROWS and is_container(node.args[0], root, known) is not False:
        return Effects(first_argument(node), everything, same_sizes=True)
    if node.op == "call_method":
        return _method(node, root, known)
    if not is_python(node):
        return None
    used_up = first_argument(node) if target is next else tuple(filter(is_iterator, everything))
    if used_up:
        return Effects(used_up, everything)
    if target in (operator.add, operator.mul) and is_tuple(node, root, known):
        return Effects(aliases=everything)
    if target in _JOINS and any(is_container(n, root, known) for n in everything):
        return Effects(aliases=everything)
    return None


def is_container(value: object, root: nn.Module, known: Known) -> bool | None:
    """Whether a value is a list, tuple, dict, set or iterator; ``None`` if that is not known."""
    if not isinstance(value, Node):
        return isinstance(value, (tuple, list, dict))
    yields_tuple = is_tuple(value, root, known)
    if yields_tuple or is_iterator(value):
        return True
    meta = value_of(value)
    if meta is None and value.op == "get_attr":
        meta = find_attribute(root, value.target)
    return yields_tuple if meta is None else isinstance(meta, (dict, set, frozenset, Iterator))


def is_iterator(value: Node) -> bool:
    """Whether a node yields an iterator (``iter``, ``zip`` ...)."""
    if value.op == "call_function" and value.target in _ITERATORS:
        return True
    known = value.meta.get("val")
    return value.target == "__iter__" or (known is not None and isinstance(known, Iterator))


def _method(node: Node, root: nn.Module, known: Known) -> Effects | None:
    kind = is_container(node.args[0], root, known) if node.args else None
    if kind and node.target in op_tables.CONTAINER_READS:
        return Effects(aliases=tuple(node.all_input_nodes))
    # tensors and lists have a `sort`; without readers it is the list's, as a tensor's only returns a result
    may_be_a_list = kind is None and node.target == "sort" and not node.users
    return unknown_effects(node) if kind or may_be_a_list else None
