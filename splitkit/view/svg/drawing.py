"""Collects the shapes and texts of a still picture and writes them as SVG.

The SVG has no styles, ids or scripts: several pictures in one notebook cannot interfere, and viewers that strip scripts
show them. Texts marked as `spare` are left out where they would overlap others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import Literal

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Verdana, sans-serif"
Anchor = Literal["start", "middle", "end"]
Point2 = tuple[float, float]
_CONTROL = {code: 0xFFFD for code in (*range(32), 0xFFFE, 0xFFFF, *range(0xD800, 0xE000)) if code not in (9, 10, 13)}


def escaped(text: object) -> str:
    """Escape a text for HTML and XML, and replace the characters that XML forbids."""
    return escape(str(text).translate(_CONTROL))


COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6bb1", "#7f7f00")
"""The palette of Okabe and Ito (2008), which colour-blind readers can tell apart; pictures number the parts as well."""

INK, MUTED, LINE, RIBBON, BAD, PAPER = "#1c2330", "#5b6472", "#d9dee6", "#8a94a3", "#c2122b", "#ffffff"
"""Text, secondary text, rules, saved values, what exceeds a limit, and the background: those of the light page."""


def colour(part: int) -> str:
    """Return the colour of the part with that number."""
    return COLOURS[part % len(COLOURS)]


def ink_on(ground: str) -> str:
    """Return black or white, whichever is legible on a background."""
    # 0.299, 0.587, 0.114: the luma weights of ITU-R BT.601; page/scripts/canvas.js has the same rule
    red, green, blue = (int(ground[at : at + 2], 16) for at in (1, 3, 5))
    return "#10151c" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def mixed(ground: str, share: float) -> str:
    """Return a colour mixed with white; ``share`` is the colour's share."""
    parts = (round(255 - share * (255 - int(ground[at : at + 2], 16))) for at in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)


class Drawing:
    """A picture that is being drawn; later shapes cover earlier ones.

    Attributes:
        width: the width in pixels.
    """

    def __init__(self, width: float) -> None:
        self.width = width
        self._pieces: list[str] = []
        self._taken: list[tuple[float, float, float, float]] = []

    def to_svg(self, height: float, about: str) -> str:
        """Return the picture as a complete SVG; screen readers read ``about`` instead."""
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
        """Draw a line of text with its baseline at ``y``; return whether it was drawn.

        Args:
            room: the pixels that it may take; a text that is too long is shortened, and its tooltip has all of it.
            title: the tooltip, also of a text that fits.
            spare: whether to leave it out where it would overlap another text or a place that `keep` keeps free.
            halo: whether to fade what lies below it around the letters.
        """
        shown = text if room is None else shortened(text, room, size, bold)
        if not shown:
            return False
        wide = width(shown, size, bold)
        left = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        # ascent and descent of a line, as shares of the font size
        box = (left, y - size * 0.8, left + wide, y + size * 0.22)
        if spare and any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in self._taken):
            return False
        self._taken.append(box)
        heavy = ' font-weight="600"' if bold else ""
        side = f' text-anchor="{anchor}"' if anchor != "start" else ""
        around = f' stroke="{PAPER}" stroke-width="3" stroke-opacity="0.8" paint-order="stroke"' if halo else ""
        tooltip = title or (text if shown != text else "")
        head = f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{fill}"{side}{heavy}{around}>'
        self._pieces.append(f"{head}{escaped(shown)}{_title(tooltip)}</text>")
        return True

    def keep(self, x: float, y: float, radius: float) -> None:
        """Keep spare texts away from a point."""
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
    ) -> None:
        """Draw a box."""
        more = f' rx="{_n(round_)}"' if round_ else ""
        self._close(
            "rect", f'x="{_n(x)}" y="{_n(y)}" width="{_n(wide)}" height="{_n(high)}" fill="{fill}"{more}', title
        )

    def path(
        self, d: str, stroke: str, wide: float = 1, title: str = "", *, dashes: str = "", opacity: float = 1
    ) -> None:
        """Draw a line along an SVG path."""
        more = (f' stroke-dasharray="{dashes}"' if dashes else "") + (
            f' opacity="{_n(opacity)}"' if opacity < 1 else ""
        )
        if not title:
            more += ' pointer-events="none"'  # what lies below can be clicked
        self._close("path", f'd="{d}" fill="none" stroke="{stroke}" stroke-width="{_n(wide)}"{more}', title)

    def line(self, start: Point2, end: Point2, stroke: str = LINE, wide: float = 1, *, dashes: str = "") -> None:
        """Draw a straight line."""
        self.path(f"M{_n(start[0])},{_n(start[1])} L{_n(end[0])},{_n(end[1])}", stroke, wide, dashes=dashes)

    def area(self, points: Sequence[Point2], fill: str, title: str = "") -> None:
        """Fill a polygon."""
        self._close("polygon", f'points="{_points(points)}" fill="{fill}"', title)

    def polyline(self, points: Sequence[Point2], stroke: str) -> None:
        """Draw a line through points."""
        self._close("polyline", f'points="{_points(points)}" fill="none" stroke="{stroke}" stroke-width="1.5"')

    def dot(
        self, x: float, y: float, radius: float, fill: str, title: str = "", *, line: str = "", link: str = ""
    ) -> None:
        """Draw a point; ``link`` is the id of the element of the page that a click goes to."""
        more = f' stroke="{line}"' if line else ""
        if link:
            self._pieces.append(f'<a href="#{escaped(link)}">')
        self._close("circle", f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"{more}', title)
        if link:
            self._pieces.append("</a>")

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]], room: float) -> None:
        """Draw a legend in one line; entries that do not fit are only counted."""
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


