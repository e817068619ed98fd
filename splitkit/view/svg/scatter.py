"""Draws plans as points, time over bytes, as a still picture: the frontier is a line, and some points have names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from splitkit.units import duration, size
from splitkit.view.colours import BAD, INK, MUTED, colour
from splitkit.view.svg.axes import PlotArea, horizontal_axis, round_size, tick_values, vertical_axis, visible_limit
from splitkit.view.svg.drawing import Anchor, Drawing

WIDTH, HEIGHT = 820, 340
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 58, 46


@dataclass(frozen=True)
class ScatterPoint:
    """A point.

    Attributes:
        nbytes: the horizontal coordinate.
        seconds: the vertical coordinate.
        name: the text beside it, where there is room.
        tooltip: the text on hover; by default the name.
        strong: whether it is drawn large.
        number: the number of its colour.
        link: the id of the element of the page that a click on it goes to.
    """

    nbytes: float
    seconds: float
    name: str = ""
    tooltip: str = ""
    strong: bool = False
    number: int = 0
    link: str = ""


@dataclass(frozen=True)
class ScatterDrawing:
    """A chart of points.

    Attributes:
        title: the title of the picture.
        axes: the titles of the horizontal and the vertical axis.
        line: the points that a line joins, by rising bytes.
        others: all other points.
        unit: the unit of the seconds, as in `splitkit.units.duration`.
        legend: the meaning of each colour, by its number.
        memory: the memory limit in bytes, if there is one.
    """

    title: str
    axes: tuple[str, str]
    line: Sequence[ScatterPoint]
    others: Sequence[ScatterPoint] = ()
    unit: str = "s"
    legend: Sequence[str] = ()
    memory: int | None = None

    @cached_property
    def _frame(self) -> PlotArea:
        spots = [*self.line, *self.others]
        most = max((spot.nbytes for spot in spots), default=0) or 1
        nbytes = max(visible_limit(self.memory, most) or 0, most)
        seconds = max((spot.seconds for spot in spots), default=0) or 1
        return PlotArea(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM, (nbytes * 1.04, seconds * 1.06))

    def to_svg(self) -> str:
        """Return the picture; names are escaped."""
        draw, frame = Drawing(WIDTH), self._frame
        draw.text(8, 16, self.title, bold=True, size=12, room=WIDTH - 16)
        entries = [(colour(number), text) for number, text in enumerate(self.legend)]
        draw.legend(LEFT + 120, 36, entries, WIDTH - LEFT - 120)
        vertical_axis(draw, frame, tick_values(frame.most[1]), self._time, self.axes[1])
        horizontal_axis(draw, frame, tick_values(frame.most[0], 7, binary=True), round_size, self.axes[0], grid=True)
        if self.memory and self.memory > frame.most[0]:
            text = f"capacity {size(self.memory)}: beyond the right edge"
            draw.text(frame.right - 4, frame.top - 6, text, BAD, "end", size=10, spare=True)
        elif self.memory:
            x = frame.x(self.memory)
            draw.line((x, frame.top), (x, frame.bottom), BAD, dashes="4 3")
            draw.text(x - 4, frame.top + 10, f"capacity {size(self.memory)}", BAD, "end", size=10, spare=True)
        if len(self.line) > 1:
            draw.polyline([(frame.x(spot.nbytes), frame.y(spot.seconds)) for spot in self.line], colour(0))
        named = [spot for spot in (*self.line, *self.others) if spot.strong or spot.name]
        for spot in sorted((*self.line, *self.others), key=lambda spot: spot.strong):
            fill = colour(spot.number)
            x, y = frame.x(spot.nbytes), frame.y(spot.seconds)
            draw.keep(x, y, 5 if spot.strong else 2)
            outline = INK if spot.strong else ""
            draw.dot(x, y, 5 if spot.strong else 3, fill, spot.tooltip or spot.name, line=outline, link=spot.link)
        for spot in named:
            self._name(draw, spot)
        return draw.to_svg(HEIGHT, self.title)

    def _time(self, seconds: float) -> str:
        return duration(seconds, self.unit) if seconds else "0"

    def _name(self, draw: Drawing, spot: ScatterPoint) -> None:
        """Write a point's name on the side with more room, else above or below; without room it is only a tooltip."""
        x, y = self._frame.x(spot.nbytes), self._frame.y(spot.seconds)
        better = x > WIDTH / 2
        for left in (better, not better):
            step, room = (-9 if left else 9), (x - LEFT if left else WIDTH - x) - 14
            side: Anchor = "end" if left else "start"
            for foot in (y + 4, y - 8, y + 16, y - 20, y + 28):
                if self._frame.top < foot < self._frame.bottom and draw.text(
                    x + step, foot, spot.name, anchor=side, size=10, bold=spot.strong, room=room, spare=True, halo=True
                ):
                    if foot != y + 4:
                        draw.line((x, y), (x + step, foot - 3), MUTED)
                    return
