"""Reports a failure on every rank: which rank failed, in which stage and microbatch, and what the others waited for.

A rank that fails writes a line to the store of the process group. When its process ends, the connections of the other
ranks close; each of them reads the line and raises an error that quotes it and says what this rank was waiting for. For
a rank that cannot write a line, since it was killed or stopped, the others find out who it is (`first_cause`).
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from splitkit import _torch
from splitkit.errors import PipelineError, SplitError, message_line
from splitkit.pipeline.order import KINDS, Action
from splitkit.runtime.devices.accelerators import has_streams, stream_of
from splitkit.runtime.ranks.replicas import Replicas

KEY = "splitkit: a rank failed"
BEAT = 0.5
"""Seconds between two beats, and those after which a wait begins to beat; shorter ones never write to the store."""
SILENCE = 4.0
"""Seconds without a beat after which a rank is named, the first time; not tuned. Each next time takes twice as long."""

_log = logging.getLogger("splitkit.runtime")

GLOO = re.compile(r"\[[^\]]*gloo[^\]]*:\d+\]")
"""The place in gloo's source that each of its errors names. Words such as "connection" are in errors of users, too."""


@dataclass(kw_only=True)
class RankProgress(ABC):
    """What a rank is doing, in words.

    Attributes:
        rank: this rank.
        ranks: rank -> its rank in the default process group.
        device: the device of this rank.
        limit: the seconds after which the process group gives up a message.
        failed: whether this rank has failed. What it wrote to the store stays there, and says nothing of later steps.
        watch: ends the watch of the last step, which goes on until the device has done the step.
    """

    rank: int
    ranks: Sequence[int] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    limit: float = inf
    failed: bool = False
    watch: threading.Event = field(default_factory=threading.Event)

    @abstractmethod
    def begin(self) -> None:
        """Forget what was done before."""

    @abstractmethod
    def state(self) -> object:
        """Return something that changes while this rank goes on."""

    @abstractmethod
    def where(self) -> str:
        """Say what is being done, or began last."""

    @abstractmethod
    def waits(self) -> str:
        """Say what this rank waits for next, and from which rank."""

    @abstractmethod
    def waited_for(self) -> int | None:
        """Return the rank for which this one waits next, if it waits for one."""


@dataclass
class Progress(RankProgress):
    """What a rank is doing in a step.

    Attributes:
        row: the actions of this rank in a step.
        rank_of: stage -> its place in a pipeline.
        replicas: which ranks are at each place, and the place of this rank.
        names: border -> the names of the values that cross it.
        inside: the action that is computing; ``None`` between actions.
        last: the action that began last.
    """

    row: Sequence[Action]
    rank_of: Sequence[int]
    replicas: Replicas
    names: Sequence[Sequence[str]]
    inside: Action | None = None
    last: Action | None = None

    @contextmanager
    def computing(self, stage: int, kind: str, microbatch: int) -> Iterator[None]:
        """Wrap the computation of an action; ``inside`` keeps the action if it fails."""
        self.inside = self.last = Action(stage, kind, microbatch)
        yield
        self.inside = None

    def begin(self) -> None:
        """Forget what was done in the step before."""
        self.inside = self.last = None

    def state(self) -> object:
        """Return the action that is computing, and the one that began last."""
        return self.inside, self.last

    def where(self) -> str:
        """Say which action is computing, or began last."""
        at = self.inside or self.last
        return _text(at) if at is not None else "the step"

    def begun(self, stage: int, kind: str, microbatch: int) -> None:
        """Note that an action has received what it waited for."""
        self.last = Action(stage, kind, microbatch)

    def waits(self) -> str:
        """Say what this rank waits for next, and from which rank."""
        found = self._next()
        if found is None:
            return "waited for the others to end the step"
        source = self._from(found)
        if source is None:
            return f"was about to run {_text(found)}"
        border = min(source, found.stage)
        what = ", ".join(self.names[border][:4]) if border < len(self.names) else "the loss"
        of = "gradients of " if found.kind != "F" else ""
        return f"waited for {of}{what} from stage {source} (rank {self.waited_for()}), for {_text(found)}"

    def waited_for(self) -> int | None:
        """Return the rank for which this one waits next, if it waits for one."""
        found = self._next()
        source = None if found is None else self._from(found)
        if found is None or source is None:
            return None
        return self.replicas.rank_at(self.rank_of[source])

    def _next(self) -> Action | None:
        """Return the next action that waits for another rank, the first one of all, or ``None`` if there is no more."""
        row = self.row
        if self.last is None:
            return row[0]
        kinds = "BI" if self.last.kind == "B" else self.last.kind
        last = [Action(self.last.stage, kind, self.last.microbatch) for kind in kinds]
        at = next((i for i, action in enumerate(row) if action in last), len(row))
        return next((a for a in row[at + 1 :] if self._from(a) is not None), None)

    def _from(self, action: Action) -> int | None:
        """Return the stage of another rank whose result an action waits for, if there is one."""
        source = action.stage + (-1 if action.kind == "F" else 1)
        if action.kind == "W" or not 0 <= source < len(self.rank_of):
            return None
        return source if self.rank_of[source] != self.replicas.place else None


