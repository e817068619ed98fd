"""Does a node yield a tuple? One that does cannot cross a cut as a tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.graph.ops import tables
from splitkit.graph.ops.facts import Facts
from splitkit.graph.ops.modules import bodies, is_stock, lookup
from splitkit.graph.ops.names import is_python, torch_name
from splitkit.graph.ops.schema import fitting, named_facts, packet_facts, schema_facts
from splitkit.graph.symbols import value_of


def is_tuple(node: Node, root: nn.Module | None = None) -> bool | None:
    """Does a node yield a tuple or list (``True``), a single value (``False``), or is that unknown (``None``)?

    ``meta["val"]`` or ``meta["example_value"]`` decides where there is one.
    """
    value = value_of(node)
    if value is not None:
        return isinstance(value, (tuple, list))
    if node.op == "output":
        return _argument(node.args[0], root)
    if node.op == "get_attr":
        found = lookup(root, node.target)
        return None if found is None else isinstance(found, (tuple, list))
    if node.op == "call_module":
        return _module(lookup(root, node.target))
    return _call(node, root) if node.op in ("call_function", "call_method") else None


def _call(node: Node, root: nn.Module | None) -> bool | None:
    target: Any = node.target
    if isinstance(target, OpOverload):
        return schema_facts(target).yields_tuple
    if isinstance(target, HigherOrderOperator):
        return _agreed(_module(b) for b in bodies(node, root).values())
    if isinstance(target, OpOverloadPacket):
        return _overloads(node, packet_facts(target))
    if target is operator.getitem:
        return _item(node, root)
    if is_python(node):
        return _python(node, root)
    name = torch_name(target)
    return None if name is None else _function(node, name)


def _argument(value: object, root: nn.Module | None) -> bool | None:
    return is_tuple(value, root) if isinstance(value, Node) else isinstance(value, (tuple, list))


def _agreed(answers: Iterable[bool | None]) -> bool | None:
    found = set(answers)
    return found.pop() if len(found) == 1 else None


# ---------------------------------------------------------------- Python


def _python(node: Node, root: nn.Module | None) -> bool | None:
    target: Any = node.target
    if target in (tuple, list, zip, divmod, torch.Size, sorted, enumerate, dict, set, frozenset):
        return True
    if target is getattr:
        name = node.args[1] if len(node.args) > 1 else None
        return True if name == "shape" else False if name in tables.SINGLE_ATTRIBUTES else None
    if _is_sum(node):
        return any(_argument(a, root) for a in _operands(node))
    return None if target in (next, iter, reversed, max, min) else False


def _is_sum(node: Node) -> bool:
    sums = (operator.add, operator.mul, operator.concat, operator.iadd, operator.imul)
    return node.op == "call_function" and node.target in sums


def _operands(node: Node) -> list[object]:
    """What a sum of sums is made of; those that it shares are looked into once, or the time would be exponential."""
    leaves: list[object] = []
    seen, left = {node}, [node]
    while left:
        for a in left.pop().args:
            if not isinstance(a, Node):
                leaves.append(a)
            elif a not in seen:
                seen.add(a)
                known = "val" in a.meta or "example_value" in a.meta
                (left if _is_sum(a) and not known else leaves).append(a)
    return leaves


def _item(node: Node, root: nn.Module | None) -> bool | None:
    source, index = node.args[0], node.args[1]
    whole = is_tuple(source, root) if isinstance(source, Node) else None
    if not isinstance(source, Node) or not whole:
        return whole
    if isinstance(index, slice):
        return True
    if source.op == "call_module":  # LSTM yields (output, (h, c)); a graph may nest as it likes
        found = lookup(root, source.target)
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
    if name in tables.TUPLE_IF or "return_indices" in node.kwargs:
        return _flags(node, tables.TUPLE_IF.get(name, (("return_indices", -1),)))
    if name in ("where", "size", "stride") and len(node.args) + len(node.kwargs) == 1:
        return True
    if name in tables.FUNCTIONS:
        return tables.FUNCTIONS[name]
    if name in tables.ALIASING:
        return tables.ALIASING[name]
    if name.startswith("atleast_"):
        return len(node.args) > 1 or isinstance(node.args[0], (tuple, list))
    if name in tables.IN_PLACE_METHODS or name in tables.CHECKS or name in tables.CALLS_BACK:
        return False
    return _overloads(node, named_facts(name))


def _flags(node: Node, flags: Iterable[tuple[str, int]]) -> bool | None:
    values = [node.kwargs.get(k, node.args[i] if 0 <= i < len(node.args) else False) for k, i in flags]
    return None if any(isinstance(v, Node) for v in values) else any(values)


def _overloads(node: Node, overloads: tuple[Facts, ...]) -> bool | None:
    fits = fitting(node, overloads)
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
    if name in tables.TUPLE_MODULES or getattr(m, "return_indices", False):
        return True
    known = name in tables.FRESH_MODULES or name in tables.DROPOUT_MODULES or name in tables.ALIAS_MODULES
    return False if known and name != "Identity" else None
