"""Tables with rich, which never truncate a name: what is too wide goes on in the next line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def facts(rows: Mapping[str, object]) -> Table:
    """Name and value side by side, without lines."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, str(value))
    return grid


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Sequence[str] = (),
    title: str = "",
    *,
    least: Mapping[str, int] | None = None,
    total: Sequence[object] = (),
) -> Table:
    """A table.

    Args:
        titles: of the columns.
        rows: what stands in them.
        right: the columns that are aligned to the right.
        title: of the whole, above it.
        least: column -> how many characters it has at least, also on a narrow terminal.
        total: a last row, below a line.
    """
    from rich.table import Table

    made = Table(title=title or None, title_justify="left")
    for name in titles:
        width = (least or {}).get(name)
        made.add_column(name, justify="right" if name in right else "left", overflow="fold", min_width=width)
    for row in rows:
        made.add_row(*map(str, row))
    if total:
        made.add_section()
        made.add_row(*map(str, total))
    return made
