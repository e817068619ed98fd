"""Makes rich tables that fit the terminal and never truncate a name.

Text that is too wide continues on the next line; where even that is not enough, the least important columns are left
out, and a line below the table names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

_NAME = 12
"""The least width of a column of names, in characters, where no other is asked for."""


def facts(rows: Mapping[str, object]) -> Table:
    """Return a table of names and values side by side, without rules."""
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
    """Return a table. Right-aligned columns never wrap; all other text does.

    Args:
        titles: the column headers.
        rows: the cells of each row.
        right: the columns that are aligned to the right.
        title: the title above the table.
        least: column -> its minimum width in characters, also on a narrow terminal (default: a short name's).
        total: a last row, below a rule.
        spare: the columns to leave out on a terminal that is too narrow, in this order (default: all of ``right``,
            the last first).
    """
    lines = [tuple(map(str, row)) for row in rows]
    last = tuple(map(str, total))
    longest = [max(map(len, column)) for column in zip(titles, *lines, *([last] if last else []), strict=True)]

    def fill(found: Table, omitted: Sequence[str]) -> Table:
        kept = [at for at, name in enumerate(titles) if name not in omitted]
        for at in kept:
            name = titles[at]
            side: Literal["left", "right"] = "right" if name in right else "left"
            width = (least or {}).get(name, min(longest[at], _NAME)) if side == "left" else longest[at]
            found.add_column(name, justify=side, overflow="fold", min_width=width, no_wrap=side == "right")
        for line in lines:
            found.add_row(*(line[at] for at in kept))
        if last:
            found.add_section()
            found.add_row(*(last[at] for at in kept))
        return found

    return _fitting_table(title, fill, spare or tuple(reversed(right)))


def _fitting_table(title: str, fill: Callable[[Table, Sequence[str]], Table], spare: Sequence[str]) -> Table:
    """Return a table that leaves out columns when it is rendered on a terminal that is too narrow.

    Args:
        title: the title above the table.
        fill: fills an empty table, without the columns named in its second argument.
        spare: the columns that may be left out, in this order.
    """
    from rich.measure import Measurement
    from rich.table import Table

    class FittingTable(Table):  # rich knows the width only when it renders
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            omitted: list[str] = []
            shown: Table = self
            for name in spare:
                if Measurement.get(console, options.update(width=10**6), shown).minimum <= options.max_width:
                    break
                omitted.append(name)
                shown = fill(Table(title=title or None, title_justify="left"), omitted)
                shown.box, shown.show_edge = self.box, self.show_edge
            yield from Table.__rich_console__(shown, console, options)
            if omitted:
                yield f"(too narrow for: {', '.join(omitted)})"

    return fill(FittingTable(title=title or None, title_justify="left"), ())
