"""What a command gives back: data for ``--json``, text for people, an exit code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True)
class Outcome:
    """The result of a command; printing is left to `splitkit.cli.main`.

    Attributes:
        data: what ``--json`` prints.
        text: strings and rich tables for people.
        code: exit code.
        files: path -> data to write there as JSON, before anything is printed.
    """

    data: Mapping[str, Any]
    text: Sequence[RenderableType]
    code: int = 0
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def jsonable(value: Any) -> Any:
    """The same data with ``None`` for infinities and NaNs, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    return [jsonable(v) for v in value] if isinstance(value, list | tuple) else value


def facts(rows: Mapping[str, object]) -> Table:
    """Name and value side by side, without lines."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, str(value))
    return grid


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = (), title: str = "") -> Table:
    """A table; the columns named in ``right`` are aligned to the right."""
    from rich.table import Table

    made = Table(title=title or None, title_justify="left")
    for name in titles:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(str, row))
    return made


def seconds(value: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
