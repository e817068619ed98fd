"""Symbolic sizes: find the nodes that define a shape's symbols, and replace symbols by numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import Node

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def value_of(node: Node) -> Any:
    """Return the node's value at capture: ``meta["val"]``, else ``meta["example_value"]``, else ``None``."""
    meta = node.meta
    return meta["val"] if "val" in meta else meta.get("example_value")


def is_symbolic(value: object) -> bool:
    """Whether a value or one of its sizes is a symbolic expression."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    if isinstance(value, (tuple, list)):
        return any(map(is_symbolic, value))
    return isinstance(value, _SYMBOLIC)


def symbol_nodes(graph: fx.Graph) -> Mapping[Any, Node]:
    """Return symbol -> the first node whose value is that symbol: a placeholder, or the ``sym_size`` of a tensor."""
    found: dict[Any, Node] = {}
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, _SYMBOLIC):
            expression = value.node.expr
            if expression.is_Symbol:
                found.setdefault(expression, node)
    return found


def symbols_of(value: object) -> list[Any]:
    """Return the symbols in a value and its sizes, sorted by name."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return sorted(free_symbols(value), key=str) if is_symbolic(value) else []


def plain_size(value: int | torch.SymInt, sizes: Mapping[str, int]) -> int:
    """Return a size as a plain int.

    A symbol is replaced by its entry in ``sizes``, else by its value at capture (its hint). A size that depends on data
    (``u0``) has no hint: it is replaced by the upper bound that the model states with ``torch._check(u0 <= 128)``.

    Raises:
        LookupError: with the names of the symbols that have none of these.
    """
    if isinstance(value, int):
        return value
    node: Any = value.node  # SymNode.expr, .shape_env, .hint: 2.11, 2.13, 2.15
    if not sizes and node.hint is not None:
        return int(node.hint)
    known = {symbol: _size_of_symbol(symbol, node.shape_env, sizes) for symbol in node.expr.free_symbols}
    unknown = sorted(str(symbol) for symbol, size in known.items() if size is None)
    if unknown:
        raise LookupError(*unknown)
    return int(node.expr.subs(known))


def assumed_upper_bounds(value: int | torch.SymInt, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return symbol name -> upper bound, for the data-dependent symbols that `plain_size` replaces by a bound."""
    if isinstance(value, int) or value.node.hint is not None:  # SymNode.hint: 2.11, 2.13, 2.15
        return {}
    node: Any = value.node
    open_ = (s for s in node.expr.free_symbols if s not in node.shape_env.backed_var_to_val)
    found = {str(symbol): _size_of_symbol(symbol, node.shape_env, sizes) for symbol in open_}
    return {name: size for name, size in sorted(found.items()) if size is not None}


def _size_of_symbol(symbol: Any, shape_env: Any, sizes: Mapping[str, int]) -> int | None:
    if str(symbol) in sizes:
        return sizes[str(symbol)]
    if symbol in shape_env.backed_var_to_val:  # 2.11, 2.13, 2.15
        return int(shape_env.backed_var_to_val[symbol])
    upper = shape_env.var_to_range[symbol].upper  # 2.11, 2.13, 2.15
    return int(upper) if upper.is_number and upper.is_finite and upper < 2**48 else None
