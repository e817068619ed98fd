"""What pictures of splitkit share: size, colours, and the pieces of SVG that they are made of."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WIDTH = 760
LEFT, RIGHT, TOP, BOTTOM = 80, 12, 30, 34
COLOURS = ("#4878d0", "#ee854a", "#6acc64", "#d65f5f", "#956cb4", "#8c613c")
_STYLE = "font-family: system-ui, sans-serif; font-size: 11px; background: white"


def picture(height: int, parts: Iterable[str]) -> str:
    """A picture that stands alone, `WIDTH` wide."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    return f'{head} style="{_STYLE}">{"".join(parts)}</svg>'


def label(x: float, y: float, text: str, colour: str, anchor: str) -> str:
    """Text, escaped, that starts, has its middle or ends at x: ``anchor`` is ``"start"``, ``"middle"`` or ``"end"``."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