def stacked(pictures: Sequence[str], gap: float = 8) -> str:
    """Return pictures that `Drawing.to_svg` made as one, below each other."""
    sizes = [[float(number) for number in _SIZE.search(picture).groups()] for picture in pictures]  # type: ignore[union-attr]
    wide, high = max(w for w, _ in sizes), sum(h for _, h in sizes) + gap * (len(pictures) - 1)
    whole = Drawing(wide).to_svg(high, ", ".join(unescape(_ABOUT.search(picture)[1]) for picture in pictures))  # type: ignore[index]
    inside, top = [], 0.0
    for picture, (_, height) in zip(pictures, sizes, strict=True):
        # `height:auto` would stretch an inner picture
        inside.append(_STYLE.sub("", picture, count=1).replace("<svg ", f'<svg y="{_n(top)}" ', 1))
        top += height + gap
    return whole.replace("</svg>", "".join(inside) + "</svg>")


_SIZE = re.compile(r'width="([\d.]+)" height="([\d.]+)"')
_ABOUT = re.compile(r'aria-label="([^"]*)"')
_STYLE = re.compile(r' style="[^"]*"')


def _title(text: str) -> str:
    return f"<title>{escaped(text)}</title>" if text else ""


def _points(points: Sequence[Point2]) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(number: float) -> str:
    """Return a number with two decimals, without trailing zeros: pictures are small files."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


# Estimates the width of text without a browser.
#
# The widths are those of DejaVu Sans, which is among the widest screen fonts: what fits by it fits in other fonts too.


_FIRST = 32  # code of the letter with the first width, the space
_WIDTHS = (
    *(318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337),
    *(636, 636, 636, 636, 636, 636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531),
    *(1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863, 748, 787),
    *(603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500),
    *(500, 613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612),
    *(635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838),
)
"""The widths of the characters from space to tilde, in thousandths of the font size."""
_BOLD = 1.13
"""How much wider bold text is."""
_OTHER = 1000
"""The width assumed for all other characters."""


def width(text: str, size: float = 11, bold: bool = False) -> float:
    """Return the most pixels that a text takes."""
    thousandths = sum(_WIDTHS[at] if 0 <= (at := ord(letter) - _FIRST) < len(_WIDTHS) else _OTHER for letter in text)
    return thousandths * size / 1000 * (_BOLD if bold else 1)


def shortened(text: str, room: float, size: float = 11, bold: bool = False, *, end: bool = False) -> str:
    """Shorten a text with an ellipsis so that it fits; return ``""`` if not even one letter does.

    Args:
        text: the text.
        room: the pixels that it may take.
        size: the font size.
        bold: whether the font is bold.
        end: whether to keep the end, which matters more in the path of a module.
    """
    if width(text, size, bold) <= room:
        return text
    room -= width("…", size, bold)
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        kept = text[-middle:] if end else text[:middle]
        low, high = (middle, high) if width(kept, size, bold) <= room else (low, middle - 1)
    if not low:
        return ""
    return f"…{text[-low:]}" if end else f"{text[:low]}…"


# Draws bar charts as still pictures.


WIDTH, NAMES, ROW = 820, 300, 20  # pixels


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


def bars_svg(title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Return a bar chart; names are escaped.

    Args:
        title: the title of the picture.
        groups: (heading, bars); each group has a scale of its own.
    """
    draw, y = Drawing(WIDTH), 34.0
    draw.text(8, 16, title, bold=True, size=12, room=WIDTH - 16)
    for heading, bars in groups:
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
    return draw.to_svg(y, title)
