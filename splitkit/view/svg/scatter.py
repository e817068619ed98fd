"""Draws plans as points, time over bytes, as a still picture: the frontier is a line, and some points have names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from splitkit.units import duration, size
from splitkit.view.svg.drawing import BAD, INK, LINE, MUTED, Anchor, Drawing, colour, width

WIDTH, HEIGHT = 820, 340  # pixels
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 58, 46  # pixels around the plot


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


# Draws the axes of charts, and chooses their ticks.


def tick_values(most: float, count: int = 5, *, binary: bool = False) -> list[float]:
    """Return about ``count`` round numbers from 0 to ``most``: multiples of 1, 2 or 5 times a power of ten.

    With ``binary`` they are round in the unit of bytes that `splitkit.units.size` prints (20 MiB, 0.25 GiB).
    """
    if not (most > 0 and math.isfinite(most)):
        return [0.0]
    # bytes: round multiples of the unit that is printed, not of powers of ten
    scale = 1024.0 ** int(math.log(most, 1024)) if binary and most >= 1 else 1.0
    step = most / scale / max(1, count)
    power = 10.0 ** math.floor(math.log10(step))
    nice = next(power * one for one in (1, 2, 5, 10) if power * one >= step * (1 - 1e-9))
    if scale > 1 and nice < 1:  # 0.25 GiB is a round number of MiB, 0.2 GiB is not
        nice = 2.0 ** math.ceil(math.log2(step) - 1e-9)
    elif binary:
        nice = max(1.0, nice)
    step = nice * scale
    return [step * number for number in range(int(most / step * (1 + 1e-9)) + 1)]


def round_size(nbytes: float) -> str:
    """Return ``20 MiB`` for a tick, where `splitkit.units.size` prints ``20.00 MiB``."""
    return size(nbytes).replace(".00 ", " ")


def visible_limit(limit: float | None, most: float) -> float | None:
    """Return a limit, or ``None`` if it is so high that drawing it would flatten the chart (three times ``most``)."""
    return limit if limit is not None and limit <= 3 * most else None


@dataclass(frozen=True)
class PlotArea:
    """The rectangle of a chart in a picture, and its scale.

    Attributes:
        left: in pixels, like `top`, `right` and `bottom`.
        most: the values at the right and at the top edge; the other edges are 0.
    """

    left: float
    top: float
    right: float
    bottom: float
    most: tuple[float, float]

    def x(self, value: float) -> float:
        """Return the pixel of a value of the horizontal axis."""
        return self.left + (self.right - self.left) * (value / self.most[0] if self.most[0] else 0.0)

    def y(self, value: float) -> float:
        """Return the pixel of a value of the vertical axis."""
        return self.bottom - (self.bottom - self.top) * (value / self.most[1] if self.most[1] else 0.0)


def horizontal_axis(
    draw: Drawing, frame: PlotArea, at: Sequence[float], text: Callable[[float], str], title: str, *, grid: bool = False
) -> None:
    """Draw the horizontal axis: its line, ticks, labels and title."""
    draw.line((frame.left, frame.bottom), (frame.right, frame.bottom), MUTED)
    draw.text(frame.right, frame.bottom + 29, title, MUTED, "end", size=10)
    for value in at:
        x = frame.x(value)
        if grid:
            draw.line((x, frame.top), (x, frame.bottom))
        draw.line((x, frame.bottom), (x, frame.bottom + 4), MUTED)
        half = width(text(value), 10) / 2
        middle = min(max(x, half), draw.width - half)
        draw.text(middle, frame.bottom + 15, text(value), MUTED, "middle", size=10, spare=True)


def vertical_axis(
    draw: Drawing, frame: PlotArea, at: Sequence[float], text: Callable[[float], str], title: str
) -> None:
    """Draw the vertical axis, with rules across the chart."""
    draw.text(max(4.0, frame.left - 60), frame.top - 10, title, MUTED, size=10)
    for value in at:
        draw.line((frame.left, frame.y(value)), (frame.right, frame.y(value)), LINE)
        draw.text(frame.left - 6, frame.y(value) + 4, text(value), MUTED, "end", size=10, spare=True)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Drop points of a step curve that cannot be seen: of each half pixel keep first, lowest, highest and last.

    The points are in pixels, by rising x.
    """
    found: list[tuple[float, float]] = []
    group: list[tuple[float, float]] = []
    for point in points:
        if group and point[0] - group[0][0] >= 0.5:
            found += _extremes(group)
            group = []
        group.append(point)
    return found + _extremes(group)


def _extremes(group: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(group) <= 4:
        return list(group)
    by_height = sorted(range(len(group)), key=lambda i: group[i][1])
    return [group[i] for i in sorted({0, by_height[0], by_height[-1], len(group) - 1})]
