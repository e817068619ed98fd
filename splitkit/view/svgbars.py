"""Bars as a still picture: a name, a length and a number each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitkit.view.colours import MUTED, colour
from splitkit.view.drawing import Drawing
from splitkit.view.textwidth import width

WIDTH, NAMES, ROW = 820, 300, 20


@dataclass(frozen=True)
class Bar:
    """A bar.

    Attributes:
        name: at its left.
        value: how long it is.
        text: at its right: the value with its unit.
        number: of its colour.
        told: where the mouse rests.
    """

    name: str
    value: float
    text: str
    number: int = 0
    told: str = ""


@dataclass(frozen=True)
class BarsDrawing:
    """What is drawn.

    Attributes:
        title: above all.
        groups: bars with what they are of; each group has a scale of its own.
    """

    title: str
    groups: Sequence[tuple[str, Sequence[Bar]]]

    def to_svg(self) -> str:
        """The picture. Names are escaped."""
        draw, y = Drawing(WIDTH), 34.0
        draw.text(8, 16, self.title, bold=True, size=12, room=WIDTH - 16)
        for heading, bars in self.groups:
            draw.text(8, y + 6, heading, MUTED, size=10, bold=True, room=WIDTH - 16)
            y += 14
            most = max((bar.value for bar in bars), default=0) or 1
            room = WIDTH - NAMES - 24 - max((width(bar.text) for bar in bars), default=0)
            for bar in bars:
                told = bar.told or f"{bar.name}: {bar.text}"
                long = max(1.0, room * bar.value / most)
                draw.text(NAMES - 8, y + 13, bar.name, anchor="end", room=NAMES - 16, title=told)
                draw.rect(NAMES, y + 3, long, ROW - 6, colour(bar.number), told, round_=2)
                draw.text(NAMES + long + 6, y + 13, bar.text)
                y += ROW
            y += 12
        return draw.to_svg(y, self.title)
