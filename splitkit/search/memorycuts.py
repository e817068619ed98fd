"""Cuts of a line of nodes into parts that fit their devices: exact, by stretches whose memory is asked for.

The memory of a stretch may fall as it grows, for a value that it took it then makes. What every part with these nodes
holds at least (`Line.least`) never falls: it says which cuts are worth asking for, and the stretch itself decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitkit.memory.falls import Falls
from splitkit.memory.stretch import Line, Stretch
from splitkit.memory.touches import Ints
from splitkit.search.memorystep import Beginnings


@dataclass(frozen=True)
class Limits:
    """What the parts, in their order, may hold.

    Attributes:
        memory: bytes for each part.
        flights: the microbatches of which each holds the saved activations at once.
    """

    memory: Sequence[int]
    flights: Sequence[int]


class MemoryCuts:
    """The parts of one line.

    Attributes:
        line: the line.
        state: bytes of optimizer state for a byte of gradient.
    """

    def __init__(self, line: Line, state: int) -> None:
        self.line = line
        self.state = state
        self._peaks: dict[tuple[int, int], tuple[int, int]] = {}
        self._least: dict[tuple[int, int], tuple[int, int]] = {}
        self._falls: dict[int, Falls] = {}
        messages = line.messages + line.gradient_messages if line.training else line.messages
        self.traffic: list[int] = messages.tolist()

    def peak(self, start: int, end: int, flights: int) -> int:
        """Bytes of the part of the nodes from ``start`` to before ``end``."""
        if (start, end) not in self._peaks:
            self._peaks[start, end] = self._sums(self.line.stretch(start, end))
        once, saved = self._peaks[start, end]
        return once + flights * saved

    def least(self, start: int, end: int, flights: int) -> int:
        """What any part with these nodes has at least."""
        if (start, end) not in self._least:
            self._least[start, end] = self._sums(self.line.least(start, end))
        once, saved = self._least[start, end]
        return once + flights * saved

    def alone(self) -> Ints:
        """(length,) `least` of each node by itself, with one microbatch."""
        parameters, gradients, saved, temporary = self.line.alone()
        return parameters + gradients * (1 + self.state) + temporary + saved

    def _sums(self, held: Stretch) -> tuple[int, int]:
        return held.parameters + held.gradients * (1 + self.state) + held.temporary, held.saved

    def cuts(self, limits: Limits) -> list[int] | None:
        """Where the parts end so that each fits and the least bytes cross, ``None`` if they cannot fit.

        Exact for this line.
        """
        windows = self._windows(limits)
        if windows is None:
            return None
        costs: dict[int, int] = {0: 0}
        steps: list[dict[int, int]] = []
        for part, window in enumerate(windows):
            costs, before = self._next(costs, window, limits.memory[part], limits.flights[part])
            steps.append(before)
        ends = [self.line.length]
        if ends[0] not in costs:
            return None
        for before in reversed(steps):
            ends.append(before[ends[-1]])
        return ends[-2::-1]

    def _next(
        self, costs: dict[int, int], window: range, memory: int, flights: int
    ) -> tuple[dict[int, int], dict[int, int]]:
        """From where parts can end to where the next can: bytes that have crossed by then, and where it begins."""
        after: dict[int, int] = {}
        begins: dict[int, int] = {}
        beginnings = Beginnings(
            costs,
            window,
            memory,
            self._falls_of(flights),
            lambda start, end: self.peak(start, end, flights),
            lambda start, end: self.least(start, end, flights),
        )
        for end in window:
            if (start := beginnings.of(end)) is not None:
                after[end] = costs[start] + (self.traffic[end] if end < self.line.length else 0)
                begins[end] = start
        return after, begins

    def _falls_of(self, flights: int) -> Falls:
        if flights not in self._falls:
            self._falls[flights] = Falls.of(self.line, flights)
        return self._falls[flights]

    def stuck(self, limits: Limits) -> bool:
        """Whether more parts before these would not help either, if they hold no less for the same number after them.

        Then what these parts reach at best from the end ends before a node that is too large for a part so far back.
        """
        begins = self._begins(limits)
        return 0 < begins[-1] == begins[-2]

    def may_fit(self, limits: Limits) -> bool:
        """Whether parts would fit if they held the least that they can."""
        return self._begins(limits)[-1] == 0

    def _begins(self, limits: Limits) -> list[int]:
        """The end, and where each part, from the last one, begins at best."""
        begins, length = [self.line.length], self.line.length
        for part in reversed(range(len(limits.memory))):

            def reaches(back: int, part: int = part) -> bool:
                return self.least(length - back, begins[-1], limits.flights[part]) <= limits.memory[part]

            begins.append(length - _last(reaches, length - begins[-1], length))
        return begins

    def _windows(self, limits: Limits) -> list[range] | None:
        """For each part where it can end if parts held the least that they can."""
        count, length = len(limits.memory), self.line.length
        begins, latest = self._begins(limits), [0]
        if begins[-1]:
            return None
        for part in range(count):

            def reaches(end: int, part: int = part) -> bool:
                return self.least(latest[-1], end, limits.flights[part]) <= limits.memory[part]

            latest.append(_last(reaches, latest[-1], length - (count - 1 - part)))
        return [range(max(part + 1, begins[-2 - part]), latest[part + 1] + 1) for part in range(count)]


def _last(holds: Callable[[int], bool], first: int, end: int) -> int:
    """The last number from ``first`` to ``end`` of which ``holds`` says yes: it does of ``first``, then until no."""
    step, good = 1, first
    while good < end and holds(min(good + step, end)):
        good, step = min(good + step, end), 2 * step
    bad = min(good + step, end + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
