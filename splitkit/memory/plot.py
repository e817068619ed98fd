"""A picture of memory over time: bytes alive at each step, the peak, and what ran when (SVG)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from splitkit.svg import BOTTOM, COLOURS, LEFT, RIGHT, TOP, WIDTH, label, picture
from splitkit.units import size

HEIGHT = 240


@dataclass(frozen=True)
class Plot:
    """What is drawn.

    Attributes:
        timeline: bytes alive while each step runs.
        calls: what ran when -> a range of steps, each in a colour of its own.
        baseline: bytes before the first step.
        peak: the most bytes.
        index: the step of the peak.
        label: what runs there.
    """

    timeline: Sequence[int]
    calls: Mapping[str, range]
    baseline: int
    peak: int
    index: int
    label: str

    def to_svg(self) -> str:
        """A picture that stands alone. Names from the model are escaped."""
        return picture(HEIGHT, self._parts())

    def _parts(self) -> Iterator[str]:
        calls = self.calls or {"": range(len(self.timeline))}
        for number, (call, steps) in enumerate((c, s) for c, s in calls.items() if len(s)):
            colour = COLOURS[number % len(COLOURS)]
            yield self._stairs(steps, colour)
            yield label((self._x(steps.start) + self._x(steps.stop)) / 2, HEIGHT - 6, call, colour, "middle")
        for nbytes, colour in ((self.baseline, "#888"), (self.peak, "#c00")):
            y = self._y(nbytes)
            ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
            yield f'<line {ends} stroke="{colour}" stroke-dasharray="4 3"/>'
            yield label(LEFT - 6, y + 4, size(nbytes), colour, "end")
        if self.label:
            x, y = self._x(self.index + 0.5), self._y(self.peak)
            yield f'<cycle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#c00"/>'
            yield label(x, y - 8, self.label, "#c00", "end" if x > WIDTH / 2 else "start")

    def _stairs(self, steps: range, colour: str) -> str:
        points = [(steps.start, 0)]
        for step in steps:
            points += [(step, self.timeline[step]), (step + 1, self.timeline[step])]
        points.append((steps.stop, 0))
        shown = " ".join(f"{self._x(step):.1f},{self._y(nbytes):.1f}" for step, nbytes in points)
        return f'<polygon points="{shown}" fill="{colour}" fill-opacity="0.55"/>'

    def _x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, len(self.timeline))

    def _y(self, nbytes: int) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * nbytes / max(1, self.peak)
