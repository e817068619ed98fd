"""One-line texts of bounded length for objects that hold graphs and models."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

_SHOWN = 8  # lines that `few` yields in full
_LONG = 60  # characters of a value that is not written out among others


class _Brief(reprlib.Repr):
    """A ``repr`` that shortens long texts and collections, and names only the class of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 2
        self.maxstring = self.maxother = 80

    def repr_instance(self, x: Any, level: int) -> str:
        """Return the text of an object that is not a builtin."""
        if is_dataclass(x) and not isinstance(x, type):
            return self.of_fields(x, level)
        if isinstance(x, Mapping):
            return self.repr_dict(dict(x), level)
        if hasattr(x, "named_parameters"):  # a module, which may be of any size
            return f"<{type(x).__name__}>"
        return " ".join(super().repr_instance(x, level).split())

    def of_fields(self, x: Any, level: int) -> str:
        """Return the text of a dataclass."""
        if level <= 0:
            return f"{type(x).__name__}(...)"
        shown = (f"{f.name}={self.repr1(getattr(x, f.name), level - 1)}" for f in fields(x) if f.repr)
        return f"{type(x).__name__}({', '.join(shown)})"


def brief(self: object) -> str:
    """Return a short ``repr`` of a dataclass whose fields may be long."""
    short = _Brief()
    return short.of_fields(self, short.maxlevel)


def options(policy: Any, *without: str) -> list[str]:
    """Return the arguments of a dataclass that are not defaults: ``links='nvlink4'``, or ``links=...`` if long."""
    given = []
    for field in fields(policy):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in without and (value := getattr(policy, field.name)) != default:
            shown = repr(value)
            given.append(f"{field.name}={shown if len(shown) <= _LONG else '...'}")
    return given


def few(lines: Iterable[str], what: str) -> Iterator[str]:
    """Yield the first lines, indented, and a line that says how many more there are."""
    every = list(lines)
    yield from (f"  {line}" for line in every[:_SHOWN])
    if len(every) > _SHOWN:
        yield f"  and {len(every) - _SHOWN} more {what}"
