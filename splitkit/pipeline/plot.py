"""A picture of a pipeline step: what each rank computes when, and its peak memory (SVG)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from splitkit.pipeline.order import KINDS
from splitkit.pipeline.trace import Event
from splitkit.svg import BOTTOM, COLOURS, LEFT, TOP, WIDTH, label, picture
from splitkit.units import duration, size

ROW = 22
MARGIN = 84
"""Right of the rows, for the peaks."""

_GREY = "#888"
_LETTER = 14  # pixels that a number needs
_LEAST = 0.5  # pixels that an action is drawn with; narrower ones are drawn with the next


@dataclass(frozen=True)
class SchedulePlot:
    """What is drawn.

    Attributes:
        timeline: what ran when, rank after rank.
        seconds: how long the step takes.
        peaks: bytes of each rank.
        unit: what ``seconds`` counts: ``"s"``, or that of nominal prices.
    """

    timeline: Sequence[Event]
    seconds: float
    peaks: Sequence[int]
    unit: str = "s"

    def to_svg(self) -> str:
        """A picture that stands alone. A microbatch has its number; actions below half a pixel are drawn together."""
        return picture(TOP + ROW * len(self.peaks) + BOTTOM, self._parts())

    def _parts(self) -> Iterator[str]:
        for rank, events in groupby(self.timeline, key=lambda event: event.rank):
            yield from self._row(rank, events)
        for rank, peak in enumerate(self.peaks):
            y = TOP + ROW * rank + ROW * 0.65
            yield label(LEFT - 6, y, f"rank {rank}", _GREY, "end")
            yield label(WIDTH - MARGIN + 6, y, size(peak), "#c00" if peak == max(self.peaks) else _GREY, "start")
        used = {event.kind for event in self.timeline}
        for place, kind in enumerate(kind for kind in KINDS if kind in used):
            yield label(LEFT + 150 * place, TOP - 12, KINDS[kind], _colour(kind), "start")
        bottom = TOP + ROW * len(self.peaks) + 14
        yield label(LEFT, bottom, "0", _GREY, "start")
        yield label(WIDTH - MARGIN, bottom, duration(self.seconds, self.unit), _GREY, "end")

    def _row(self, rank: int, events: Iterator[Event]) -> Iterator[str]:
        y = TOP + ROW * rank + 2
        small: tuple[float, float, Event] | None = None  # what is not wide enough to be drawn yet
        for event in events:
            left, right = self._x(event.start), self._x(event.end)
            if small and left - small[1] > _LEAST:
                yield from _box(y, *small)
                small = None
            left = small[0] if small else left
            small = (left, right, event) if right - left < _LEAST else None
            if not small:
                yield from _box(y, left, right, event)
        if small:
            yield from _box(y, *small)

    def _x(self, seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - MARGIN) * (seconds / self.seconds if self.seconds else 0.0)


def _box(y: float, left: float, right: float, event: Event) -> Iterator[str]:
    shape = f'x="{left:.2f}" y="{y}" width="{right - left:.2f}" height="{ROW - 4}"'
    opacity = 0.75 if event.microbatch % 2 else 0.5
    yield f'<rect {shape} fill="{_colour(event.kind)}" fill-opacity="{opacity}"/>'
    if right - left >= _LETTER:
        yield label((left + right) / 2, y + ROW * 0.6, str(event.microbatch), "#222", "middle")


def _colour(kind: str) -> str:
    return COLOURS[list(KINDS).index(kind)]
