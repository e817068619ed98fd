"""One step of the search over cuts for memory: where the next part can end, and where it then begins most cheaply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush

import numpy as np

from splitkit.memory.falls import Falls
from splitkit.memory.touches import Ints

Peak = Callable[[int, int], int]


class Beginnings:
    """For ends asked for from first to last: the cheapest start of a part that fits.

    The answer is that of asking for the peak of each start, cheapest first; few are asked for, since each says of many
    others whether they fit (`splitkit.memory.falls`).

    Args:
        costs: where the part can begin, and what has crossed by then. Of equals the later start is cheaper.
        window: the ends.
        memory: what the part may hold.
        falls: of the line, with the microbatches that the part holds.
        peak: bytes of a part, from its start to before its end.
        least: the same, of any part with these nodes.
    """

    def __init__(
        self, costs: Mapping[int, int], window: range, memory: int, falls: Falls, peak: Peak, least: Peak
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
        """The start for this end, which is the one after that of the call before; ``None`` if no part fits."""
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
        """Whether a part fits; what follows for others is noted."""
        over = self._peak(start, end) - self._memory
        if over > 0:
            self._fails(start, end, over)
            return False
        self._fits(start, end, end, -over)
        self._look_ahead(start, end)
        return True

    def _fails(self, start: int, end: int, over: int) -> None:
        """No part around this one fits within so many bytes of falls."""
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
        """Whether parts inside this one fit that end from ``known`` on; those of later starts are noted as well.

        Of these only such as are known to fit up to there, so that there is no gap.
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
        """Look for a later end that fits too, in steps that grow."""
        step, known = 1, end
        while known < self._window.stop - 1:
            ahead = min(known + step, self._window.stop - 1)
            spare = self._memory - self._peak(start, ahead)
            if spare < 0 or not self._fits(start, known, ahead, spare):
                return
            known, step = ahead, 2 * step
