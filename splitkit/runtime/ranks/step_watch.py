"""Watches a step on an accelerator, where a rank that waits for a lost one gets no error.

On a CPU, gloo raises an error when another rank is gone. On an accelerator the host queues a whole step and goes on;
the device then waits, until the watchdog of NCCL ends the process after the time limit of the group, and names nobody.
So a thread beats for the rank until its device has done the step, and looks for what a failed rank has written to the
store::

    host      step queued ── loss.item() ───────────────────────────▶ (waits for the device)
    device    F0 F1 ... waits for rank 1
    thread    beat  beat  rank 1 has written to the store: say so, and end the process

Ending the process is what the watchdog would do later: what the device waits for never comes, and an aborted message
would leave numbers in memory that nobody has sent.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from splitkit import _torch
from splitkit.runtime.devices.accelerators import has_streams, stream_of
from splitkit.runtime.ranks.first_cause import PATIENCE, leave
from splitkit.runtime.ranks.signs_of_life import BEAT, KEY, Watch, beat_key, note_heard


@contextmanager
def watched(
    rank: int,
    ranks: Sequence[int],
    device: torch.device,
    limit: float,
    over: threading.Event,
    progress: Callable[[], object],
    say: Callable[[str], str],
) -> Iterator[Watch]:
    """Watch a step on an accelerator until its device has done it.

    Args:
        rank: the rank in the default process group.
        ranks: the ranks that may fail with it, in the default process group.
        device: the device of this rank.
        limit: the seconds after which the process group gives up a message.
        over: ends the watch; it is set here if the step fails, and by the caller before the next step.
        progress: returns something that changes while this rank goes on.
        say: makes the message of an error from what a failed rank has written; from "", it finds out who is silent,
            and returns "" if nobody is.
    """
    queued, watch = list[Callable[[], bool]](), Watch(rank, [other for other in ranks if other != rank], "")
    args = (watch, ranks, over, queued, max(limit - 2 * PATIENCE - BEAT, 0.9 * limit), progress, say)
    threading.Thread(target=_watch, args=args, name="watch", daemon=True).start()
    try:
        yield watch
        # a device without streams is not asked
        queued.append(stream_of(device).record_event().query if has_streams(device) else lambda: True)
    except BaseException:
        over.set()
        raise


def _watch(
    watch: Watch,
    ranks: Sequence[int],
    over: threading.Event,
    queued: list[Callable[[], bool]],
    patience: float,
    progress: Callable[[], object],
    say: Callable[[str], str],
) -> None:
    seen, since = progress(), time.monotonic()
    # a store that is gone shows in the main thread, which reports it
    with suppress(Exception):
        store: Any = None
        while not over.wait(BEAT) and not (queued and queued[0]()):
            store = _torch.default_store().clone() if store is None else store
            store.add(beat_key(watch.own), 1)
            now = (progress(), bool(queued))
            seen, since = (seen, since) if now == seen else (now, time.monotonic())
            line = str(store.get(KEY).decode()) if store.check([KEY]) else ""
            if line and not watch.cause:
                watch.cause = line
                note_heard(store, watch.own)
            if not line and time.monotonic() - since < patience:
                continue
            # the main thread may get an error by itself, or need nothing more from the rank that failed
            if line and (over.wait(PATIENCE) or (queued and queued[0]())):
                return
            if message := say(line):
                _end(message, watch.own, ranks)
            since = time.monotonic()


def _end(message: str, rank: int, ranks: Sequence[int]) -> None:
    """Say what happened, let the others read it, and end the process."""
    sys.stdout.flush()
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    leave(rank, ranks)
    os._exit(1)
