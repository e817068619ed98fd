"""Draws memory over time as a still picture: bytes alive at each step, the calls, the peak and the capacity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from splitkit.graph.dataflow import module_path
from splitkit.memory.profile import MemoryProfile
from splitkit.units import bounded, size
from splitkit.view.svg.drawing import BAD, INK, MUTED, Drawing, colour, mixed, width
from splitkit.view.svg.scatter import (
    PlotArea,
    horizontal_axis,
    round_size,
    thinned,
    tick_values,
    vertical_axis,
    visible_limit,
)

WIDTH, HEIGHT = 820, 300  # pixels
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 62, 66  # pixels around the plot


@dataclass(frozen=True)
class MemoryDrawing:
    """A chart of memory over time.

    Attributes:
        profile: the memory at each step.
        memory: the memory limit in bytes, if there is one.
    """

    profile: MemoryProfile
    memory: int | None = None

    @cached_property
    def _frame(self) -> PlotArea:
        most = max(self.profile.peak, visible_limit(self.memory, self.profile.peak) or 0, 1)
        return PlotArea(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM, (max(1, len(self.profile.timeline)), most))

    def to_svg(self) -> str:
        """Return the picture."""
        draw, frame, profile = Drawing(WIDTH), self._frame, self.profile
        limit = f" of {size(self.memory)}" if self.memory else ""
        saved = f", {size(profile.saved)} saved for backward" if profile.saved else ""
        peak = bounded(profile.peak, profile.bounds, profile.unseen)
        title = f"peak {peak}{limit}, {size(profile.baseline)} before{saved}"
        draw.text(8, 16, title, bold=True, size=12, room=WIDTH - 16)
        vertical_axis(draw, frame, tick_values(frame.most[1], binary=True), round_size, "bytes alive")
        if self.profile.calls:  # the steps in which the parent computes something between calls of its parts
            self._area(draw, range(len(profile.timeline)), mixed(MUTED, 0.4), "")
        for number, (call, steps) in enumerate(self._calls()):
            self._call(draw, call, steps, colour(number))
        horizontal_axis(
            draw,
            frame,
            tick_values(len(profile.timeline)),
            lambda value: f"{value:.0f}",
            "step (nodes in the order in which they run)",
        )
        self._peak(draw)
        if self.memory and self.memory <= frame.most[1]:
            self._level(draw, self.memory, BAD, f"capacity {size(self.memory)}")
        self._level(draw, profile.baseline, INK, "before the run")
        return draw.to_svg(HEIGHT - (0 if profile.calls else 28), title)

    def _calls(self) -> Iterator[tuple[str, range]]:
        calls = self.profile.calls or {"": range(len(self.profile.timeline))}
        yield from ((call, steps) for call, steps in calls.items() if len(steps))

    def _call(self, draw: Drawing, call: str, steps: range, fill: str) -> None:
        frame, left, right = self._frame, self._frame.x(steps.start), self._frame.x(steps.stop)
        most = max(self.profile.timeline[step] for step in steps)
        tooltip = f"{call}{': ' if call else ''}steps {steps.start} to {steps.stop - 1}, peak {size(most)}"
        self._area(draw, steps, mixed(fill, 0.55), tooltip)
        if call:
            middle, room = (left + right) / 2, right - left - 4
            draw.rect(left, frame.bottom + 34, max(0.5, right - left - 1), 5, fill, tooltip)
            draw.text(middle, frame.bottom + 53, call, INK, "middle", size=10, room=room, title=tooltip, spare=True)

    def _area(self, draw: Drawing, steps: range, fill: str, tooltip: str) -> None:
        frame = self._frame
        stairs = [(frame.x(at), frame.y(self.profile.timeline[step])) for step in steps for at in (step, step + 1)]
        ends = (frame.x(steps.start), frame.bottom), (frame.x(steps.stop), frame.bottom)
        draw.area([ends[0], *thinned(stairs), ends[1]], fill, tooltip)

    def _level(self, draw: Drawing, nbytes: int, ink: str, text: str) -> None:
        frame = self._frame
        y = frame.y(nbytes)
        draw.line((frame.left, y), (frame.right, y), ink, dashes="4 3")
        for foot in (y - 4, y + 12):
            if foot < frame.bottom and draw.text(frame.left + 4, foot, text, ink, size=10, spare=True, halo=True):
                return

    def _peak(self, draw: Drawing) -> None:
        profile, frame = self.profile, self._frame
        if profile.at is None:
            return
        x, y = frame.x(profile.index + 0.5), frame.y(profile.peak)
        name = f"{profile.at.name} {module_path(profile.at)}".rstrip()
        draw.line((frame.left, y), (frame.right, y), INK, dashes="2 3")
        draw.dot(x, y, 3.5, INK, f"{size(profile.peak)} while {name} runs")
        text, room = f"peak {size(profile.peak)}: {name}", frame.right - frame.left - 20
        half = min(width(text, 10, bold=True), room) / 2
        middle = min(max(x, frame.left + half), frame.right - half)
        for foot in (y - 8, y + 14):
            if draw.text(middle, foot, text, INK, "middle", size=10, bold=True, room=room, spare=True, halo=True):
                return
