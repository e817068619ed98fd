"""The exact division of one order of nodes into parts that fit their devices, by the true memory of segments.

A segment may need less memory as it grows, because it then makes values that it received before. The lower bound for
every part with its nodes (`OrderMemory.lower_bound`) never decreases: it says which cuts are worth asking for.

For the first k parts, over the segments from i to j that fit the k-th device::

    traffic[0, 0] = 0
    traffic[k, j] = min over i of traffic[k - 1, i] + bytes that cross at j
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

import numpy as np

from splitkit.memory.segment import Ints, OrderMemory, PeakBounds, SegmentMemory


@dataclass(frozen=True)
class Limits:
    """What the parts may hold, in their order.

    Attributes:
        memory: bytes for each part.
        flights: microbatches whose saved activations each part holds at once.
    """

    memory: Sequence[int]
    flights: Sequence[int]


class MemoryCuts:
    """Divisions of one order of nodes.

    Attributes:
        line: the order and its memory.
        state: bytes of optimizer state per byte of gradient.
    """

    def __init__(self, line: OrderMemory, state: int) -> None:
        self.line = line
        self.state = state
        self._held = cache(lambda start, end: self._sums(line.segment(start, end)))
        self._least_held = cache(lambda start, end: self._sums(line.lower_bound(start, end)))
        self._bounds = cache(lambda flights: PeakBounds.of(line, flights))
        messages = line.messages + line.gradient_messages if line.training else line.messages
        self.traffic: list[int] = messages.tolist()

    def peak(self, start: int, end: int, flights: int) -> int:
        """Return the peak bytes of the part with the nodes from ``start`` up to, not including, ``end``."""
        once, saved = self._held(start, end)
        return once + flights * saved

    def least(self, start: int, end: int, flights: int) -> int:
        """Return a lower bound on the bytes of every part that contains these nodes."""
        once, saved = self._least_held(start, end)
        return once + flights * saved

    def alone(self) -> Ints:
        """(length,) `least` of each node by itself, with one microbatch."""
        parameters, gradients, saved, temporary = self.line.single_nodes()
        return parameters + gradients * (1 + self.state) + temporary + saved

    def _sums(self, held: SegmentMemory) -> tuple[int, int]:
        return held.parameters + held.gradients * (1 + self.state) + held.temporary, held.saved

    def cuts(self, limits: Limits) -> list[int] | None:
        """Return where the parts end so that each fits and traffic is least, or ``None`` if they cannot fit.

        The answer is exact for this order.
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
        """Run one step of the dynamic program: from the possible ends of one part to those of the next, with traffic
        and starts.
        """
        after: dict[int, int] = {}
        begins: dict[int, int] = {}
        beginnings = PartStarts(
            costs,
            window,
            memory,
            self._bounds(flights),
            lambda start, end: self.peak(start, end, flights),
            lambda start, end: self.least(start, end, flights),
        )
        for end in window:
            if (start := beginnings.of(end)) is not None:
                after[end] = costs[start] + (self.traffic[end] if end < self.line.length else 0)
                begins[end] = start
        return after, begins

    def stuck(self, limits: Limits) -> bool:
        """Return whether adding parts in front cannot help, as long as those hold no less for the same number after
        them.

        In that case the earliest start that these parts can reach lies behind a node that is too large for any part
        so far back.
        """
        begins = self._begins(limits)
        return 0 < begins[-1] == begins[-2]

    def may_fit(self, limits: Limits) -> bool:
        """Return whether the parts would fit if each held only its lower bound."""
        return self._begins(limits)[-1] == 0

    def _begins(self, limits: Limits) -> list[int]:
        """Return the end, then the earliest start of each part from the last one back, by lower bounds."""
        begins, length = [self.line.length], self.line.length
        for part in reversed(range(len(limits.memory))):

            def reaches(back: int, part: int = part) -> bool:
                return self.least(length - back, begins[-1], limits.flights[part]) <= limits.memory[part]

            begins.append(length - _last(reaches, length - begins[-1], length))
        return begins

    def _windows(self, limits: Limits) -> list[range] | None:
        """Return, for each part, where it can end if parts held only their lower bounds."""
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
    """Return the last number in ``first .. end`` for which ``holds`` is true; it is true at ``first`` and monotone."""
    # steps grow from the start, because long segments take long to price
    step, good = 1, first
    while good < end and holds(min(good + step, end)):
        good, step = min(good + step, end), 2 * step
    return good + bisect_left(range(good + 1, min(good + step, end + 1)), True, key=lambda number: not holds(number))


