"""Draws the axes of charts, and chooses their ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitkit.units import size
from splitkit.view.colours import LINE, MUTED
from splitkit.view.svg.drawing import Drawing
from splitkit.view.svg.text_width import width


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


def thinned(points: Sequence[tuple[float, float]], least: float = 0.5) -> list[tuple[float, float]]:
    """Drop points of a step curve that cannot be seen: of each ``least`` pixels keep first, lowest, highest and last.

    Args:
        points: by rising x, in pixels.
        least: pixels, below which points merge.
    """
    found: list[tuple[float, float]] = []
    group: list[tuple[float, float]] = []
    for point in points:
        if group and point[0] - group[0][0] >= least:
            found += _extremes(group)
            group = []
        group.append(point)
    return found + _extremes(group)


def _extremes(group: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(group) <= 4:
        return list(group)
    by_height = sorted(range(len(group)), key=lambda i: group[i][1])
    return [group[i] for i in sorted({0, by_height[0], by_height[-1], len(group) - 1})]
