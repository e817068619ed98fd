"""Draws forward and backward of a training step as a still picture: the ladder, with the border between its halves."""

from __future__ import annotations

from dataclasses import dataclass

from splitkit.units import size
from splitkit.view.colours import INK, colour, mixed
from splitkit.view.data.joint_ladder import HalvesView
from splitkit.view.svg.drawing import Drawing
from splitkit.view.svg.ladder_svg import BOX, GAP, LEFT, RIBBONS, ROW, TOP, Item, LadderDrawing, stripes

_FORWARD, _BACKWARD = 0, 1
_EDGE = 12


@dataclass(frozen=True)
class HalvesDrawing(LadderDrawing):
    """A ladder of forward and backward; ``data`` is what `splitkit.view.data.joint_ladder.HalvesView.still` returns."""

    @property
    def _heading(self) -> str:
        again = f", {len(self.data['again'])} ops computed again" if self.data["again"] else ""
        return f"{size(self.data['bytes'])} saved for backward{again}"

    @property
    def _border_texts(self) -> list[str]:
        return []  # its only border lies between the halves, in the middle

    def _fill(self, item: Item, late: bool) -> str:
        return colour(_BACKWARD if late else _FORWARD)

    def _bands(self, draw: Drawing) -> None:
        high = self.items[-1].y + ROW + GAP - TOP + GAP
        for x, number in ((LEFT, _FORWARD), (self._right - BOX, _BACKWARD)):
            draw.rect(x - _EDGE, TOP - GAP, BOX + 2 * _EDGE, high, mixed(colour(number), 0.12))
        middle = LEFT + BOX + RIBBONS / 2
        draw.line((middle, TOP - GAP), (middle, TOP - GAP + high), INK, 1.3, dashes="6 4")

    def _marks(self, draw: Drawing, item: Item) -> None:
        """Hatch the share of a backward box that is the time of ops computed again."""
        spent = sum(self.data["times"]["again"][item.start : item.end])
        whole = sum(self.data["times"]["backward"][item.start : item.end])
        if not any(self.data["recomputed"][item.start : item.end]):
            return
        left, wide = self._right - BOX, BOX * min(1.0, spent / whole if whole else 0.0)
        draw.path(stripes(left, item.y, max(wide, 4), ROW), "#ffffff", 1.5, opacity=0.4)

    def _legend(self) -> list[tuple[str, str]]:
        return [(colour(_BACKWARD), "hatched: computed again in backward")] if self.data["again"] else []


def halves_svg(halves: HalvesView) -> str:
    """Return the still picture of the chosen division of a step."""
    data = halves.still()

    def saved(start: int, end: int) -> int:
        return sum(int(nbytes) for row, _, nbytes in data["saved"] if start <= row < end)

    return HalvesDrawing(data, saved).to_svg()
