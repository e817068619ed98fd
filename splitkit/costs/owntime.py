"""The time that a computation takes by itself: on a busy machine more passes, for others hold the processor meanwhile.

``perf_counter`` is the time that passes. Where torch has one thread, ops run in the calling thread, and ``thread_time``
is the time that this thread held a processor: the difference is time that others had, unless the thread gave the
processor up of its own accord (it slept, or waited for a lock or a device), which the kernel counts. With several
threads no such counter tells an op's time, so the time that passes has to do.

The kernel also knows whether a machine was busy: it counts for how long threads that could run waited for a processor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

with suppress(ImportError):  # not on Windows
    import resource

WAITED = 0.05
"""Share of the time that passes: a computation that waits longer for a processor ran on a busy machine."""
_WORKED = 0.9  # share of the time that passes: less work shows a busy machine where the kernel does not count waiting
_TASKS = Path("/proc/self/task")


class OwnTime:
    """A clock for what runs in the calling thread, which also tells whether the machine was busy since it was made."""

    def __init__(self) -> None:
        self._alone = torch.get_num_threads() == 1
        self._passed, self._worked, self._waited = time.perf_counter(), self._work(), waiting()
        self._last = self._passed, self._worked, given_up()
        self._own = 0.0

    def now(self) -> float:
        """Seconds, of which differences are what a computation took by itself; reading the clock takes none of them."""
        if not self._alone:
            return time.perf_counter()
        before, worked, given = self._last
        passed, then, count = time.perf_counter() - before, time.thread_time(), given_up()
        self._own += passed if count > given else min(passed, then - worked)
        self._last = time.perf_counter(), then, count
        return self._own

    def is_busy(self) -> bool:
        """Whether others held the processors for a part of the time that matters."""
        passed, waited = time.perf_counter() - self._passed, waiting()
        if waited is None or self._waited is None:
            return self._work() - self._worked < _WORKED * passed
        return waited - self._waited > WAITED * passed

    def _work(self) -> float:
        return time.thread_time() if self._alone else time.process_time()


def given_up() -> int:
    """How often the calling thread has given up the processor of its own accord; 0 where nobody counts."""
    if sys.platform == "win32":
        return 0
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def waiting() -> float | None:
    """Seconds that this process's threads have waited for a processor, all together; None where nobody counts."""
    waited = [*_nanoseconds()]
    return sum(waited) / 1e9 if waited else None


def _nanoseconds() -> Iterator[int]:
    """How long each thread has waited; the kernel writes time held, time waited, and how often it had a turn."""
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError, ValueError, IndexError):  # a thread that has ended meanwhile, or another kernel
                yield int((task / "schedstat").read_bytes().split()[1])