def _text(action: Action) -> str:
    return f"{KINDS[action.kind]} of microbatch {action.microbatch} in stage {action.stage}"


def time_limit(group: dist.ProcessGroup | None) -> float:
    """Return the seconds after which a process group gives up a message; infinite if it does not say."""
    found = _torch.timeout_of(group)
    return inf if found is None else float(found.total_seconds())


@contextmanager
def naming_failures(progress: RankProgress) -> Iterator[None]:
    """Wrap a step, so that a failure names rank, stage and microbatch here and on the other ranks.

    Raises:
        PipelineError: SK805; a refusal (SK80x) of this rank is raised unchanged.
    """
    progress.begin()
    with watched(progress) as watch:
        try:
            yield
        except Exception as error:
            progress.failed, cause = True, _root(error)
            # what follows may take longer than the watch waits
            progress.watch.set()
            of_user = isinstance(cause, SplitError) or not is_of_network(cause)
            failed = _own(progress, cause) if of_user else _others(progress, cause, watch.cause)
            leave(dist.get_rank(), progress.ranks)
            raise failed from error


@contextmanager
def naming_lost_ranks(progress: RankProgress, waits: str) -> Iterator[None]:
    """Wrap an exchange between all ranks, so that the loss of one names what this rank was doing.

    Args:
        progress: what this rank is doing.
        waits: what it waits for here, as in "for all ranks to begin the call".

    Raises:
        PipelineError: SK805; all errors but network errors are raised unchanged.
    """
    with beating(dist.get_rank(), progress.ranks, waits) as watch:
        try:
            yield
        except Exception as error:
            if isinstance(error, SplitError) or not is_of_network(error):
                raise
            failed = _others(progress, error, watch.cause or watch.elsewhere, f"waited {waits}")
            leave(dist.get_rank(), progress.ranks)
            raise failed from error


def _own(progress: RankProgress, cause: BaseException) -> SplitError:
    where, rank = progress.where(), progress.rank
    if isinstance(cause, SplitError):
        failed = cause
    else:
        failed = PipelineError(
            "SK805",
            f"rank {rank} failed in {where}: {type(cause).__name__}: {cause}",
            "Run the unsplit model on the same input.",
        )
    report_cause(failed.reason if failed.code == "SK805" else f"{failed.code} on rank {rank}: {failed.reason}")
    return failed


def _others(progress: RankProgress, cause: BaseException, known: str, waited: str = "") -> PipelineError:
    late = any(word in str(cause).lower() for word in ("timed out", "timeout"))
    own = progress.rank
    said = known or first_cause(progress.ranks, own, progress.waited_for(), not late)
    reason = said or ("another rank does not answer" if late else "another rank is gone")
    return PipelineError(
        "SK805",
        f"{reason}; rank {own} {waited or progress.waits()}",
        f"Look at the messages of that rank. Here: {message_line(cause)[:200]}",
    )


def is_of_network(cause: BaseException) -> bool:
    """Return whether an error says that another process does not answer: of gloo, NCCL or the store, but of no user."""
    return isinstance(cause, dist.DistError) or bool(GLOO.search(str(cause)))


def _root(error: BaseException) -> BaseException:
    """Return the error that torch's stages wrapped."""
    while error.__cause__ is not None and not isinstance(error, SplitError):
        error = error.__cause__
    return error


# Watches a step on an accelerator, where a rank that waits for a lost one gets no error.
#
# On a CPU, gloo raises an error when another rank is gone. On an accelerator the host queues a whole step and goes on;
# the device then waits, until the watchdog of NCCL ends the process after the time limit of the group, and names
# nobody. So a thread beats for the rank until its device has done the step, and looks for what a failed rank has
# written to the store::
#
#     host      step queued ── loss.item() ───────────────────────────▶ (waits for the device)
#     device    F0 F1 ... waits for rank 1
#     thread    beat  beat  rank 1 has written to the store: say so, and end the process
#
# Ending the process is what the watchdog would do later: what the device waits for never comes, and an aborted message
# would leave numbers in memory that nobody has sent.


@contextmanager
def watched(progress: RankProgress) -> Iterator[Watch]:
    """Let the others see in a step that this rank is alive; on an accelerator, until its device has done the step.

    There the watch also looks for failures of others. It ends when the step fails, and before the next step begins.
    """
    own, ranks = progress.ranks[progress.rank], progress.ranks
    if progress.device.type == "cpu" or progress.failed:
        with beating(own, ranks) as watch:
            yield watch
        return
    progress.watch.set()
    progress.watch = over = threading.Event()
    queued, watch = list[Callable[[], bool]](), Watch(own, [other for other in ranks if other != own], "")
    threading.Thread(target=_watch, args=(progress, watch, over, queued), name="watch", daemon=True).start()
    try:
        yield watch
        # a device without streams is not asked
        has_some = has_streams(progress.device)
        queued.append(stream_of(progress.device).record_event().query if has_some else lambda: True)
    except BaseException:
        over.set()
        raise


