"""Draws bar charts as still pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitkit.view.colours import MUTED, colour
from splitkit.view.svg.drawing import Drawing
from splitkit.view.svg.text_width import width

WIDTH, NAMES, ROW = 820, 300, 20


@dataclass(frozen=True)
class Bar:
    """A bar.

    Attributes:
        name: the text at its left.
        value: its length.
        text: the text at its right: the value with its unit.
        number: the number of its colour.
        tooltip: the text on hover; by default the name and the text.
    """

    name: str
    value: float
    text: str
    number: int = 0
    tooltip: str = ""


@dataclass(frozen=True)
class BarsDrawing:
    """A bar chart.

    Attributes:
        title: the title of the picture.
        groups: (heading, bars); each group has a scale of its own.
    """

    title: str
    groups: Sequence[tuple[str, Sequence[Bar]]]

    def to_svg(self) -> str:
        """Return the picture; names are escaped."""
        draw, y = Drawing(WIDTH), 34.0
        draw.text(8, 16, self.title, bold=True, size=12, room=WIDTH - 16)
        for heading, bars in self.groups:
            draw.text(8, y + 6, heading, MUTED, size=10, bold=True, room=WIDTH - 16)
            y += 14
            most = max((bar.value for bar in bars), default=0) or 1
            room = WIDTH - NAMES - 24 - max((width(bar.text) for bar in bars), default=0)
            for bar in bars:
                tooltip = bar.tooltip or f"{bar.name}: {bar.text}"
                long = max(1.0, room * bar.value / most)
                draw.text(NAMES - 8, y + 13, bar.name, anchor="end", room=NAMES - 16, title=tooltip)
                draw.rect(NAMES, y + 3, long, ROW - 6, colour(bar.number), tooltip, round_=2)
                draw.text(NAMES + long + 6, y + 13, bar.text)
                y += ROW
            y += 12
        return draw.to_svg(y, self.title)
