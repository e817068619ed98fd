"""Finds which rank failed first, where ranks wait for each other in a chain.

::

    rank 0 ──waits──▶ rank 1 ──waits──▶ rank 2 (killed, or stopped)

A rank that is killed or stopped says nothing, and rank 0 sees only that rank 1 has given up. So each rank in a step
that takes long writes a beat to the store of the process group now and then, and the first rank that misses another one
looks whose beats have stopped. It writes what it found to the store, which all others then repeat.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from splitkit import _torch

KEY = "splitkit: a rank failed"
BEAT = 0.5
"""Seconds between two beats, and those after which a step begins to beat; shorter steps never write to the store."""
PATIENCE = 3.0
"""Seconds that a rank waits for the line of a failed rank, and in which it listens for beats. Not tuned: writing the
line takes milliseconds."""

_LEFT = "splitkit: ranks that have failed"
_T = TypeVar("_T")


@contextmanager
def beating(rank: int) -> Iterator[None]:
    """Write the beats of a rank while the body runs, from a thread that ends with it.

    Args:
        rank: the rank in the default process group.
    """
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(rank, over), name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(BEAT)


def _beat(rank: int, over: threading.Event) -> None:
    # a store that is gone shows in the main thread, which reports it
    with suppress(Exception):
        store: Any = None
        while not over.wait(BEAT):
            store = _torch.default_store().clone() if store is None else store
            beat(store, rank)


def beat(store: Any, rank: int) -> None:
    """Write one beat of a rank."""
    store.add(_key(rank), 1)


def report_cause(line: str) -> str:
    """Write what failed to the store, unless another rank did so before; return what is there then."""

    def write() -> str:
        return str(_torch.default_store().clone().compare_set(KEY, "", line).decode())

    return _within(PATIENCE, write) or line


def reported() -> str:
    """Return what a rank that failed has written to the store; empty if nothing."""

    def read() -> str:
        store = _torch.default_store().clone()
        return str(store.get(KEY).decode()) if store.check([KEY]) else ""

    return _within(PATIENCE, read) or ""


def first_cause(ranks: Sequence[int], own: int, waited_for: int | None, gone: bool) -> str:
    """Return what a failed rank has reported, or which ranks have fallen silent; empty if that cannot be found.

    Args:
        ranks: rank in the pipeline -> rank in the default process group.
        own: this rank in the pipeline.
        waited_for: the rank for which this one waited.
        gone: whether a connection was closed, rather than a time limit reached.
    """
    others = [rank for rank in range(len(ranks)) if rank != own]
    store = _within(PATIENCE, lambda: _torch.default_store().clone())
    heard = _within(2 * PATIENCE, lambda: _listened(store, ranks[own], [ranks[r] for r in others])) if store else None
    what = "is gone" if gone else "does not answer"
    if heard is None:
        host = ranks.index(0) if 0 in ranks and not _has_agent() else own
        return f"rank {host}, which holds the store, {what}" if host != own else ""
    line, alive, missed = heard
    if line:
        return line
    quiet = [rank for rank, misses in zip(others, missed, strict=True) if not misses]
    silent = [rank for rank, beats in zip(others, alive, strict=True) if not beats and rank in quiet]
    if waited_for in silent or len(silent) == 1:
        return report_cause(f"rank {waited_for if waited_for in silent else silent[0]} {what}")
    if silent:
        return report_cause(f"one of the ranks {', '.join(map(str, silent))} {what}")
    return report_cause(f"rank {quiet[0]} runs, but does not answer") if len(quiet) == 1 and not gone else ""


def leave(rank: int, size: int) -> None:
    """Let a rank that has failed go: the one that holds the store waits until the others have read it.

    Args:
        rank: the rank in the default process group.
        size: the number of ranks that may have failed with it.
    """

    def left() -> None:
        store = _torch.default_store().clone()
        store.add(_LEFT, 1)
        end = time.monotonic() + 2 * PATIENCE
        while rank == 0 and not _has_agent() and store.add(_LEFT, 0) < size and time.monotonic() < end:
            time.sleep(BEAT / 5)

    _within(2 * PATIENCE, left)


def _has_agent() -> bool:
    """Whether the store belongs to torchrun's agent rather than to rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listened(store: Any, own: int, others: Sequence[int]) -> tuple[str, list[bool], list[bool]]:
    """Return the line in the store; else which of the other ranks beat, and which of them miss a rank themselves."""
    store.set_timeout(timedelta(seconds=PATIENCE))
    store.add(_missing(own), 1)
    before = [store.add(_key(rank), 0) for rank in others]
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if store.check([KEY]):
            return str(store.get(KEY).decode()), [], []
        time.sleep(BEAT / 5)
    alive = [store.add(_key(rank), 0) > count for rank, count in zip(others, before, strict=True)]
    return "", alive, [store.add(_missing(rank), 0) > 0 for rank in others]


def _missing(rank: int) -> str:
    return f"splitkit: rank {rank} misses another"


def _key(rank: int) -> str:
    return f"splitkit: beats of rank {rank}"


def _within(seconds: float, call: Callable[[], _T]) -> _T | None:
    """Return the result of a call to the store, or ``None`` if it fails or takes longer: its host may be stopped."""
    found: list[_T] = []

    def run() -> None:
        with suppress(Exception):
            found.append(call())

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
