"""What is switched off, or cleared away, around a trace by Dynamo and AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_globals(function: Callable[..., Any]) -> Iterator[None]:
    """Dynamo leaves what it captured among the globals of the function, where model and inputs would live for ever."""
    names: dict[str, Any] = function.__globals__
    before = names.keys() | set()
    try:
        yield
    finally:
        for name in names.keys() - before:  # __compiled_fn_..: 2.11, 2.13, 2.15
            del names[name]


@contextmanager
def without_onednn() -> Iterator[None]:
    """The LSTM of oneDNN keeps for backward what its fake kernel does not show: it is taken apart instead."""
    before = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags warns of TF32: 2.11, 2.13, 2.15
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
