"""Reports a failure on every rank: which rank failed, in which stage and microbatch, and what the others waited for.

A rank that fails writes a line to the store of the process group. When its process ends, the connections of the other
ranks close; each of them reads the line and raises an error that quotes it and says what this rank was waiting for. For
a rank that cannot write a line, since it was killed or stopped, the others find out who it is (`first_cause`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from splitkit.errors import PipelineError, SplitError
from splitkit.pipeline.action import KINDS, Action
from splitkit.runtime.ranks.first_cause import beating, first_cause, leave, report_cause
from splitkit.runtime.ranks.replicas import Replicas

GLOO = re.compile(r"\[[^\]]*gloo[^\]]*:\d+\]")
"""The place in gloo's source that each of its errors names. Words such as "connection" are in errors of users, too."""


class RankProgress(Protocol):
    """What a rank is doing, in words."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def ranks(self) -> Sequence[int]:
        """Rank -> its rank in the default process group."""

    def begin(self) -> None:
        """Forget what was done before."""

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
        inside: the action that is computing; ``None`` between actions.
        last: the action that began last.
    """

    row: Sequence[Action]
    rank_of: Sequence[int]
    replicas: Replicas
    names: Sequence[Sequence[str]]
    ranks: Sequence[int] = ()
    inside: Action | None = None
    last: Action | None = None

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
        return self.replicas.rank_of(self.rank_of[source], found.microbatch)

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


@contextmanager
def naming_failures(progress: RankProgress) -> Iterator[None]:
    """Wrap a step, so that a failure names rank, stage and microbatch here and on the other ranks.

    Raises:
        PipelineError: SK805; a refusal (SK80x) of this rank is raised unchanged.
    """
    progress.begin()
    with beating(dist.get_rank()):
        try:
            yield
        except Exception as error:
            cause = _root(error)
            of_user = isinstance(cause, SplitError) or not is_of_network(cause)
            failed = _own(progress, cause) if of_user else _others(progress, cause)
            leave(dist.get_rank(), len(progress.ranks))
            raise failed from error


@contextmanager
def naming_lost_ranks(progress: RankProgress, waited: str) -> Iterator[None]:
    """Wrap an exchange between all ranks, so that the loss of one names what this rank was doing.

    Args:
        progress: what this rank is doing.
        waited: what it does here, in words.

    Raises:
        PipelineError: SK805; all errors but network errors are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SplitError) or not is_of_network(error):
            raise
        raise _others(progress, error, waited) from error


def _own(progress: RankProgress, cause: BaseException) -> SplitError:
    where, rank = progress.where(), progress.rank
    if isinstance(cause, SplitError):
        failed = cause
    else:
        failed = PipelineError(
            "SK805",
            f"rank {rank} failed in {where}: {type(cause).__name__}: {cause}",
            "Run the unsplit model on that microbatch: splitkit run PLAN --check.",
        )
    report_cause(failed.reason if failed.code == "SK805" else f"{failed.code} on rank {rank}: {failed.reason}")
    return failed


def _others(progress: RankProgress, cause: BaseException, waited: str = "") -> PipelineError:
    late = any(word in str(cause).lower() for word in ("timed out", "timeout"))
    own = progress.rank
    said = first_cause(progress.ranks, own, progress.waited_for(), not late)
    reason = said or ("another rank does not answer" if late else "another rank is gone")
    first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    return PipelineError(
        "SK805",
        f"{reason}; rank {own} {waited or progress.waits()}",
        f"Look at the messages of that rank. Here: {first[:200]}",
    )


def is_of_network(cause: BaseException) -> bool:
    """Return whether an error says that another process does not answer: of gloo, NCCL or the store, but of no user."""
    return isinstance(cause, dist.DistError) or bool(GLOO.search(str(cause)))


def _root(error: BaseException) -> BaseException:
    """Return the error that torch's stages wrapped."""
    while error.__cause__ is not None and not isinstance(error, SplitError):
        error = error.__cause__
    return error