# One step of the search over cuts for memory: possible ends of the next part, with the cheapest start of each.


Peak = Callable[[int, int], int]


class PartStarts:
    """The cheapest start of a part that fits, for ends that are asked for in increasing order.

    The answer equals the one from asking for the peak of every start, cheapest first. Few peaks are computed, because
    each answer decides many others (`splitkit.memory.segment`).

    Args:
        costs: possible starts, with the traffic up to each; of equal ones the later start is cheaper.
        window: the ends.
        memory: the bytes that the part may hold.
        falls: bounds on how far the peak can fall, for the microbatches that the part holds.
        peak: the bytes of a part, from its start up to its end.
        least: the lower bound for every part with these nodes.
    """

    def __init__(
        self, costs: Mapping[int, int], window: range, memory: int, falls: PeakBounds, peak: Peak, least: Peak
    ) -> None:
        self._memory, self._falls, self._window = memory, falls, window
        self._peak, self._least = peak, least
        self._starts: Ints = np.array(sorted(costs), np.int64)
        self._place = {int(start): i for i, start in enumerate(self._starts)}
        self._key = {start: (cost, -start) for start, cost in costs.items()}
        self._fails_to = np.maximum(self._starts + 1, window.start)  # does not fit an end before this one
        self._fits_to = np.full(len(self._starts), -1, np.int64)  # fits ends from here to this one
        self._asleep: dict[int, list[int]] = {}
        for start, end in zip(self._starts.tolist(), self._fails_to.tolist(), strict=True):
            self._asleep.setdefault(end, []).append(start)
        self._awake: list[tuple[int, int]] = []
        self._now = window.start

    def of(self, end: int) -> int | None:
        """Return the cheapest start for ``end``, or ``None`` if no part fits; call with consecutive ends."""
        self._now = end
        for start in self._asleep.pop(end, ()):
            heappush(self._awake, self._key[start])
        while self._awake:
            start = -self._awake[0][1]
            place = self._place[start]
            if self._fails_to[place] <= end:
                if self._fits_to[place] >= end or self._ask(start, end):
                    return start
                continue
            heappop(self._awake)
            if self._fails_to[place] < self._window.stop:
                self._asleep.setdefault(int(self._fails_to[place]), []).append(start)
        return None

    def _ask(self, start: int, end: int) -> bool:
        """Return whether a part fits, and note what follows for others."""
        over = self._peak(start, end) - self._memory
        if over > 0:
            self._fails(start, end, over)
            return False
        self._fits(start, end, end, -over)
        self._look_ahead(start, end)
        return True

    def _fails(self, start: int, end: int, over: int) -> None:
        """Note that no part around this one fits within ``over`` bytes of falls."""
        ends, starts = self._falls.ends, self._falls.starts
        upto = int(np.searchsorted(self._starts, start, side="right"))
        if self._least(start, end) > self._memory:
            self._fails_to[:upto] = self._window.stop
            return
        first = int(np.searchsorted(starts[self._starts[:upto]], starts[start] - over, side="right"))
        left = over - (starts[start] - starts[self._starts[first:upto]])
        until = np.searchsorted(ends, ends[end] + left)  # the first end by which as much may have fallen
        self._fails_to[first:upto] = np.maximum(self._fails_to[first:upto], until)

    def _fits(self, start: int, known: int, end: int, spare: int) -> bool:
        """Return whether parts inside this one that end from ``known`` on fit; note those with later starts as well.

        Later starts are noted only where parts are known to fit up to there, so that no gap remains.
        """
        ends, starts = self._falls.ends, self._falls.starts
        left = spare - int(ends[end] - ends[known])
        if left < 0:
            return False
        first = self._place[start]
        last = int(np.searchsorted(starts[self._starts], starts[start] + left, side="right"))
        fits_to = self._fits_to[first:last]
        reaches = fits_to >= (known if known > self._now else -1)
        fits_to[reaches] = np.maximum(fits_to[reaches], end)
        return True

    def _look_ahead(self, start: int, end: int) -> None:
        """Look for a later end that fits too, in growing steps."""
        step, known = 1, end
        while known < self._window.stop - 1:
            ahead = min(known + step, self._window.stop - 1)
            spare = self._memory - self._peak(start, ahead)
            if spare < 0 or not self._fits(start, known, ahead, spare):
                return
            known, step = ahead, 2 * step
