"""Prints text and tables: with rich on a terminal, as plain text that is never truncated elsewhere.

rich is imported where it is used: it takes 50 ms, and most commands that fail early need none of it.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def to_text(renderable: RenderableType) -> str:
    """Render as text without colour: as wide as the terminal, or as wide as needed with ASCII rules off a terminal."""
    from rich.console import Console
    from rich.measure import Measurement

    plain = not sys.stdout.isatty()
    buffer = io.StringIO()
    width = 10**6 if plain else None  # wide enough to measure; rich would fold at 80 columns
    # In a notebook rich would display HTML instead, or print escape codes because Jupyter sets FORCE_COLOR.
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

    Off a terminal the rules of tables are ASCII, and characters that the output's encoding lacks are escaped.
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
    """Give a table a rule of dashes below its header instead of a frame."""
    from rich.box import Box
    from rich.table import Table

    if isinstance(renderable, Table) and renderable.box is not None:
        renderable.box = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
        renderable.show_edge = False
    return renderable


@contextmanager
def show_spinner(what: str, seconds: float | None = None) -> Iterator[None]:
    """Show a spinner on standard error while a step runs; nothing off a terminal.

    Args:
        what: the text beside the spinner.
        seconds: the time limit of the step, if it has one.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    limit = "" if seconds is None else f" (at most {seconds:g} s)"
    with Console(stderr=True).status(escape(what + limit)):
        yield
