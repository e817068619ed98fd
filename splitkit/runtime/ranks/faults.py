"""Reports a failure on every rank: which rank failed, in which stage and microbatch, and what the others waited for.

A rank that fails writes a line to the store of the process group. When its process ends, the connections of the other
ranks close; each of them reads the line and raises an error that quotes it and says what this rank was waiting for. For
a rank that cannot write a line, since it was killed or stopped, the others find out who it is (`first_cause`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import torch
import torch.distributed as dist

from splitkit import _torch
from splitkit.errors import PipelineError, SplitError, message_line
from splitkit.pipeline.action import KINDS, Action
from splitkit.runtime.ranks.first_cause import first_cause, leave, report_cause
from splitkit.runtime.ranks.replicas import Replicas
from splitkit.runtime.ranks.signs_of_life import Watch, beating
from splitkit.runtime.ranks.step_watch import watched

GLOO = re.compile(r"\[[^\]]*gloo[^\]]*:\d+\]")
"""The place in gloo's source that each of its errors names. Words such as "connection" are in errors of users, too."""


class RankProgress(Protocol):
    """What a rank is doing, in words.

    Attributes:
        device: the device of this rank.
        limit: the seconds after which the process group gives up a message.
        failed: whether this rank has failed. What it wrote to the store stays there, and says nothing of later steps.
        watch: ends the watch of the last step, which goes on until the device has done the step.
    """

    device: torch.device
    limit: float
    failed: bool
    watch: threading.Event

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def ranks(self) -> Sequence[int]:
        """Rank -> its rank in the default process group."""

    def begin(self) -> None:
        """Forget what was done before."""

    def state(self) -> object:
        """Return something that changes while this rank goes on."""

    def where(self) -> str:
        """Say what is being done, or began last."""

    def waits(self) -> str:
        """Say what this rank waits for next, and from which rank."""

    def waited_for(self) -> int | None:
        """Return the rank for which this one waits next, if it waits for one."""


@dataclass
class Progress:
    """What a rank is doing.

    Attributes:
        row: the actions of this rank in a step.
        rank_of: stage -> its place in a pipeline.
        replicas: which ranks are at each place, and the place of this rank.
        names: border -> the names of the values that cross it.
        ranks: rank -> its rank in the default process group.
        device: the device of this rank.
        limit: the seconds after which the process group gives up a message.
        inside: the action that is computing; ``None`` between actions.
        last: the action that began last.
        failed: whether a step has failed here. What it wrote to the store stays there, and says nothing of later ones.
        watch: ends the watch of the last step, which goes on until the device has done the step.
    """

    row: Sequence[Action]
    rank_of: Sequence[int]
    replicas: Replicas
    names: Sequence[Sequence[str]]
    ranks: Sequence[int] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    limit: float = inf
    inside: Action | None = None
    last: Action | None = None
    failed: bool = False
    watch: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def computing(self, stage: int, kind: str, microbatch: int) -> Iterator[None]:
        """Wrap the computation of an action; ``inside`` keeps the action if it fails."""
        self.inside = self.last = Action(stage, kind, microbatch)
        yield
        self.inside = None

    @property
    def rank(self) -> int:
        """This rank."""
        return self.replicas.rank

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
        at = next((i for i, a in enumerate(row) if _is(a, self.last, kinds)), len(row))
        return next((a for a in row[at + 1 :] if self._from(a) is not None), None)

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


def global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return rank in a group -> rank in the default process group."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


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
    with _watched(progress) as watch:
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


def _watched(progress: RankProgress) -> AbstractContextManager[Watch]:
    """Let the others see in a step that this rank is alive; on an accelerator, look for failures of others too."""
    rank, ranks = dist.get_rank(), progress.ranks
    if progress.device.type == "cpu" or progress.failed:
        return beating(rank, ranks)

    def say(line: str) -> str:
        found = line or first_cause(ranks, progress.rank, progress.waited_for(), False)
        return f"SK805: {found}; rank {progress.rank} {progress.waits()}" if found else ""

    progress.watch.set()
    progress.watch = threading.Event()
    where = rank, ranks, progress.device, progress.limit, progress.watch
    return watched(*where, progress.state, say)


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
