"""Finds which rank failed first, where ranks wait for each other in a chain.

::

    rank 0 ──waits──▶ rank 1 ──waits──▶ rank 2 (killed, or stopped)

A rank that is killed or stopped says nothing, and rank 0 sees only that rank 1 has given up. So each rank that waits
long writes a beat to the store of the process group now and then, and the first rank that misses another one
looks whose beats have stopped. It writes what it found to the store, which all others then repeat.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from splitkit import _torch
from splitkit.runtime.ranks.signs_of_life import BEAT, KEY, beat_key, heard_key, note_heard

PATIENCE = 3.0
"""Seconds that a rank waits for the line of a failed rank, and in which it listens for beats. Not tuned: writing the
line takes milliseconds."""

_T = TypeVar("_T")


def report_cause(line: str) -> str:
    """Write the cause of a failure to the store, unless another rank has; return the cause that it has then."""

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


def leave(own: int, ranks: Sequence[int]) -> None:
    """Let a rank that has failed go when the others have heard of the cause: it may hold the store.

    Args:
        own: the rank; all are ranks in the default process group.
        ranks: the ranks that may have failed with it.
    """

    def heard_by_all() -> None:
        store = _torch.default_store().clone()
        note_heard(store, own)
        awaited = [rank for rank in ranks if rank != own]
        before, since = [-1], time.monotonic()
        while awaited and time.monotonic() - since < 3 * BEAT:
            awaited = [rank for rank in awaited if not store.check([heard_key(rank)])]
            beats = [store.add(beat_key(rank), 0) for rank in awaited]
            if beats != before:
                before, since = beats, time.monotonic()
            time.sleep(BEAT / 5)

    _within(2 * PATIENCE, heard_by_all)


def _has_agent() -> bool:
    """Whether the store belongs to torchrun's agent rather than to rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listened(store: Any, own: int, others: Sequence[int]) -> tuple[str, list[bool], list[bool]]:
    """Return the cause in the store, or whether each other rank is alive, and whether it misses a rank itself."""
    store.set_timeout(timedelta(seconds=PATIENCE))
    store.add(_missing(own), 1)
    before = [store.add(beat_key(rank), 0) for rank in others]
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if store.check([KEY]):
            return str(store.get(KEY).decode()), [], []
        time.sleep(BEAT / 5)
    alive = [store.add(beat_key(rank), 0) > count for rank, count in zip(others, before, strict=True)]
    return "", alive, [store.add(_missing(rank), 0) > 0 for rank in others]


def _missing(rank: int) -> str:
    return f"splitkit: rank {rank} misses another"


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
