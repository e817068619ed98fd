"""Symbolic sizes: which nodes give a value to the symbols that a tensor's shape is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import Node

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def value_of(node: Node) -> Any:
    """What the node yielded at capture, ``None`` if that is not known: ``meta["val"]`` or ``meta["example_value"]``."""
    meta = node.meta
    return meta["val"] if "val" in meta else meta.get("example_value")


def is_symbolic(value: object) -> bool:
    """Whether a value, or a size of it, is a symbol or made of symbols."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    if isinstance(value, (tuple, list)):
        return any(map(is_symbolic, value))
    return isinstance(value, _SYMBOLIC)


def binders(graph: fx.Graph) -> Mapping[Any, Node]:
    """Symbol -> the first node whose value is that symbol: a placeholder, or the ``sym_size`` of a tensor."""
    found: dict[Any, Node] = {}
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, _SYMBOLIC):
            expression = value.node.expr
            if expression.is_Symbol:
                found.setdefault(expression, node)
    return found


def symbols_of(value: object) -> list[Any]:
    """The symbols in a value and its sizes, by name."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return sorted(free_symbols(value), key=str) if is_symbolic(value) else []
