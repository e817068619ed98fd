"""A still picture as it is drawn, piece by piece: SVG without styles, ids and scripts, whose texts do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Literal

from splitkit.view.colours import INK, LINE, MUTED, PAPER
from splitkit.view.textwidth import shortened, width

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Verdana, sans-serif"
Anchor = Literal["start", "middle", "end"]
Point2 = tuple[float, float]
_CONTROL = {code: 0xFFFD for code in (*range(32), 0xFFFE, 0xFFFF, *range(0xD800, 0xE000)) if code not in (9, 10, 13)}


def escaped(text: object) -> str:
    """Text for HTML and XML: nothing of it is read as markup, and what XML forbids is replaced."""
    return escape(str(text).translate(_CONTROL))


class Drawing:
    """Collects the pieces of a picture; what comes later lies above.

    Attributes:
        width: pixels.
    """

    def __init__(self, width: float) -> None:
        self.width = width
        self._pieces: list[str] = []
        self._taken: list[tuple[float, float, float, float]] = []

    def to_svg(self, height: float, about: str) -> str:
        """The picture, which stands alone; ``about`` is read to those who cannot see it."""
        size = f'viewBox="0 0 {_n(self.width)} {_n(height)}" width="{_n(self.width)}" height="{_n(height)}"'
        style = f'style="max-width:100%;height:auto;background:{PAPER}" font-family="{escaped(FONT)}"'
        ground = f'<rect width="{_n(self.width)}" height="{_n(height)}" fill="{PAPER}"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escaped(about)}" {size} {style}>'
        return f"{head}{ground}{''.join(self._pieces)}</svg>"

    def text(
        self,
        x: float,
        y: float,
        text: str,
        fill: str = INK,
        anchor: Anchor = "start",
        *,
        size: float = 11,
        bold: bool = False,
        room: float | None = None,
        title: str = "",
        spare: bool = False,
        halo: bool = False,
    ) -> bool:
        """A line of text whose foot is at ``y``; whether it was drawn.

        Args:
            room: pixels that it may take; what does not fit is cut off, and told in whole where the mouse rests.
            title: what is told there anyway.
            spare: whether it is left out where it would lie on another text, or on what is to `keep` free.
            halo: whether what lies below it is thinned around the letters.
        """
        shown = text if room is None else shortened(text, room, size, bold)
        if not shown:
            return False
        wide = width(shown, size, bold)
        left = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        box = (left, y - size * 0.8, left + wide, y + size * 0.22)
        if spare and any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in self._taken):
            return False
        self._taken.append(box)
        heavy = ' font-weight="600"' if bold else ""
        side = f' text-anchor="{anchor}"' if anchor != "start" else ""
        around = f' stroke="{PAPER}" stroke-width="3" stroke-opacity="0.8" paint-order="stroke"' if halo else ""
        told = title or (text if shown != text else "")
        head = f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{fill}"{side}{heavy}{around}>'
        self._pieces.append(f"{head}{escaped(shown)}{_title(told)}</text>")
        return True

    def keep(self, x: float, y: float, radius: float) -> None:
        """Keep spare texts off the surroundings of a point."""
        self._taken.append((x - radius, y - radius, x + radius, y + radius))

    def rect(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        fill: str,
        title: str = "",
        *,
        round_: float = 0,
        line: str = "",
    ) -> None:
        """A box."""
        more = (f' rx="{_n(round_)}"' if round_ else "") + (f' stroke="{line}"' if line else "")
        self._close(
            "rect", f'x="{_n(x)}" y="{_n(y)}" width="{_n(wide)}" height="{_n(high)}" fill="{fill}"{more}', title
        )

    def path(
        self, d: str, stroke: str, wide: float = 1, title: str = "", *, dashes: str = "", opacity: float = 1
    ) -> None:
        """A line along a path."""
        more = (f' stroke-dasharray="{dashes}"' if dashes else "") + (
            f' opacity="{_n(opacity)}"' if opacity < 1 else ""
        )
        self._close("path", f'd="{d}" fill="none" stroke="{stroke}" stroke-width="{_n(wide)}"{more}', title)

    def line(self, start: Point2, end: Point2, stroke: str = LINE, wide: float = 1, *, dashes: str = "") -> None:
        """A straight line."""
        self.path(f"M{_n(start[0])},{_n(start[1])} L{_n(end[0])},{_n(end[1])}", stroke, wide, dashes=dashes)

    def area(self, points: Sequence[Point2], fill: str, title: str = "") -> None:
        """What lies within some corners."""
        self._close("polygon", f'points="{_points(points)}" fill="{fill}"', title)

    def polyline(self, points: Sequence[Point2], stroke: str, wide: float = 1.5) -> None:
        """A line through points."""
        self._close("polyline", f'points="{_points(points)}" fill="none" stroke="{stroke}" stroke-width="{_n(wide)}"')

    def dot(self, x: float, y: float, radius: float, fill: str, title: str = "", *, line: str = "") -> None:
        """A point."""
        more = f' stroke="{line}"' if line else ""
        self._close("circle", f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"{more}', title)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]], room: float) -> None:
        """Colours and what they mean, side by side; of those that find no room only the number is said."""
        end = x + room
        for number, (fill, text) in enumerate(entries):
            wide = 16 + width(text, 10) + 14
            if x + wide > end - (50 if number + 1 < len(entries) else 0):
                self.text(x, y + 0.5, f"+ {len(entries) - number}", MUTED, size=10)
                return
            self.rect(x, y - 8, 10, 10, fill, round_=2)
            self.text(x + 14, y + 0.5, text, MUTED, size=10)
            x += wide

    def _close(self, tag: str, inside: str, title: str = "") -> None:
        self._pieces.append(f"<{tag} {inside}>{_title(title)}</{tag}>" if title else f"<{tag} {inside}/>")


def _title(text: str) -> str:
    return f"<title>{escaped(text)}</title>" if text else ""


def _points(points: Sequence[Point2]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(number: float) -> str:
    """A number to a hundredth of a pixel, in few letters."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
