"""The garbage collector at rest, or at work on new objects only, while nothing is made that it could collect."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Nothing that a simulation makes is garbage; looking for it again and again takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_STEP = 1500  # new objects: so many are still in the processor's cache
_NEVER = 2**31 - 1


@contextmanager
def collector_of_new_objects() -> Iterator[None]:
    """The collector looks at each new object once, soon, and at no old ones.

    For code that makes many objects, of which most stay. By its own rules the collector would look at all objects of
    the process again and again; at rest it would look at all new ones at the end, when none is in the cache any more.
    """
    before = gc.get_threshold()
    gc.set_threshold(_STEP if before[0] else 0, _NEVER, _NEVER)  # 0: the caller has put it to rest
    try:
        yield
    finally:
        gc.set_threshold(*before)
