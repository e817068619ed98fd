"""Loggers, warnings and prints of models, and of torch about them, which no capture is to stop at or to repeat."""

from __future__ import annotations

import builtins
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
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


@contextmanager
def without_partial_graph() -> Iterator[None]:
    """What fails in ``torch.export`` is an error, and not also its graph so far on stderr, twice (2.13, 2.15).

    All else that is written there meanwhile comes at the end.
    """
    written, graph = StringIO(), None
    try:
        with redirect_stderr(written):
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", None)
        raise
    finally:
        text = written.getvalue()
        sys.stderr.write(text if graph is None else text.replace(f"{graph}\n", ""))


@contextmanager
def without_meta_errors() -> Iterator[None]:
    """Keep torch from logging an error of a fake tensor, with a traceback of twenty lines, before it raises that error.

    Checked on torch 2.11, 2.13 and 2.15.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_is_no_meta_error)
    try:
        yield
    finally:
        log.removeFilter(_is_no_meta_error)


def _is_no_meta_error(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


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
