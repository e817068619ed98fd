"""One step of the search over cuts for memory: possible ends of the next part, with the cheapest start of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush

import numpy as np

from splitkit.memory.segments.peak_bounds import PeakBounds
from splitkit.memory.segments.segment import Ints

Peak = Callable[[int, int], int]


class PartStarts:
    """The cheapest start of a part that fits, for ends that are asked for in increasing order.

    The answer equals the one from asking for the peak of every start, cheapest first. Few peaks are computed, because
    each answer decides many others (`splitkit.memory.segments.peak_bounds`).

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
