"""Loggers, warnings and prints in the code of a model, which a graph does not have: they stop no capture."""

from __future__ import annotations

import builtins
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WORDS = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log", "isEnabledFor")
_NAMES = ("ignore_logging_functions", "ignore_logger_methods")  # 2.13, 2.15; 2.11


class _Unlisted(set[Any]):
    """A set that lists no members: torch 2.11 sorts and writes them as JSON where it logs its settings, and cannot."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@contextmanager
def without_logging() -> Iterator[None]:
    """Dynamo steps over what logs, warns or prints, where else it would stop, and leave the model in pieces.

    ``logger.isEnabledFor`` is false meanwhile: what it guards is logging too.
    """
    config: Any = torch._dynamo.config
    name = next(name for name in _NAMES if hasattr(config, name))
    with config.patch({name: _Unlisted({*getattr(config, name), *_functions()})}):
        yield


def _functions() -> Iterator[Callable[..., Any]]:
    """All that logs: what libraries have added to loggers (``warning_once``) too."""
    yield from (builtins.print, warnings.warn)
    stack: list[type] = [logging.Logger]
    while stack:
        kind = stack.pop()
        stack += kind.__subclasses__()
        for name, value in vars(kind).items():
            if name.startswith(_WORDS) and callable(value):
                yield value