def _watch(progress: RankProgress, watch: Watch, over: threading.Event, queued: Sequence[Callable[[], bool]]) -> None:
    patience = max(progress.limit - 2 * PATIENCE - BEAT, 0.9 * progress.limit)
    seen, since = (progress.state(), False), time.monotonic()
    # a store that is gone shows in the main thread, which reports it
    with suppress(Exception):
        store: Any = None
        while not over.wait(BEAT) and not (queued and queued[0]()):
            store = _torch.default_store().clone() if store is None else store
            watch.beat(store)
            now = (progress.state(), bool(queued))
            seen, since = (seen, since) if now == seen else (now, time.monotonic())
            if not watch.cause and time.monotonic() - since < patience:
                continue
            # the main thread may get an error by itself, or need nothing more from the rank that failed
            if watch.cause and (over.wait(PATIENCE) or (queued and queued[0]())):
                return
            if found := watch.cause or first_cause(progress.ranks, progress.rank, progress.waited_for(), False):
                _end(f"SK805: {found}; rank {progress.rank} {progress.waits()}", watch.own, progress.ranks)
            since = time.monotonic()


def _end(message: str, rank: int, ranks: Sequence[int]) -> None:
    """Say what happened, let the others read it, and end the process."""
    sys.stdout.flush()
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    leave(rank, ranks)
    os._exit(1)


# Finds which rank failed first, where ranks wait for each other in a chain.
#
# ::
#
#     rank 0 ──waits──▶ rank 1 ──waits──▶ rank 2 (killed, or stopped)
#
# A rank that is killed or stopped says nothing, and rank 0 sees only that rank 1 has given up. So each rank that waits
# long writes a beat to the store of the process group now and then, and the first rank that misses another one
# looks whose beats have stopped. It writes what it found to the store, which all others then repeat.


PATIENCE = 3.0
"""Seconds that a rank waits for the line of a failed rank, and in which it listens for beats. Not tuned: writing the
line takes milliseconds."""

_T = TypeVar("_T")


def report_cause(line: str) -> str:
    """Write the cause of a failure to the store, unless another rank has; return the cause that it has then."""

    def write() -> str:
        return str(_torch.default_store().clone().compare_set(KEY, "", line).decode())

    return _within(PATIENCE, write) or line


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
        at_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's, not rank 0, has the store
        host = ranks.index(0) if 0 in ranks and not at_agent else own
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
        store.set(heard_key(own), "")
        awaited = [rank for rank in ranks if rank != own]
        before, since = [-1], time.monotonic()
        while awaited and time.monotonic() - since < 3 * BEAT:
            awaited = [rank for rank in awaited if not store.check([heard_key(rank)])]
            beats = [store.add(beat_key(rank), 0) for rank in awaited]
            if beats != before:
                before, since = beats, time.monotonic()
            time.sleep(BEAT / 5)

    _within(2 * PATIENCE, heard_by_all)


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


# Shows the other ranks that this one is alive and what it waits for, and says which ranks a long wait is for.
#
# A call of torch that waits for another rank cannot be interrupted, and gives up after the time limit of the process
# group only, half an hour by default. A rank that left its loop, or that is stopped, is therefore named long before, in
# a line of the log of every rank that waits.


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

    def beat(self, store: Any) -> bool:
        """Show that this rank is alive; return whether it hears now that a rank has failed, and of which cause."""
        store.add(beat_key(self.own), 1)
        if self.cause or not store.check([KEY]):
            return False
        self.cause = store.get(KEY).decode()
        store.set(heard_key(self.own), "")
        return True

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
            watch.look(store)
            if watch.beat(store):
                doing = f"waits {watch.waits}" if watch.waits else "is in a step"
                _log.warning("rank %d %s: %s", watch.own, doing, watch.cause)
            waited = time.monotonic() - watch.begun
            if not watch.cause and waited >= next_time:
                next_time = 2 * waited
                if missed := watch.missed(store):
                    what = (
                        f"waited {waited:.0f} s {watch.waits}" if watch.waits else f"been in a step for {waited:.0f} s"
                    )
                    _log.warning("rank %d has %s: %s", watch.own, what, "; ".join(missed))
            if over.wait(BEAT):
                return


def beat_key(rank: int) -> str:
    """Return the name in the store of the number of a rank's beats."""
    return f"splitkit: beats of rank {rank}"


def heard_key(rank: int) -> str:
    """Return the name in the store of the note that a rank knows what failed."""
    return f"splitkit: rank {rank} knows what failed"


def _wait_key(rank: int) -> str:
    return f"splitkit: wait of rank {rank}"
