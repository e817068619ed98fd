"""Symbolic sizes as plain data, which can be saved and evaluated without the shape environment that they come from.

An expression is a number, the name of a symbol, or a function with its arguments::

    s0 * (s1 // 2)        ("Mul", "s0", ("FloorDiv", "s1", 2))
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import torch

Expression: TypeAlias = int | str | tuple[Any, ...]

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: math.prod(factors),
    "Pow": lambda base, exponent: Fraction(base) ** exponent,
    "Rational": Fraction,
    "Half": lambda: Fraction(1, 2),
    "Abs": abs,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": lambda base, divisor, modulus: base // divisor % modulus,
    "Max": max,
    "Min": min,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": lambda *terms: all(terms),
    "Or": lambda *terms: any(terms),
    "Not": operator.not_,
    "Where": lambda condition, then, otherwise: then if condition else otherwise,
    "BooleanTrue": lambda: True,
    "BooleanFalse": lambda: False,
}
"""Name of a class of sympy or torch -> what it computes from numbers; ``Mod`` and ``FloorDiv`` have sizes only."""

_INFIX = {"Add": "+", "Mul": "*", "Pow": "**", "FloorDiv": "//", "Mod": "%", "PythonMod": "%", "Equality": "=="}
_INFIX |= {"Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=", "StrictGreaterThan": ">", "GreaterThan": ">="}


def expression_of(size: Any) -> Expression:
    """Return a size, or a condition on sizes, as data.

    Args:
        size: an int, a symbolic number of torch, or an expression of sympy.
    """
    if isinstance(size, int):
        return size
    if isinstance(size, torch.SymInt | torch.SymBool | torch.SymFloat):
        return expression_of(size.node.expr)  # 2.11, 2.13, 2.15
    if size.is_Symbol:
        return str(size)
    if size.is_Integer:
        return int(size)
    if size.is_Rational:
        return ("Rational", int(size.p), int(size.q))
    return (type(size).__name__, *map(expression_of, size.args))


def evaluated(expression: Expression, sizes: Mapping[str, int]) -> int:
    """Return the value of an expression.

    Args:
        expression: what `expression_of` returned.
        sizes: name of a symbol -> its size.

    Raises:
        LookupError: for a symbol without a size, or a function that is not in `FUNCTIONS`; names it.
    """
    value = _evaluated(expression, sizes)
    if value != int(value):
        raise LookupError(f"{expression} is {value}")
    return int(value)


def symbols_in(expression: Expression) -> Iterator[str]:
    """Yield the names of the symbols in an expression, some of them several times."""
    if isinstance(expression, str):
        yield expression
    elif isinstance(expression, tuple):
        for argument in expression[1:]:
            yield from symbols_in(argument)


def is_known(expression: Expression) -> bool:
    """Whether every function in an expression can be evaluated."""
    if not isinstance(expression, tuple):
        return True
    return expression[0] in FUNCTIONS and all(map(is_known, expression[1:]))


def text_of(expression: Expression, names: Mapping[str, str]) -> str:
    """Return an expression as it is written in Python.

    Args:
        expression: what `expression_of` returned.
        names: symbol -> what to call it; its own name by default.
    """
    if not isinstance(expression, tuple):
        return names.get(expression, expression) if isinstance(expression, str) else str(expression)
    name, *arguments = expression
    texts = [text_of(argument, names) for argument in arguments]
    if name not in _INFIX:
        return f"{name}({', '.join(texts)})"
    grouped = [f"({t})" if isinstance(a, tuple) else t for a, t in zip(arguments, texts, strict=True)]
    return f" {_INFIX[name]} ".join(grouped)


def _evaluated(expression: Expression, sizes: Mapping[str, int]) -> Any:
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        if expression not in sizes:
            raise LookupError(expression)
        return sizes[expression]
    name, *arguments = expression
    if name not in FUNCTIONS:
        raise LookupError(name)
    return FUNCTIONS[name](*(_evaluated(argument, sizes) for argument in arguments))
