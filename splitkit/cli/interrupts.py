"""Remembers an interrupt (SIGINT) that the import of a module has swallowed.

Python raises ``KeyboardInterrupt`` wherever it is. If that is in C code which imports a module and goes on without it,
as torch's does with numpy (2.13), the exception is cleared: the command would end with an error about a module that is
half imported, or would start its ranks and train.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Interrupt:
    """Handles SIGINT as Python does.

    Attributes:
        came: whether there was one.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        """Note the interrupt, and raise it."""
        self.came = True
        raise KeyboardInterrupt


@contextmanager
def remembered_interrupts() -> Iterator[Interrupt]:
    """Remember whether SIGINT came, unless something else than Python handles it."""
    found, before = Interrupt(), signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield found
        return
    signal.signal(signal.SIGINT, found)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)


def raise_interrupt() -> None:
    """Raise ``KeyboardInterrupt`` if SIGINT came and was swallowed."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupt) and handler.came:
        raise KeyboardInterrupt
