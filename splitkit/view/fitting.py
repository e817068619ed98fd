"""A rich table that fits the terminal: columns that matter less go, text wraps, and nothing is cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table


class FittingTable(Table):
    """A table that leaves columns out where it would be too wide, and says which.

    Attributes:
        without: makes the same table without some columns.
        spare: names of the columns that may go, the first one first.
    """

    without: Callable[[Sequence[str]], Table]
    spare: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gone: list[str] = []
        shown: Table = self
        for name in self.spare:
            if Measurement.get(console, options.update(width=10**6), shown).minimum <= options.max_width:
                break
            gone.append(name)
            shown = self.without(gone)
            shown.box, shown.show_edge = self.box, self.show_edge
        yield from Table.__rich_console__(shown, console, options)
        if gone:
            yield f"(too narrow for: {', '.join(gone)})"
