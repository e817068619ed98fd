"""A picture of a frontier: recompute time over saved bytes (SVG)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from splitkit.memoryplot import BOTTOM, COLOURS, LEFT, RIGHT, STYLE, TOP, WIDTH
from splitkit.units import size

HEIGHT = 300
_TICKS = 5
_GREY = "#888"

Spot = tuple[float, float]
"""Saved bytes, and seconds of recompute."""


@dataclass(frozen=True)
class FrontierPlot:
    """What is drawn.

    Attributes:
        points: of the frontier, by rising bytes.
        marks: what else is drawn: name -> where.
    """

    points: Sequence[Spot]
    marks: Mapping[str, Spot]

    def to_svg(self) -> str:
        """A picture that stands alone. Names are escaped."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        return f'{head} style="{STYLE}">{"".join(self._parts())}</svg>'

    def _parts(self) -> Iterator[str]:
        yield from self._axes()
        line = " ".join(f"{self._x(nbytes):.1f},{self._y(seconds):.1f}" for nbytes, seconds in self.points)
        yield f'<polyline points="{line}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.5"/>'
        for spot in self.points:
            yield self._dot(spot, COLOURS[0], 2.5)
        for number, (name, spot) in enumerate(self.marks.items()):
            colour = COLOURS[1 + number % (len(COLOURS) - 1)]
            right = self._x(spot[0]) > WIDTH / 2
            yield self._dot(spot, colour, 4)
            yield _text(
                self._x(spot[0]) + (-7 if right else 7), self._y(spot[1]) - 4, name, colour, "end" if right else "start"
            )

    def _axes(self) -> Iterator[str]:
        bottom = HEIGHT - BOTTOM
        yield f'<path d="M{LEFT},{TOP} V{bottom} H{WIDTH - RIGHT}" fill="none" stroke="{_GREY}"/>'
        for tick in range(_TICKS):
            nbytes, seconds = self._most[0] * tick / (_TICKS - 1), self._most[1] * tick / (_TICKS - 1)
            anchor = "end" if tick == _TICKS - 1 else "middle"
            yield _text(self._x(nbytes), bottom + 14, size(nbytes), _GREY, anchor)
            yield _text(LEFT - 6, self._y(seconds) + 4, duration(seconds), _GREY, "end")
        yield _text(WIDTH - RIGHT, HEIGHT - 6, "saved for backward", _GREY, "end")
        yield _text(6, TOP - 14, "computed again", _GREY, "start")

    def _dot(self, spot: Spot, colour: str, radius: float) -> str:
        return f'<circle cx="{self._x(spot[0]):.1f}" cy="{self._y(spot[1]):.1f}" r="{radius}" fill="{colour}"/>'

    @property
    def _most(self) -> Spot:
        spots = [*self.points, *self.marks.values()]
        return max(b for b, _ in spots) or 1, max(s for _, s in spots) or 1

    def _x(self, nbytes: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * nbytes / self._most[0]

    def _y(self, seconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * seconds / self._most[1]


def duration(seconds: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit * 0.9995:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.2g} us"


def _text(x: float, y: float, text: str, colour: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
