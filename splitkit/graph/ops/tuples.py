"""Find out whether a node yields a tuple; a tuple cannot cross between parts as a tensor does."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import Facts
from splitkit.graph.ops.functions import is_python, torch_name
from splitkit.graph.ops.module_effects import body_modules, find_attribute, is_stock
from splitkit.graph.ops.schemas import matching_overloads, named_facts, packet_facts, schema_facts
from splitkit.graph.symbols import value_of

Known = dict[Node, bool | None]
"""Node -> an answer of `is_tuple`; valid while the graph does not change."""


def is_tuple(node: Node, root: nn.Module | None = None, known: Known | None = None) -> bool | None:
    """Return whether a node yields a tuple or list (``True``) or a single value (``False``); ``None`` if unknown.

    ``meta["val"]`` or ``meta["example_value"]`` decides if there is one.

    Args:
        node: a node of any graph.
        root: the module that its ``call_module`` and ``get_attr`` targets belong to.
        known: the answers for other nodes, a cache that this call adds to. With one dictionary for all nodes of a
            graph, all answers take time linear in its edges.
    """
    known = {} if known is None else known
    left = [node]
    while left:  # not recursive: a chain of operators may be longer than Python's recursion limit
        last = left[-1]
        if last not in known and (before := [n for n in _stands_on(last) if n not in known]):
            left += before
            continue
        if left.pop() not in known:
            known[last] = _answer(last, root, known)
    return known[node]


def _stands_on(node: Node) -> Iterable[Node]:
    """Return the arguments whose answers decide the answer for a node."""
    if value_of(node) is not None:
        return ()
    if node.op == "output" or node.target is operator.getitem:
        return (a for a in node.args[:1] if isinstance(a, Node))
    return (a for a in node.args if isinstance(a, Node)) if is_sum(node) else ()


def _answer(node: Node, root: nn.Module | None, known: Known) -> bool | None:
    value = value_of(node)
    if value is not None:
        return isinstance(value, (tuple, list))
    if node.op == "output":
        return _argument(node.args[0], known)
    if node.op == "get_attr":
        found = find_attribute(root, node.target)
        return None if found is None else isinstance(found, (tuple, list))
    if node.op == "call_module":
        return _module(find_attribute(root, node.target))
    return _call(node, root, known) if node.op in ("call_function", "call_method") else None


def _call(node: Node, root: nn.Module | None, known: Known) -> bool | None:
    target: Any = node.target
    if isinstance(target, OpOverload):
        return schema_facts(target).yields_tuple
    if isinstance(target, HigherOrderOperator):
        return _agreed(_module(b) for b in body_modules(node, root).values())
    if isinstance(target, OpOverloadPacket):
        return _overloads(node, packet_facts(target))
    if target is operator.getitem:
        return _item(node, root, known)
    if is_python(node):
        return _python(node, known)
    name = torch_name(target)
    return None if name is None else _function(node, name)


def _argument(value: object, known: Known) -> bool | None:
    return known[value] if isinstance(value, Node) else isinstance(value, (tuple, list))


def _agreed(answers: Iterable[bool | None]) -> bool | None:
    found = set(answers)
    return found.pop() if len(found) == 1 else None


# ---------------------------------------------------------------- Python


def _python(node: Node, known: Known) -> bool | None:
    target: Any = node.target
    if target in (tuple, list, zip, divmod, torch.Size, sorted, enumerate, dict, set, frozenset):
        return True
    if target is getattr:
        name = node.args[1] if len(node.args) > 1 else None
        return True if name == "shape" else False if name in op_tables.SINGLE_ATTRIBUTES else None
    if is_sum(node):
        return any(_argument(a, known) for a in node.args)
    return None if target in (next, iter, reversed, max, min) else False


def is_sum(node: Node) -> bool:
    """Whether a node adds or repeats values that may be tuples or lists."""
    return node.op == "call_function" and node.target in _SUMS


_SUMS = (operator.add, operator.mul, operator.concat, operator.iadd, operator.imul)


def _item(node: Node, root: nn.Module | None, known: Known) -> bool | None:
    source, index = node.args[0], node.args[1]
    whole = known[source] if isinstance(source, Node) else None
    if not isinstance(source, Node) or not whole:
        return whole
    if isinstance(index, slice):
        return True
    if source.op == "call_module":  # LSTM yields (output, (h, c)); a graph may nest as it likes
        found = find_attribute(root, source.target)
        return index in (1, -1) if isinstance(found, nn.LSTM) else None if isinstance(found, fx.GraphModule) else False
    if isinstance(source.target, OpOverload):
        kinds = ["List[" in str(r.type) for r in source.target._schema.returns]
        return len(kinds) > 1 and isinstance(index, int) and -len(kinds) <= index < len(kinds) and kinds[index]
    # torch's functions and methods yield flat tuples; anything else may nest
    return False if source.op in ("call_function", "call_method") and torch_name(source.target) else None


# ---------------------------------------------------------------- torch


def _function(node: Node, name: str) -> bool | None:
    if node.target is F.embedding_bag:  # not torch.embedding_bag
        return False
    if name in op_tables.TUPLE_IF or "return_indices" in node.kwargs:
        return _flags(node, op_tables.TUPLE_IF.get(name, (("return_indices", -1),)))
    if name in ("where", "size", "stride") and len(node.args) + len(node.kwargs) == 1:
        return True
    if name in op_tables.FUNCTIONS:
        return op_tables.FUNCTIONS[name]
    if name in op_tables.ALIASING:
        return op_tables.ALIASING[name]
    if name.startswith("atleast_"):
        return len(node.args) > 1 or isinstance(node.args[0], (tuple, list))
    if name in op_tables.IN_PLACE_METHODS or name in op_tables.CHECKS or name in op_tables.CALLS_BACK:
        return False
    return _overloads(node, named_facts(name))


def _flags(node: Node, flags: Iterable[tuple[str, int]]) -> bool | None:
    values = [node.kwargs.get(k, node.args[i] if 0 <= i < len(node.args) else False) for k, i in flags]
    return None if any(isinstance(v, Node) for v in values) else any(values)


def _overloads(node: Node, overloads: tuple[Facts, ...]) -> bool | None:
    fits = matching_overloads(node, overloads)
    if len({f.yields_tuple for f in fits}) > 1:  # a node is more often a tensor than a number: torch.max(x, y)
        fits = tuple(f for f in fits if _takes_tensors(node, f)) or fits
    return _agreed(f.yields_tuple for f in fits)


def _takes_tensors(node: Node, facts: Facts) -> bool:
    return all("Tensor" in k for k, a in zip(facts.types, node.args, strict=False) if isinstance(a, Node))


def _module(m: object) -> bool | None:
    if isinstance(m, fx.GraphModule):
        return next((is_tuple(n, m) for n in m.graph.nodes if n.op == "output"), None)
    if not is_stock(m):
        return None
    if isinstance(m, nn.Sequential):
        return _module(m[-1]) if len(m) else None
    name = type(m).__name__
    if name in op_tables.TUPLE_MODULES or getattr(m, "return_indices", False):
        return True
    known = name in op_tables.FRESH_MODULES or name in op_tables.DROPOUT_MODULES or name in op_tables.ALIAS_MODULES
    return False if known and name != "Identity" else None
