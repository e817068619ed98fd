"""Defines the order of actions on each rank of a pipeline, and the dependences between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from splitkit.errors import ScheduleError
from splitkit.pipeline.action import KINDS, Action
from splitkit.short_repr import brief

Ints = npt.NDArray[np.int64]

LETTERS = "".join(KINDS)
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)

ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
"""An action that computes, as torch writes it."""

OTHER_CELL = re.compile(
    r"\d*(OVERLAP_F_B|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|(WAIT_)?SEND_[FB]|RECV_[FB])\d*", re.ASCII
)
"""A cell of torch's CSV that computes nothing itself: it communicates, shards, or overlaps two actions."""

_REMEDY = "Give every microbatch of every stage one F, and one B or one I and later one W, on one rank."
_NOTHING, _NOWHERE = -1, -2


class Columns(NamedTuple):
    """The actions of an order as arrays, ``[actions]`` each, rank after rank.

    Attributes:
        rank: the rank that runs the action.
        stage: the number of the stage of the model.
        kind: an index into `LETTERS`.
        microbatch: the number of the microbatch in the step.
    """

    rank: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints


class ActionGraph(NamedTuple):
    """The dependences between the actions of an order, by their numbers in `Columns`.

    Attributes:
        sequence: all actions in a topological order that keeps the order of each rank.
        data: action -> the action of the neighbouring stage whose result it reads, -1 for none.
    """

    sequence: tuple[int, ...]
    data: Ints


