"""Where text goes: tables with rich, plain and never truncated off a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def to_text(renderable: RenderableType) -> str:
    """Render without colour: on a terminal to its width; elsewhere as wide as needed, with ASCII rules."""
    from rich.console import Console
    from rich.measure import Measurement

    plain = not sys.stdout.isatty()
    buffer = io.StringIO()
    width = 10**6 if plain else None
    # Text also in a notebook, where rich would show HTML instead, or escapes since Jupyter sets FORCE_COLOR.
    console = Console(
        file=buffer, no_color=True, markup=False, emoji=False, width=width, force_jupyter=False, force_terminal=False
    )
    if plain:
        renderable = _plain(renderable)
        console.width = Measurement.get(console, console.options, renderable).maximum
    console.print(renderable)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def show(*renderables: RenderableType) -> None:
    """Print to standard output: rich on a terminal (``NO_COLOR`` respected), plain text elsewhere.

    Off a terminal lines of tables are ASCII, and what the encoding of the output lacks is escaped.
    """
    from rich.console import Console

    for renderable in renderables:
        is_text = isinstance(renderable, str)
        if sys.stdout.isatty():
            Console(markup=False, emoji=False, highlight=False).print(renderable, soft_wrap=is_text)
        else:
            text = renderable if isinstance(renderable, str) else to_text(renderable)
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            print(text.encode(encoding, "backslashreplace").decode(encoding))


def _plain(renderable: RenderableType) -> RenderableType:
    """A table with a rule of dashes under its head instead of a frame."""
    from rich.box import Box
    from rich.table import Table

    if isinstance(renderable, Table) and renderable.box is not None:
        renderable.box = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
        renderable.show_edge = False
    return renderable


@contextmanager
def busy(what: str, seconds: float | None = None) -> Iterator[None]:
    """A spinner on standard error while something takes long; nothing off a terminal.

    Args:
        what: what is done.
        seconds: after which it ends at the latest, about: a bar grows to its full length by then. What ends before
            takes the bar with it.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    console = Console(stderr=True)
    if seconds is None:
        with console.status(what):
            yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from splitkit.view.timebar import TimeBar

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeBar(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task(what, total=seconds)
        yield
