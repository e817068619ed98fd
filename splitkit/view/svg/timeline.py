"""Draws a pipeline step as a still picture: the actions of each rank over time, and below them its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from splitkit.pipeline.memory import memory_over_time
from splitkit.pipeline.order import KINDS
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.trace import Event
from splitkit.units import duration, measure, size
from splitkit.view.svg.drawing import BAD, INK, MUTED, RIBBON, Drawing, colour, ink_on, mixed, width
from splitkit.view.svg.scatter import PlotArea, horizontal_axis, thinned, tick_values, visible_limit

WIDTH, LEFT, RIGHT, TOP = 860, 66, 84, 76  # pixels: the picture, and around the plot
_SHADES = {"F": 0.5, "B": 1.0, "I": 1.0, "W": 0.72}
"""The strength of a stage's colour for each kind of action."""
_LEAST = 0.5
"""Pixels; a narrower action is drawn as one with the next, as thousands of them would only make the file large."""
MARK = 4
"""Pixels: the height of the marks of collectives at the foot of an action."""
_MANY = 16
"""With more ranks the picture has no memory curves, only peaks: it would be too tall."""


@dataclass(frozen=True)
class TimelineDrawing:
    """A chart of a pipeline step.

    Attributes:
        run: the simulated step.
        memory: the memory limit of each rank in bytes, if there is one.
    """

    run: ScheduleRun
    memory: int | None = None

    @property
    def _limit(self) -> float | None:
        """The memory limit if a line is drawn for it, else ``None``."""
        return visible_limit(self.memory, max(self.run.peaks)) if self._high[1] else None

    @property
    def _high(self) -> tuple[int, int]:
        """The heights in pixels of a rank's actions and of its memory curve."""
        return (20, 24) if self.run.ranks <= _MANY else (14, 0)

    @cached_property
    def _frame(self) -> PlotArea:
        bottom = TOP + self.run.ranks * (sum(self._high) + 8)
        return PlotArea(LEFT, TOP, WIDTH - RIGHT, bottom, (self.run.seconds, 1))

    def to_svg(self) -> str:
        """Return the picture. Actions carry the number of their microbatch where there is room."""
        draw, run = Drawing(WIDTH), self.run
        title = f"{run.order.name} of {run.order.microbatches} microbatches: {run.figures}"
        draw.text(8, 16, title, bold=True, size=12, room=WIDTH - 16)
        used = {event.kind for event in run.timeline}
        shades = [(mixed("#5b6472", _SHADES[kind]), KINDS[kind]) for kind in KINDS if kind in used]
        stages = [(colour(stage), f"stage {stage}") for stage in range(len(run.stages))]
        held = [(mixed(RIBBON, 0.45), "memory")] if self._high[1] else []
        limit = [(BAD, f"capacity {size(self._limit)}")] if self._limit else []
        marks = [(INK, "collectives")] if any(stage.collectives for stage in run.stages) else []
        draw.legend(LEFT, 36, [*shades, *marks, *held, *limit], WIDTH - LEFT)
        draw.legend(LEFT, 54, stages, WIDTH - LEFT - RIGHT)
        draw.text(WIDTH - RIGHT + 6, TOP - 6, "peak bytes", MUTED, size=10, bold=True)
        for rank, events in groupby(run.timeline, key=lambda event: event.rank):
            self._actions(draw, rank, events)
        bytes_held = memory_over_time(run) if self._high[1] else ()
        for rank in range(run.ranks):
            draw.text(LEFT - 8, self._y(rank) + self._high[0] - 6, f"rank {rank}", MUTED, "end", size=10)
            self._held(draw, rank, bytes_held[rank] if bytes_held else ())
        times = tick_values(run.seconds)
        horizontal_axis(
            draw,
            self._frame,
            times,
            lambda value: duration(value, run.unit) if value else "0",
            f"{measure(run.unit)} of the step",
        )
        return draw.to_svg(self._frame.bottom + 36, title)

    def _y(self, rank: int) -> float:
        return TOP + rank * (sum(self._high) + 8)

    def _actions(self, draw: Drawing, rank: int, events: Iterator[Event]) -> None:
        # a narrow action waits for its neighbour: drawn alone it would vanish, drawn wider it would lie about the time
        small: tuple[float, float, Event] | None = None  # actions that are together not wide enough to be drawn yet
        for event in events:
            left, right = self._frame.x(event.start), self._frame.x(event.end)
            if small and left - small[1] > _LEAST:
                self._action(draw, rank, *small)
                small = None
            left = small[0] if small else left
            small = (left, right, event) if right - left < _LEAST else None
            if not small:
                self._action(draw, rank, left, right, event)
        if small:
            self._action(draw, rank, *small)

    def _action(self, draw: Drawing, rank: int, left: float, right: float, event: Event) -> None:
        fill, y, high = mixed(colour(event.stage), _SHADES[event.kind]), self._y(rank), self._high[0]
        tooltip = ""
        if right - left >= 4:  # wide enough to hover over
            times = f"{duration(event.start, self.run.unit)} to {duration(event.end, self.run.unit)}"
            tooltip = f"{KINDS[event.kind]} of microbatch {event.microbatch}, stage {event.stage}: {times}"
        exchanges = self.run.stages[event.stage].exchanges(event.kind)
        if tooltip and exchanges:
            spent = sum(end - start for start, end in exchanges)
            tooltip += f", {duration(spent, self.run.unit)} of it in {len(exchanges)} collectives"
        gap = min(1.0, (right - left) / 8)
        draw.rect(left, y, right - left - gap, high, fill, tooltip)
        for start, end in exchanges if tooltip else ():
            x, stop = self._frame.x(event.start + start), self._frame.x(event.start + end)
            draw.rect(x, y + high - MARK, max(_LEAST, stop - x), MARK, INK, "collective")
        number = str(event.microbatch)
        if right - left >= width(number, 9) + 4:
            draw.text((left + right) / 2, y + high - 6 + (high < 16), number, ink_on(fill), "middle", size=9)

    def _held(self, draw: Drawing, rank: int, points: tuple[tuple[float, int], ...]) -> None:
        run, (high, room) = self.run, self._high
        peak, base = run.peaks[rank], self._y(rank) + high + room + 2
        tooltip = f"peak {size(peak)}" + (f" of {size(self.memory)}" if self.memory else "")
        ink = BAD if self.memory and peak > self.memory else INK if peak == max(run.peaks) else MUTED
        draw.text(WIDTH - RIGHT + 6, base - (4 if room else 6), size(peak), ink, size=10, title=tooltip)
        if not room:
            return
        frame = PlotArea(LEFT, base - room, WIDTH - RIGHT, base, (run.seconds, max(self._limit or 0, *run.peaks)))
        stairs: list[tuple[float, float]] = []
        for seconds, nbytes in points:
            if stairs:
                stairs.append((frame.x(seconds), stairs[-1][1]))
            stairs.append((frame.x(seconds), frame.y(nbytes)))
        stairs.append((frame.right, stairs[-1][1]))
        corners = [(frame.left, base), *thinned(stairs), (frame.right, base)]
        draw.area(corners, mixed(RIBBON, 0.45), f"memory of rank {rank}, {tooltip}")
        if self._limit:
            y = frame.y(self._limit)
            draw.line((frame.left, y), (frame.right, y), BAD, dashes="4 3")
        draw.line((frame.left, base), (frame.right, base))