@dataclass(frozen=True, eq=False)
class PipelineOrder:
    """The actions of each rank in order: a schedule without times.

    Forward of a stage waits for forward of the previous stage. Backward (``B``, or its input part ``I``) waits for
    forward of its stage and for backward of the next stage. The weight part ``W`` waits for the input part of its
    stage.

    Attributes:
        name: the name of the schedule.
        ranks: the actions of each rank.

    Raises:
        ScheduleError: SK331 if an action is missing or occurs twice, or the ranks deadlock; says what each rank waits
            for.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    __repr__ = brief

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def parse(cls, ranks: Iterable[str], name: str = "custom") -> PipelineOrder:
        """Read a text for each rank: ``["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]``, or the lines of torch's ``_dump_csv``.

        In an overlapped pair ``(0F3;3B1)OVERLAP_F_B`` the first action runs first, as in torch. Sends and receives are
        left out.

        Raises:
            ScheduleError: SK331 if the texts are not an order; names what cannot be read.
        """
        return cls(name, tuple(tuple(_parsed(line)) for line in ranks))

    @cached_property
    def columns(self) -> Columns:
        """The actions as arrays."""
        flat = list(chain.from_iterable(self.ranks))
        rank = np.repeat(np.arange(len(self.ranks)), [len(actions) for actions in self.ranks])
        stage, microbatch = (np.array([a[i] for a in flat], np.int64) for i in (0, 2))
        codes = {letter: code for code, letter in enumerate(LETTERS)}
        return Columns(rank, stage, np.array([codes[a[1]] for a in flat], np.int64), microbatch)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """Stage -> its rank."""
        stages, first = np.unique(self.columns.stage, return_index=True)
        return tuple(self.columns.rank[first[np.argsort(stages)]].tolist())

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return int(self.columns.microbatch.max(initial=-1)) + 1

    @cached_property
    def links(self) -> ActionGraph:
        """The dependences between the actions."""
        return _linked(self)


def action_of(word: str) -> Action:
    """Return the action that a word denotes; `ACTION` must match the word."""
    found = ACTION.fullmatch(word)
    assert found is not None
    return Action(int(found[1]), found[2], int(found[3]))


def _parsed(line: str) -> Iterator[Action]:
    for word in filter(None, re.split(r"[\s,;()]+", line)):
        if ACTION.fullmatch(word):
            yield action_of(word)
        elif not OTHER_CELL.fullmatch(word):
            raise ScheduleError(
                "SK331", f"{word!r} is not an action", "Write stage, F, B, I or W, and microbatch: 3F0."
            )


def _check(order: PipelineOrder) -> None:
    """Refuse an order unless each action is there once, each stage is on one rank, and no ranks deadlock."""
    unknown = [a for actions in order.ranks for a in actions if a.kind not in KINDS or min(a.stage, a.microbatch) < 0]
    if unknown:
        raise ScheduleError("SK331", f"{unknown[0]!r} is not an action", "Give stage, F, B, I or W, and microbatch.")
    total = sum(map(len, order.ranks))
    far = [action for actions in order.ranks for action in actions if max(action.stage, action.microbatch) >= total]
    if far:  # checked before a table of stages x microbatches is allocated
        raise ScheduleError("SK331", f"{far[0]} is one of {total} actions", "Number stages and microbatches from 0.")
    rank, stage, kind, _ = order.columns
    stages = np.unique(stage)
    if stages.tolist() != list(range(max(1, len(stages)))):
        raise ScheduleError(
            "SK331", f"{order.name} has stages {stages.tolist()}", "Number them from 0, and give at least one."
        )
    if len(bad := np.flatnonzero(rank != np.take(order.rank_of, stage))):
        ranks = f"{order.rank_of[stage[bad[0]]]} and {rank[bad[0]]}"
        raise ScheduleError("SK331", f"stage {stage[bad[0]]} is on ranks {ranks}", _REMEDY)
    for number, actions in enumerate(order.ranks):
        if len(seen := set(actions)) < len(actions):
            twice = min(action for action in seen if actions.count(action) > 1)
            raise ScheduleError("SK331", f"rank {number} runs {twice} twice", _REMEDY)
    _ = order.links
    counts = np.bincount(kind, minlength=len(LETTERS))
    whole = len(stages) * order.microbatches
    if (
        counts[FORWARD] != whole
        or counts[BACKWARD] + counts[BACKWARD_INPUT] != whole
        or counts[BACKWARD_INPUT] != counts[BACKWARD_WEIGHT]
    ):
        found = ", ".join(f"{count} {letter}" for count, letter in zip(counts, LETTERS, strict=True))
        text = f"{order.name} has {found} for {len(stages)} stages and {order.microbatches} microbatches"
        raise ScheduleError("SK331", text, _REMEDY)


def _linked(order: PipelineOrder) -> ActionGraph:
    """Find the dependences and a topological order, in time linear in the number of actions.

    Each rank is run until it must wait for an action of another rank. It is then parked with that action, and resumed
    when the action is done. If ranks are left waiting at the end, they deadlock.
    """
    needs, owns = _needs(order)
    data, own = needs.tolist(), owns.tolist()
    ends = list(accumulate(len(actions) for actions in order.ranks))
    following = [0, *ends[:-1]]
    done = bytearray(len(data) + 2)
    done[_NOTHING] = True  # indices from the end: "nothing" is done from the start, "nowhere" never is
    waiting: dict[int, list[int]] = {}
    sequence: list[int] = []
    ready = list(range(len(order.ranks)))
    while ready:
        rank = ready.pop()
        i, end = following[rank], ends[rank]
        while i < end:
            need = own[i] if done[data[i]] else data[i]
            if not done[need]:
                waiting.setdefault(need, []).append(rank)
                break
            done[i] = True
            sequence.append(i)
            ready.extend(waiting.pop(i, ()))
            i += 1
        following[rank] = i
    if len(sequence) < len(data):
        raise _deadlock(order, following, done)
    return ActionGraph(tuple(sequence), needs)


def _needs(order: PipelineOrder) -> tuple[Ints, Ints]:
    """Return the actions on which each action depends: in the neighbouring stage, and in its own stage."""
    _, stage, kind, microbatch = order.columns
    stages = len(order.rank_of)
    at = np.full((len(LETTERS), stages + 1, order.microbatches), _NOWHERE)
    at[kind, stage, microbatch] = np.arange(len(stage))
    at[BACKWARD] = np.where(
        at[BACKWARD] == _NOWHERE, at[BACKWARD_INPUT], at[BACKWARD]
    )  # the previous stage waits for B or I
    at[FORWARD, -1] = at[BACKWARD, -1] = _NOTHING  # index -1 is the row before the first stage and after the last one
    data = np.where(kind == FORWARD, at[FORWARD, stage - 1, microbatch], at[BACKWARD, stage + 1, microbatch])
    own = np.where(kind == BACKWARD_WEIGHT, at[BACKWARD_INPUT, stage, microbatch], at[FORWARD, stage, microbatch])
    return np.where(kind == BACKWARD_WEIGHT, _NOTHING, data), np.where(kind == FORWARD, _NOTHING, own)


def _deadlock(order: PipelineOrder, following: Sequence[int], done: bytearray) -> ScheduleError:
    """Return an error that says which ranks wait, at which action, and for what."""
    flat, there = [a for actions in order.ranks for a in actions], set(chain.from_iterable(order.ranks))
    lines = []
    for rank, (number, (data, own)) in enumerate(zip(following, _at(order, following), strict=True)):
        if number < len(flat) and order.columns.rank[number] == rank:
            need = own if done[data] else data
            name = flat[need] if need >= 0 else _missing(flat[number], need == data)
            where = f"of rank {order.rank_of[name.stage]}" if name in there else "that no rank runs"
            lines.append(f"rank {rank} waits at {flat[number]} for {name} {where}")
    text = f"{order.name} never ends: " + "; ".join(lines)
    return ScheduleError("SK331", text, "Change the order so that the action that is waited for comes first.")


def _at(order: PipelineOrder, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the dependences of these actions; none for numbers past the last."""
    data, own = _needs(order)
    return [(int(data[n]), int(own[n])) if n < len(data) else (_NOTHING, _NOTHING) for n in numbers]


def _missing(action: Action, data: bool) -> Action:
    """Return the action that an action depends on, though no rank runs it."""
    stage, kind, microbatch = action
    if not data:
        return Action(stage, "I" if kind == "W" else "F", microbatch)
    return Action(stage - 1, "F", microbatch) if kind == "F" else Action(stage + 1, "B", microbatch)
