"""Defines what a command returns: data for ``--json``, text for people, files and an exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Outcome:
    """The result of a command, which `splitkit.cli.main` prints.

    Attributes:
        data: what ``--json`` prints.
        text: strings and rich tables for people.
        code: the exit code.
        files: path -> text, or data to write as JSON, before anything is printed.
        quiet: whether to print nothing, because another process does.
    """

    data: Mapping[str, Any]
    text: Sequence[RenderableType]
    code: int = 0
    files: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)
    quiet: bool = False


def jsonable(value: Any) -> Any:
    """Return data with ``None`` in place of infinities and NaNs, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    return [jsonable(v) for v in value] if isinstance(value, list | tuple) else value


def seconds_text(value: float) -> str:
    """Return ``12.3 ms`` for 0.0123."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
