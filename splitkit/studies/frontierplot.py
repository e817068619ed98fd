"""A picture of a frontier: recompute time over bytes, saved or at the peak (SVG)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from splitkit.svg import BOTTOM, COLOURS, LEFT, RIGHT, TOP, WIDTH, label, picture
from splitkit.units import duration, size

HEIGHT = 300
_TICKS = 5
_GREY = "#888"

Spot = tuple[float, float]
"""Bytes, and seconds of recompute."""


@dataclass(frozen=True)
class FrontierPlot:
    """What is drawn.

    Attributes:
        points: the points of the frontier, by rising bytes.
        marks: what else is drawn: name -> where.
        title: what the bytes are.
        unit: what the prices of what is computed again count.
    """

    points: Sequence[Spot]
    marks: Mapping[str, Spot]
    title: str = "saved for backward"
    unit: str = "s"

    def to_svg(self) -> str:
        """A picture that stands alone. Names are escaped."""
        return picture(HEIGHT, self._parts())

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
            yield label(
                self._x(spot[0]) + (-7 if right else 7), self._y(spot[1]) - 4, name, colour, "end" if right else "start"
            )

    def _axes(self) -> Iterator[str]:
        bottom = HEIGHT - BOTTOM
        yield f'<path d="M{LEFT},{TOP} V{bottom} H{WIDTH - RIGHT}" fill="none" stroke="{_GREY}"/>'
        for tick in range(_TICKS):
            nbytes, seconds = self._most[0] * tick / (_TICKS - 1), self._most[1] * tick / (_TICKS - 1)
            anchor = "end" if tick == _TICKS - 1 else "middle"
            yield label(self._x(nbytes), bottom + 14, size(nbytes), _GREY, anchor)
            yield label(LEFT - 6, self._y(seconds) + 4, duration(seconds, self.unit), _GREY, "end")
        yield label(WIDTH - RIGHT, HEIGHT - 6, self.title, _GREY, "end")
        yield label(6, TOP - 14, "computed again", _GREY, "start")

    def _dot(self, spot: Spot, colour: str, radius: float) -> str:
        return f'<cycle cx="{self._x(spot[0]):.1f}" cy="{self._y(spot[1]):.1f}" r="{radius}" fill="{colour}"/>'

    @property
    def _most(self) -> Spot:
        spots = [*self.points, *self.marks.values()]
        return max(b for b, _ in spots) or 1, max(s for _, s in spots) or 1

    def _x(self, nbytes: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * nbytes / self._most[0]

    def _y(self, seconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * seconds / self._most[1]
