"""Shows the other ranks that this one is alive and what it waits for, and says which ranks a long wait is for.

A call of torch that waits for another rank cannot be interrupted, and gives up after the time limit of the process
group only, half an hour by default. A rank that left its loop, or that is stopped, is therefore named long before, in a
line of the log of every rank that waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from splitkit import _torch

KEY = "splitkit: a rank failed"
BEAT = 0.5
"""Seconds between two beats, and those after which a wait begins to beat; shorter ones never write to the store."""
SILENCE = 4.0
"""Seconds without a beat after which a rank is named, the first time; not tuned. Each next time takes twice as long."""

_log = logging.getLogger("splitkit.runtime")


@dataclass
class Watch:
    """The wait of a rank, and when it last saw the others beat.

    Attributes:
        own: the rank.
        others: the ranks that it may wait for; all are ranks in the default process group.
        waits: what it waits for together with all of them, as in "for all ranks to begin the call"; empty in a step.
        begun: when the wait began.
        beats: rank -> its number of beats, and when it last grew.
        elsewhere: which ranks wait for something else, and what; empty if none do, or if the wait was short.
        cause: what a rank that failed has reported; empty if nothing.
    """

    own: int
    others: Sequence[int]
    waits: str
    begun: float = field(default_factory=time.monotonic)
    beats: dict[int, tuple[int, float]] = field(default_factory=dict)
    elsewhere: str = ""
    cause: str = ""

    def look(self, store: Any) -> None:
        """Read the beats of the others."""
        now = time.monotonic()
        for rank in self.others:
            count = store.add(beat_key(rank), 0)
            if self.beats.get(rank, (None, 0.0))[0] != count:
                self.beats[rank] = count, now if rank in self.beats else self.begun

    def missed(self, store: Any) -> list[str]:
        """Say which ranks are silent, or wait for something else; note the latter in `elsewhere`."""
        now = time.monotonic()
        silent = [rank for rank in self.others if now - self.beats[rank][1] >= SILENCE - BEAT]
        elsewhere = []
        for rank in set(self.others) - set(silent) if self.waits else ():
            what = store.get(_wait_key(rank)).decode() if store.check([_wait_key(rank)]) else ""
            if what and what != self.waits:
                elsewhere.append(f"rank {rank} waits {what}")
        self.elsewhere = "; ".join(elsewhere)
        return [*(f"rank {rank} is stopped, or busy with something else" for rank in silent), *elsewhere]


@contextmanager
def beating(own: int, ranks: Sequence[int], waits: str = "") -> Iterator[Watch]:
    """Write the beats of a rank while the body runs, and log whom it waits for if that takes long.

    Args:
        own: the rank in the default process group.
        ranks: the ranks that run the body, in the default process group.
        waits: what all of them wait for together, as in "for all ranks to begin the call"; empty inside a step.
    """
    over = threading.Event()
    watch = Watch(own, [rank for rank in ranks if rank != own], waits)
    thread = threading.Thread(target=_beat, args=(watch, over), name="beats", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join(BEAT)


def _beat(watch: Watch, over: threading.Event) -> None:
    # a store that is gone shows in the main thread, which reports it
    with suppress(Exception):
        if over.wait(BEAT):
            return
        store = _torch.default_store().clone()
        store.set(_wait_key(watch.own), watch.waits)
        next_time = SILENCE
        while True:
            store.add(beat_key(watch.own), 1)
            watch.look(store)
            if not watch.cause and store.check([KEY]):
                watch.cause = store.get(KEY).decode()
                note_heard(store, watch.own)
                doing = f"waits {watch.waits}" if watch.waits else "is in a step"
                _log.warning("rank %d %s: %s", watch.own, doing, watch.cause)
            waited = time.monotonic() - watch.begun
            if not watch.cause and waited >= next_time:
                next_time = 2 * waited
                _warn(watch, store, waited)
            if over.wait(BEAT):
                return


def _warn(watch: Watch, store: Any, waited: float) -> None:
    if missed := watch.missed(store):
        what = f"waited {waited:.0f} s {watch.waits}" if watch.waits else f"been in a step for {waited:.0f} s"
        _log.warning("rank %d has %s: %s", watch.own, what, "; ".join(missed))


def beat_key(rank: int) -> str:
    """Return the name in the store of the number of a rank's beats."""
    return f"splitkit: beats of rank {rank}"


def note_heard(store: Any, rank: int) -> None:
    """Note that a rank knows what failed."""
    store.set(heard_key(rank), "")


def heard_key(rank: int) -> str:
    """Return the name in the store of the note that a rank knows what failed."""
    return f"splitkit: rank {rank} knows what failed"


def _wait_key(rank: int) -> str:
    return f"splitkit: wait of rank {rank}"
