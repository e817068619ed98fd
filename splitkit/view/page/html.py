"""Makes tables and pages as HTML without scripts, and pages in frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from splitkit.units import size
from splitkit.view.svg.drawing import FONT, INK, LINE, MUTED, PAPER, escaped

if TYPE_CHECKING:
    from rich.table import Table

_CELL = "padding:2px 8px;border:0;vertical-align:top"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_table(table: Table) -> str:
    """Return a table of `splitkit.view.tables` as HTML, with its title; all text is escaped."""
    sides = [
        "text-align:right;white-space:nowrap" if c.justify == "right" else "text-align:left" for c in table.columns
    ]
    heads = [str(column.header) for column in table.columns]
    lines = [
        _row("th", heads, [f"{side};color:{MUTED};font-weight:400;border-bottom:1px solid {LINE}" for side in sides])
    ]
    cells = zip(*(list(column.cells) for column in table.columns), strict=True)
    total = False
    for cell, row in zip(cells, table.rows, strict=True):
        strong = f";font-weight:600;border-top:1px solid {LINE}" if total else ""
        lines.append(_row("td", [str(text) for text in cell], [side + strong for side in sides]))
        total = row.end_section
    caption = f'<caption style="text-align:left;color:{MUTED};padding:4px 8px">{escaped(table.title)}</caption>'
    style = "border-collapse:collapse;margin:6px 0;font-variant-numeric:tabular-nums"
    return f'<table style="{style}">{caption if table.title else ""}{"".join(lines)}</table>'


def _row(tag: str, cells: Iterable[str], styles: Iterable[str]) -> str:
    inner = "".join(
        f'<{tag} style="{_CELL};{style}">{escaped(cell)}</{tag}>' for cell, style in zip(cells, styles, strict=True)
    )
    return f'<tr style="background:{PAPER}">{inner}</tr>'


def fragment(svg: str, tables: Iterable[Table], notes: Iterable[str] = (), heading: str = "") -> str:
    """Return a still picture with its tables and notes as HTML for use in another page."""
    above = f'<h2 style="font-size:14px;margin:12px 8px 4px">{escaped(heading)}</h2>' if heading else ""
    notes_html = "".join(f'<p style="margin:4px 8px;color:{MUTED}">{escaped(note)}</p>' for note in notes)
    style = f"font:12px/1.4 {escape(FONT)};color:{INK};background:{PAPER};padding:4px;overflow-x:auto"
    return f'<div style="{style}">{above}{svg}{"".join(map(html_table, tables))}{notes_html}</div>'


def still_page(title: str, inside: str) -> str:
    """Return a complete page without scripts."""
    head = f'<meta charset="utf-8"><title>{escaped(title)} · splitkit</title>'
    head += f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += '<meta name="viewport" content="width=device-width">'
    return f'<!doctype html><html lang="en"><head>{head}</head><body style="margin:8px">{inside}</body></html>'


@dataclass(frozen=True)
class FramedPage:
    """A page that a notebook shows in a frame.

    Attributes:
        html: the page.
        height: the height of the frame in pixels.
        svg: makes the still picture for viewers without frames or scripts, such as GitHub; empty if there is none.
    """

    html: str
    height: int = 680
    svg: Callable[[], str] = str

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        told = {"text/plain": repr(self), "text/html": self._repr_html_()}
        svg = self.svg()
        return told | {"image/svg+xml": svg} if svg else told

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{self.height}px;border:0"
        # without this, a link inside the page would lead to the page around the frame
        page = self.html.replace("<head>", '<head><base href="about:srcdoc">', 1)
        return f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" style="{style}"></iframe>'

    def __repr__(self) -> str:
        return f"<a page of {size(len(self.html.encode()))}: the last line of a notebook's cell shows it>"
