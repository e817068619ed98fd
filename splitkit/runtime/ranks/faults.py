"""Reports a failure on every rank: which rank failed, in which stage and microbatch, and what the others waited for.

A rank that fails writes a line to the store of the process group. When its process ends, the connections of the other
ranks close; each of them reads the line and raises an error that quotes it and says what this rank was waiting for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from splitkit import _torch
from splitkit.errors import PipelineError, SplitError
from splitkit.pipeline.action import KINDS, Action
from splitkit.runtime.ranks.replicas import Replicas

KEY = "splitkit: a rank failed"
PATIENCE = 3.0
"""Seconds that a rank waits for the line of a failed rank. Not tuned: writing the line takes milliseconds."""


@dataclass
class Progress:
    """What a rank is doing.

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

    def begun(self, stage: int, kind: str, microbatch: int) -> None:
        """Note that an action has received what it waited for."""
        self.last = Action(stage, kind, microbatch)

    def waits(self) -> str:
        """Say what this rank waits for next, and from which rank."""
        row = self.row
        if self.last is None:
            found = row[0]
        else:
            kinds = "BI" if self.last.kind == "B" else self.last.kind
            at = next((i for i, a in enumerate(row) if _is(a, self.last, kinds)), len(row))
            later = [a for a in row[at + 1 :] if self._from(a) is not None]
            if not later:
                return "waited for the others to end the step"
            found = later[0]
        source = self._from(found)
        if source is None:
            return f"was about to run {_text(found)}"
        border = min(source, found.stage)
        what = ", ".join(self.names[border][:4]) if border < len(self.names) else "the loss"
        of = "gradients of " if found.kind != "F" else ""
        rank = self.replicas.rank_of(self.rank_of[source], found.microbatch)
        return f"waited for {of}{what} from stage {source} (rank {rank}), for {_text(found)}"

    def _from(self, action: Action) -> int | None:
        """Return the stage of another rank whose result an action waits for, if there is one."""
        source = action.stage + (-1 if action.kind == "F" else 1)
        if action.kind == "W" or not 0 <= source < len(self.rank_of):
            return None
        return source if self.rank_of[source] != self.replicas.place else None


def _is(action: Action, other: Action, kinds: str) -> bool:
    return (action.stage, action.microbatch) == (other.stage, other.microbatch) and action.kind in kinds


def _text(action: Action) -> str:
    return f"{KINDS[action.kind]} of microbatch {action.microbatch} in stage {action.stage}"


@contextmanager
def naming_failures(progress: Progress) -> Iterator[None]:
    """Wrap a step, so that a failure names rank, stage and microbatch here and on the other ranks.

    Raises:
        PipelineError: SK805; a refusal (SK80x) of this rank is raised unchanged.
    """
    progress.inside = progress.last = None
    try:
        yield
    except Exception as error:
        cause = _root(error)
        if isinstance(cause, SplitError) or progress.inside is not None or not _of_network(cause):
            raise _own(progress, cause) from error
        raise _others(progress, cause) from error


@contextmanager
def naming_lost_ranks(progress: Progress, waited: str) -> Iterator[None]:
    """Wrap an exchange between all ranks, so that the loss of one names what this rank was doing.

    Args:
        progress: what this rank is doing.
        waited: what it does here, in words.

    Raises:
        PipelineError: SK805; other errors than those of the network are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SplitError) or not _of_network(error):
            raise
        raise _others(progress, error, waited) from error


def _own(progress: Progress, cause: BaseException) -> SplitError:
    at = progress.inside or progress.last
    where, rank = _text(at) if at is not None else "the step", progress.replicas.rank
    if isinstance(cause, SplitError):
        failed = cause
    else:
        failed = PipelineError(
            "SK805",
            f"rank {rank} failed in {where}: {type(cause).__name__}: {cause}",
            "Run the unsplit model on that microbatch: splitkit run PLAN --check.",
        )
    with suppress(Exception):
        line = failed.reason if failed.code == "SK805" else f"{failed.code} on rank {rank}: {failed.reason}"
        _torch.default_store().set(KEY, line)
    return failed


def _others(progress: Progress, cause: BaseException, waited: str = "") -> PipelineError:
    said = _said()
    late = any(word in str(cause).lower() for word in ("timed out", "timeout"))
    reason = said or ("another rank does not answer" if late else "another rank is gone")
    first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    return PipelineError(
        "SK805",
        f"{reason}; rank {progress.replicas.rank} {waited or progress.waits()}",
        f"Look at the messages of that rank. Here: {first[:200]}",
    )


def _of_network(cause: BaseException) -> bool:
    """Whether an error says that another process does not answer."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "peer")
    return isinstance(cause, dist.DistError) or any(word in str(cause).lower() for word in words)


def _said() -> str:
    """Return the line that a failed rank wrote to the store; empty if there is none within `PATIENCE`."""
    end = time.monotonic() + PATIENCE
    while True:
        with suppress(Exception):
            store = _torch.default_store()
            if store.check([KEY]):
                return str(store.get(KEY).decode())
        if time.monotonic() > end:
            return ""
        time.sleep(0.1)


def _root(error: BaseException) -> BaseException:
    """Return the error that torch's stages wrapped."""
    while error.__cause__ is not None and not isinstance(error, SplitError):
        error = error.__cause__
    return error
