"""Measure the time of a computation without the time that other processes took from it on a busy machine.

``perf_counter`` measures wall time. If torch has one thread, ops run in the calling thread, and ``thread_time`` is the
time that this thread ran on a processor. The difference is time of other processes, unless the thread gave up the
processor voluntarily (it slept, or waited for a lock or a device); the kernel counts such context switches. With
several threads no counter gives the time of an op, so wall time is used.

The kernel also tells whether a machine was busy: it sums up how long runnable threads waited for a processor.
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
"""Share of wall time: a computation that waits longer for a processor ran on a busy machine."""
_WORKED = 0.9  # share of wall time: less CPU time shows a busy machine where the kernel does not report waiting
_TASKS = Path("/proc/self/task")


class OwnTime:
    """A clock for work of the calling thread, which also tells whether the machine was busy since it was made."""

    def __init__(self) -> None:
        self._alone = torch.get_num_threads() == 1
        self._passed, self._worked, self._waited = time.perf_counter(), self._work(), waiting_seconds()
        self._last = self._passed, self._worked, voluntary_switches()
        self._own = 0.0

    def now(self) -> float:
        """Return seconds whose differences are times of computations; reading the clock adds nothing to them."""
        if not self._alone:
            return time.perf_counter()
        before, worked, given = self._last
        passed, then, count = time.perf_counter() - before, time.thread_time(), voluntary_switches()
        self._own += passed if count > given else min(passed, then - worked)
        self._last = time.perf_counter(), then, count
        return self._own

    def is_busy(self) -> bool:
        """Whether other processes took a share of the processors that distorts the times."""
        passed, waited = time.perf_counter() - self._passed, waiting_seconds()
        if waited is None or self._waited is None:
            return self._work() - self._worked < _WORKED * passed
        return waited - self._waited > WAITED * passed

    def _work(self) -> float:
        return time.thread_time() if self._alone else time.process_time()


def voluntary_switches() -> int:
    """Return the voluntary context switches of the calling thread; 0 where they are not counted."""
    if sys.platform == "win32":
        return 0
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def waiting_seconds() -> float | None:
    """Return the seconds that all threads of this process have waited for a processor; None if not counted."""
    waited = [*_nanoseconds()]
    return sum(waited) / 1e9 if waited else None


def _nanoseconds() -> Iterator[int]:
    """Yield how long each thread has waited: the second of run time, wait time and time slices in ``schedstat``."""
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError, ValueError, IndexError):  # a thread that has ended meanwhile, or another kernel
                yield int((task / "schedstat").read_bytes().split()[1])
