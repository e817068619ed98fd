"""Pause Python's garbage collector, or restrict it to new objects, around code that makes no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collector. Simulations make no cyclic garbage, and repeated collections take half of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_STEP = 1500  # new objects per collection; so many are still in the CPU's cache
_NEVER = 2**31 - 1  # the largest threshold that CPython takes, a C int


@contextmanager
def collector_for_new_objects() -> Iterator[None]:
    """Let the collector look at each new object once, soon after it is made, and never at old objects.

    This is for code that makes many objects, most of which stay. By default the collector would visit all objects of
    the process again and again. Paused, it would visit all new objects at the end, when they are no longer in the
    cache.
    """
    before = gc.get_threshold()
    gc.set_threshold(_STEP if before[0] else 0, _NEVER, _NEVER)  # 0: the caller has paused it
    try:
        yield
    finally:
        gc.set_threshold(*before)
