"""Points in a plane as a still picture: bytes against time, the best joined by a line, some with names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from splitkit.units import duration, size
from splitkit.view.axes import Plane, below, beside, marks, near, round_size
from splitkit.view.colours import BAD, INK, MUTED, colour
from splitkit.view.drawing import Anchor, Drawing

WIDTH, HEIGHT = 820, 340
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 58, 46


@dataclass(frozen=True)
class Spot:
    """A point.

    Attributes:
        nbytes: where it is from left to right.
        seconds: where it is from bottom to top.
        name: written beside it, where there is room.
        told: where the mouse rests on it.
        strong: whether it is a large point.
        number: of its colour.
    """

    nbytes: float
    seconds: float
    name: str = ""
    told: str = ""
    strong: bool = False
    number: int = 0


@dataclass(frozen=True)
class ScatterDrawing:
    """What is drawn.

    Attributes:
        title: above all.
        axes: what the bytes and the seconds are.
        line: points that are joined, by rising bytes.
        others: points that are not.
        unit: what the seconds count.
        legend: what the numbers of colours mean.
        memory: bytes that there are, if they are limited.
    """

    title: str
    axes: tuple[str, str]
    line: Sequence[Spot]
    others: Sequence[Spot] = ()
    unit: str = "s"
    legend: Sequence[str] = ()
    memory: int | None = None

    @cached_property
    def _frame(self) -> Plane:
        spots = [*self.line, *self.others]
        most = max((spot.nbytes for spot in spots), default=0) or 1
        nbytes = max(near(self.memory, most) or 0, most)
        seconds = max((spot.seconds for spot in spots), default=0) or 1
        return Plane(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM, (nbytes * 1.04, seconds * 1.06))

    def to_svg(self) -> str:
        """The picture. Names are escaped."""
        draw, frame = Drawing(WIDTH), self._frame
        draw.text(8, 16, self.title, bold=True, size=12, room=WIDTH - 16)
        entries = [(colour(number), text) for number, text in enumerate(self.legend)]
        draw.legend(LEFT + 120, 36, entries, WIDTH - LEFT - 120)
        beside(draw, frame, marks(frame.most[1]), self._time, self.axes[1])
        below(draw, frame, marks(frame.most[0], 7, binary=True), round_size, self.axes[0], grid=True)
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
            draw.dot(x, y, 5 if spot.strong else 3, fill, spot.told or spot.name, line=INK if spot.strong else "")
        for spot in named:
            self._name(draw, spot)
        return draw.to_svg(HEIGHT, self.title)

    def _time(self, seconds: float) -> str:
        return duration(seconds, self.unit) if seconds else "0"

    def _name(self, draw: Drawing, spot: Spot) -> None:
        """Beside its point, where there is more room, or above or below; else only where the mouse rests."""
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
