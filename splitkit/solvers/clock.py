"""When a search ends at the latest, and whether that ended it."""

from __future__ import annotations

import math
import time


class Clock:
    """The far end of a search whose steps are counted: only a machine that is much too slow or busy meets it.

    Counts decide what is found, so that every machine finds the same. Where the clock ends a part of the search all the
    same, ``cut`` says so from then on, and whoever made the plan tells: another machine may find another one. Time is
    that of this thread, which does not pass while others have the processor.

    Args:
        seconds: until the end.
        whole: of the search that this is a part of, whose end is this one's too; parts that share it have together no
            more time than it has.
    """

    def __init__(self, seconds: float, whole: Clock | None = None) -> None:
        self._end = time.thread_time() + seconds
        self._whole = whole
        self.cut = False

    @property
    def left(self) -> float:
        """Seconds until the end, less than 0 after it."""
        own = self._end - time.thread_time()
        return own if self._whole is None else min(own, self._whole.left)

    def is_over(self) -> bool:
        """Whether the end has come; who asks stops then, so that the search is cut."""
        over = self.left < 0
        self.cut |= over
        return over

    def forgive(self, seconds: float) -> None:
        """Leave time out of account that a machine less busy would not have taken."""
        self._end += seconds
        if self._whole is not None:
            self._whole.forgive(seconds)


def endless() -> Clock:
    """A clock that never ends a search."""
    return Clock(math.inf)
