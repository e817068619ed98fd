"""A deadline for searches, which records whether it stopped one."""

from __future__ import annotations

import math
import time


class Clock:
    """The deadline of a search whose steps are counted; only a machine that is far too slow or busy reaches it.

    Counts decide what is found, so that every machine finds the same placement. If the clock ends part of a search
    nevertheless, ``timed_out`` becomes true and stays true, and the note of the plan says that another machine may find
    another plan. The clock counts the time of this thread, which stands still while other threads have the processor.

    Args:
        seconds: the time until the end.
        whole: the clock of the whole search, if this clock is for a part of it. The part ends when the whole does, and
            all parts together take no more time than the whole has.

    Attributes:
        timed_out: whether a search asked `is_over` after the end, and so stopped early.
    """

    def __init__(self, seconds: float, whole: Clock | None = None) -> None:
        self._end = time.thread_time() + seconds
        self._whole = whole
        self.timed_out = False

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self._first_end - time.thread_time()  # asked once: it takes a millisecond on some machines

    @property
    def _first_end(self) -> float:
        return self._end if self._whole is None else min(self._end, self._whole._first_end)

    def is_over(self) -> bool:
        """Return whether the end has come; a caller must stop then, as the clock records that it timed out."""
        over = self.left < 0
        self.timed_out |= over
        return over

    def forgive(self, seconds: float) -> None:
        """Extend the deadline by time that a less busy machine would not have taken."""
        self._end += seconds
        if self._whole is not None:
            self._whole.forgive(seconds)


def endless_clock() -> Clock:
    """Return a clock that never ends a search."""
    return Clock(math.inf)
