"""Refuse a model that seeds a random number generator while it is traced: the seed would be set now and never again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from splitkit.errors import CaptureError
from splitkit.frontends.capture.capture_errors import user_line

_TORCH = str(Path(torch.__file__).parent)  # torch saves and restores the RNG state around its own traces
_SEEDING = ("manual_seed", "seed", "set_rng_state")
_LOCK = threading.RLock()  # patches of two threads that overlap would not all be undone


@contextmanager
def refuse_seeding() -> Iterator[None]:
    """Refuse calls of ``torch.manual_seed`` and its like by code outside of torch.

    No tracer records them: export and ``symbolic_trace`` run them once, and the graph draws other numbers than the
    model. ``Generator.manual_seed`` is not seen, since its class cannot be patched; `splitkit.compare` notices it.

    Raises:
        CaptureError: SK410 with the line of the model.
    """
    me = threading.get_ident()  # other threads may seed meanwhile
    with _LOCK, ExitStack() as stack:
        for name in _SEEDING:
            for module in (torch, torch.random):
                stack.enter_context(patch.object(module, name, _refusing(name, getattr(module, name), me)))
        yield


def _refusing(name: str, original: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            return original(*args, **kwargs)
        raise CaptureError(
            "SK410",
            f"the model calls torch.{name}, which tracing loses: the graph would draw other numbers{user_line()}",
            "Seed before the model is called, or make the random numbers an input.",
        )

    return refuse
