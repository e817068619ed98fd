"""Work as a number that a busy machine does not move: lines of Python that run, and calls of C functions."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(run: Callable[[], object]) -> Counter[str]:
    """How often each place in the code runs while ``run()`` does: lines, rounds of comprehensions, calls of C."""
    found: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        found[f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1
        return trace

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            found[f"{frame.f_code.co_filename}:{frame.f_lineno} {argument.__name__}"] += 1

    before = sys.gettrace(), sys.getprofile()
    gc.disable()  # what it finalizes is not the work of ``run``
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        gc.enable()
    return found
