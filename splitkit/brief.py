"""Objects that hold graphs and models, in one line of bounded length: what their ``repr`` shows."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

SHOWN = 8


class _Brief(reprlib.Repr):
    """Long texts and collections are cut short; of a module only its class is named."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 2
        self.maxstring = self.maxother = 80

    def repr_instance(self, x: Any, level: int) -> str:
        """Anything that is no builtin."""
        if is_dataclass(x) and not isinstance(x, type):
            return self.of_fields(x, level)
        if isinstance(x, Mapping):
            return self.repr_dict(dict(x), level)
        if hasattr(x, "named_parameters"):  # a module, which may be of any size
            return f"<{type(x).__name__}>"
        return " ".join(super().repr_instance(x, level).split())

    def of_fields(self, x: Any, level: int) -> str:
        """A dataclass."""
        if level <= 0:
            return f"{type(x).__name__}(...)"
        shown = (f"{f.name}={self.repr1(getattr(x, f.name), level - 1)}" for f in fields(x) if f.repr)
        return f"{type(x).__name__}({', '.join(shown)})"


def brief(self: object) -> str:
    """The ``__repr__`` of a dataclass whose fields may be long."""
    short = _Brief()
    return short.of_fields(self, short.maxlevel)


def few(lines: Iterable[str], what: str) -> Iterator[str]:
    """The first lines, indented, and how many more there are."""
    every = list(lines)
    yield from (f"  {line}" for line in every[:SHOWN])
    if len(every) > SHOWN:
        yield f"  and {len(every) - SHOWN} more {what}"
