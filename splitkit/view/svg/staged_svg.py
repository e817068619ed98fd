"""Draws a training step in stages as a still picture: the ladder of its stages, and its simulated step below."""

from __future__ import annotations

from dataclasses import dataclass

from splitkit.units import size
from splitkit.view.colours import INK, MUTED, RIBBON, colour
from splitkit.view.data.staged_ladder import StagedView
from splitkit.view.svg.drawing import Drawing, stacked
from splitkit.view.svg.ladder_svg import BOX, LEFT, RIBBONS, ROW, Column, Item, LadderDrawing, stripes
from splitkit.view.svg.timeline import timeline_svg


@dataclass(frozen=True)
class StagedDrawing(LadderDrawing):
    """A ladder of the stages of a training step; ``data`` is what `StagedView.still` returns."""

    @property
    def _divided(self) -> bool:
        return bool(self.data["divided"])

    @property
    def _columns(self) -> list[Column]:
        step = BOX + RIBBONS
        found = [Column("forward", "", LEFT, "forward ↓")]
        if not self._divided:
            return [*found, Column("backward", "∇ ", LEFT + step, "backward ↑")]
        early = Column("backward", "∇x ", LEFT + step, "gradients of inputs ↑")
        return [*found, early, Column("weight", "∇w ", LEFT + 2 * step, "gradients of weights")]

    @property
    def _between(self) -> list[tuple[str, str]]:
        waits = [("waits", "waits for the weight part (bytes)")] if self._divided else []
        return [("saved", "saved for backward (bytes)"), *waits]

    @property
    def _heading(self) -> str:
        again = sum(self.data["counts"]["again"])
        return f"{super()._heading}, {size(sum(b for *_, b in self.data['saved']))} saved" + (
            f", {again} ops computed again" if again else ""
        )

    def _about(self, stage: int) -> list[tuple[str, str]]:
        """Return the lines beside a stage: what its parts take, what it saves, and what waits."""
        again, waiting = (self.data["stages"][name][stage] for name in ("again", "waiting"))
        more = [f"{again:.0f} ops again"] if again else []
        more += [f"{size(waiting)} waits"] if waiting else []
        return [*super()._about(stage), *((line, MUTED) for line in more)]

    def _is_empty(self, item: Item, column: str) -> bool:
        return not any(self.data["counts"][column][item.start : item.end])

    def _marks(self, draw: Drawing, item: Item) -> None:
        """Hatch the share of a backward box that is the time of ops computed again."""
        times, span = self.data["times"], slice(item.start, item.end)
        if any(self.data["counts"]["again"][span]):
            whole = sum(times["backward"][span])
            share = min(1.0, sum(times["again"][span]) / whole) if whole else 0.0
            left = self._columns[1].x
            draw.path(stripes(left, item.y, max(BOX * share, 4), ROW), "#ffffff", 1.5, opacity=0.4)

    def _legend(self) -> list[tuple[str, str]]:
        found = [(RIBBON, "line: read by the box, ribbon: held until its end, as wide as its bytes")]
        if any(self.data["counts"]["again"]):
            found.append((colour(0), "hatched: computed again in backward"))
        found.append((INK, "▼ activations, ▲ gradients that cross"))
        return found


def staged_svg(view: StagedView) -> str:
    """Return the still picture of a training step in stages."""
    data = view.still()

    def saved(start: int, end: int) -> int:
        return sum(int(nbytes) for row, _, nbytes in data["saved"] if start <= row < end)

    ladder = StagedDrawing(data, saved).to_svg()
    return ladder if view.run is None else stacked([ladder, timeline_svg(view.run, view.memory)])
