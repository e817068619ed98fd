"""Tables with rich, which never truncate a name: what is too wide goes on in the next line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

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
    spare: Sequence[str] = (),
) -> Table:
    """A table. What is aligned to the right keeps together on one line; all other text wraps.

    Args:
        titles: of the columns.
        rows: what stands in them.
        right: the columns that are aligned to the right.
        title: of the whole, above it.
        least: column -> how many characters it has at least, also on a narrow terminal.
        total: a last row, below a line.
        spare: the columns that go where a terminal is too narrow for all, the first one first.
    """
    from splitkit.view.fitting import FittingTable

    lines = [tuple(map(str, row)) for row in rows]
    last = tuple(map(str, total))
    longest = [max(map(len, column)) for column in zip(titles, *lines, *([last] if last else []), strict=True)]

    def made(gone: Sequence[str] = ()) -> FittingTable:
        kept = [at for at, name in enumerate(titles) if name not in gone]
        found = FittingTable(title=title or None, title_justify="left")
        for at in kept:
            name, side = titles[at], _side(titles[at] in right)
            width = (least or {}).get(name) if side == "left" else longest[at]
            found.add_column(name, justify=side, overflow="fold", min_width=width, no_wrap=side == "right")
        for line in lines:
            found.add_row(*(line[at] for at in kept))
        if last:
            found.add_section()
            found.add_row(*(last[at] for at in kept))
        return found

    whole = made()
    whole.without, whole.spare = made, spare
    return whole


def _side(number: bool) -> Literal["left", "right"]:
    return "right" if number else "left"
