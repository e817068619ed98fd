"""What a command gives back: data for ``--json``, text for people, an exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Outcome:
    """The result of a command; printing is left to `splitkit.cli.main`.

    Attributes:
        data: what ``--json`` prints.
        text: strings and rich tables for people.
        code: exit code.
        files: path -> data to write there as JSON, or text, before anything is printed.
        quiet: whether nothing is printed: another process does.
    """

    data: Mapping[str, Any]
    text: Sequence[RenderableType]
    code: int = 0
    files: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)
    quiet: bool = False


def jsonable(value: Any) -> Any:
    """The same data with ``None`` for infinities and NaNs, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    return [jsonable(v) for v in value] if isinstance(value, list | tuple) else value


def seconds(value: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
