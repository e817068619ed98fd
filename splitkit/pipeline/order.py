"""Defines the order of actions on each rank of a pipeline, and the dependences between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

from splitkit.errors import ScheduleError
from splitkit.short_repr import brief
from splitkit.solvers.topological import in_turn

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from splitkit.costs.links import HostLink

    Ints = npt.NDArray[np.int64]

# numpy is imported where it is used: the command line lists schedules without it.

# Defines an action of a pipeline schedule: one microbatch in one stage. Imports no numpy: for the command line.


KINDS = {"F": "forward", "B": "backward", "I": "backward, input part", "W": "backward, weight part"}
"""Torch's letter -> the computation of an action."""


class Action(NamedTuple):
    """The computation of one microbatch in one stage. ``str`` writes it as torch does: ``3F0``."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


# Makes V-Min and V-Half (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024), which hold less.
#
# Rank r of p has the stages r and 2 p - 1 - r, so that a microbatch goes from the first rank to the last and back. The
# actions of one microbatch, each one time slot long, form a building block that repeats every six slots, once for each
# microbatch. The memory of a rank is proportional to the duration of a block on it. The weight parts fill the gaps::
#
#     V-Min, 2 ranks    rank 0    F0 . . F3 I3 W3 ..  I0 W0      stage 3 is on the way back
#                       rank 1    .  F1 F2 . .  I2 I1 W2 W1
#
# With equal times of F, I and W a rank holds at its peak about a third of what it holds under 1F1B (V-Min), or half of
# it (V-Half).


_INTERVAL = 6
"""Time slots from one microbatch to the next: F, I and W of the two stages of a rank."""


def v_min(stages: int, microbatches: int, ranks: int) -> list[list[Action]]:
    """Return V-Min: each action of the block directly follows the previous one."""
    # Without the delay, F of a rank's first stage and I of its second one would fall into the same slot (mod 6).
    late = 2 if ranks % 3 == 0 else 0
    times = ((r, 2 * ranks - 1 - r, 2 * ranks + late + r, 4 * ranks + late - 1 - r) for r in range(ranks))
    return [_row(at, rank, stages - 1 - rank, microbatches) for rank, at in enumerate(times)]


def v_half(stages: int, microbatches: int, ranks: int) -> list[list[Action]]:
    """Return V-Half: forward on the way to the last rank, and the input part there, wait one slot per rank."""
    late = 3 if ranks % 2 == 0 else 0
    times = ((2 * r, 3 * ranks - 2 - r, 3 * ranks - 1 + late + 2 * r, 6 * ranks - 2 + late - r) for r in range(ranks))
    return [_row(at, rank, stages - 1 - rank, microbatches) for rank, at in enumerate(times)]


def _row(times: Sequence[int], first: int, second: int, microbatches: int) -> list[Action]:
    """Merge the blocks of all microbatches by time, with a weight part in each slot in which nothing else runs.

    Args:
        times: the time slots of a block: forward of the first and of the second stage, their input parts back again.
        first: the first stage of the rank.
        second: the second stage of the rank.
        microbatches: of a step.
    """
    block = list(zip(times, "FFII", (first, second, second, first), strict=True))
    at = {t + _INTERVAL * m: Action(stage, kind, m) for m in range(microbatches) for t, kind, stage in block}
    assert len(at) == len(block) * microbatches, "two actions of a rank at one time"
    return list(_with_weight_parts(at))


def _with_weight_parts(at: dict[int, Action]) -> Iterator[Action]:
    waiting: list[Action] = []
    for time in range(max(at) + 1):
        if time in at:
            yield at[time]
            waiting += [at[time]._replace(kind="W")] * (at[time].kind == "I")
        elif waiting:
            yield waiting.pop(0)
    yield from waiting


LETTERS = "".join(KINDS)
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)

ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
"""An action that computes, as torch writes it."""

OTHER_CELL = re.compile(
    r"\d*(OVERLAP_F_B|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|(WAIT_)?SEND_[FB]|RECV_[FB])\d*", re.ASCII
)
"""A cell of torch's CSV that computes nothing itself: it communicates, shards, or overlaps two actions."""

_REMEDY = "Give every microbatch of every stage one F, and one B or one I and later one W, on one rank."
_NOTHING, _NOWHERE = -1, -2  # in place of an action: none is waited for; the awaited one is not there


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

    @cached_property
    def columns(self) -> Columns:
        """The actions as arrays."""
        import numpy as np

        flat = list(chain.from_iterable(self.ranks))
        rank = np.repeat(np.arange(len(self.ranks)), [len(actions) for actions in self.ranks])
        stage, microbatch = (np.array([a[i] for a in flat], np.int64) for i in (0, 2))
        codes = {letter: code for code, letter in enumerate(LETTERS)}
        return Columns(rank, stage, np.array([codes[a[1]] for a in flat], np.int64), microbatch)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """Stage -> its rank."""
        import numpy as np

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


def _check(order: PipelineOrder) -> None:
    """Refuse an order unless each action is there once, each stage is on one rank, and no ranks deadlock."""
    import numpy as np

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
    """Find the dependences and a topological order."""
    needs, owns = _needs(order)
    rank, before = order.columns.rank.tolist(), list[list[int]]()
    for i, (data, own) in enumerate(zip(needs.tolist(), owns.tolist(), strict=True)):
        previous = i - 1 if i and rank[i - 1] == rank[i] else _NOTHING
        waits = [need for need in (previous, data, own) if need != _NOTHING]
        before.append([i] if _NOWHERE in waits else waits)  # what waits for itself never runs
    sequence = tuple(in_turn(before, lambda _, taken: taken))
    if len(sequence) < len(before):
        raise _deadlock(order, set(sequence))
    return ActionGraph(sequence, needs)


def _needs(order: PipelineOrder) -> tuple[Ints, Ints]:
    """Return the actions on which each action depends: in the neighbouring stage, and in its own stage."""
    import numpy as np

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


def _deadlock(order: PipelineOrder, done: set[int]) -> ScheduleError:
    """Return an error that says which ranks wait, at which action, and for what."""
    flat, there = [a for actions in order.ranks for a in actions], set(chain.from_iterable(order.ranks))
    needs, owns = _needs(order)
    first = {rank: i for i, rank in reversed([*enumerate(order.columns.rank.tolist())]) if i not in done}
    lines = []
    for rank, number in sorted(first.items()):
        data, own = int(needs[number]), int(owns[number])
        need = own if data == _NOTHING or data in done else data
        name = flat[need] if need >= 0 else _missing(flat[number], need == data)
        where = f"of rank {order.rank_of[name.stage]}" if name in there else "that no rank runs"
        lines.append(f"rank {rank} waits at {flat[number]} for {name} {where}")
    text = f"{order.name} never ends: " + "; ".join(lines)
    return ScheduleError("SK331", text, "Change the order so that the action that is waited for comes first.")


def _missing(action: Action, data: bool) -> Action:
    """Return the action that an action depends on, though no rank runs it."""
    stage, kind, microbatch = action
    if not data:
        return Action(stage, "I" if kind == "W" else "F", microbatch)
    return Action(stage - 1, "F", microbatch) if kind == "F" else Action(stage + 1, "B", microbatch)


# Holds what a stage copies to the host and back for one microbatch, and times the actions of ranks that copy.
#
# Each rank has one link in each direction, for all microbatches of all its stages. A direction copies one microbatch
# after the other, each beside the computation (`host_windows` says within which actions).


@dataclass(frozen=True)
class StageCopies:
    """What one microbatch of a stage moves.

    Attributes:
        nbytes: the bytes that are moved.
        out: seconds of all copies to the host.
        out_end: seconds from the start of forward to the end of the last copy, if the link is free: values leave in the
            order in which they are made.
        back: seconds of all copies back.
        back_tail: seconds from the start of the first copy back to the end of backward, if backward waits for nothing
            else: values come in the order in which they are read.
    """

    nbytes: int
    out: float
    out_end: float
    back: float
    back_tail: float

    @classmethod
    def of(
        cls,
        link: HostLink,
        leaving: Iterable[tuple[float, int]],
        coming: Iterable[tuple[float, int]],
        forward: float,
        backward: float,
    ) -> StageCopies:
        """Return the copies of values.

        Args:
            link: the link to the host.
            leaving: for each value the seconds from the start of forward until it is made, and its bytes.
            coming: for each value the seconds from its first reader to the end of backward, and its bytes.
            forward: seconds of forward.
            backward: seconds of backward, or of its input part.
        """
        leaving = sorted(leaving)
        out = [link.out.seconds(nbytes) for _, nbytes in leaving]
        last = max(made + rest for (made, _), rest in zip(leaving, suffix_sums(out), strict=True))
        coming = sorted((-left, nbytes) for left, nbytes in coming)
        back = [link.back.seconds(nbytes) for _, nbytes in coming]
        tails = (done + min(backward, -left) for (left, _), done in zip(coming, accumulate(back), strict=True))
        total = sum(nbytes for _, nbytes in leaving)
        return cls(total, sum(out), min(last, forward + sum(out)), sum(back), max(tails))


def suffix_sums(seconds: Sequence[float]) -> list[float]:
    """Return for each entry its sum with all later entries."""
    return list(accumulate(reversed(seconds)))[::-1]


Times = tuple[list[float], list[float], list[float], list[float], list[float]]
"""For each action its start and end, when its message leaves and arrives, and when its rank goes on."""


def times_with_copies(
    order: PipelineOrder,
    durations: Sequence[float],
    channels: Sequence[int],
    travel: Sequence[float],
    copies: Sequence[StageCopies | None],
) -> Times:
    """Return the times of all actions, where ranks also wait for copies.

    Backward waits for what comes back when it reads it. Before an action begins, the copies to the host that the last
    one should have ended with are awaited, so that their memory is free.

    Args:
        order: the actions.
        durations: seconds of each action without waiting.
        channels: a number for the ranks between which the message of each action travels, -1 if there is none.
        travel: seconds of the message of each action.
        copies: what each stage copies.
    """
    rank, data = order.columns.rank.tolist(), order.links.data.tolist()
    stage, microbatch = order.columns.stage.tolist(), order.columns.microbatch.tolist()
    released, asked, windows = _by_action(order, copies)
    comes = [0.0 if moved is None else moved.back for moved in copies]
    free, idle = [0.0] * len(order.ranks), [0.0] * len(order.ranks) ** 2
    out, back = [0.0] * len(order.ranks), [0.0] * len(order.ranks)
    left: dict[tuple[int, int], float] = {}
    begun: dict[tuple[int, int], float] = {}
    starts, ends, departures, arrivals, goes_on = ([0.0] * len(rank) for _ in range(5))
    for i in order.links.sequence:
        own, key = rank[i], (stage[i], microbatch[i])
        start, moved, window = free[own], copies[stage[i]], windows.get((stage[i], microbatch[i]))
        if (need := data[i]) >= 0:
            start = max(start, arrivals[need])
        for other in asked.get(i, ()):
            begun[other] = max(back[own], start)
            back[own] = begun[other] + comes[other[0]]
        end = start + durations[i]
        if moved is not None and window is not None and window.made == i:
            left[key] = out[own] = max(out[own] + moved.out, start + moved.out_end)
        elif moved is not None and window is not None and window.read == i:
            end = max(end, begun[key] + moved.back_tail)
        departure = arrival = end
        if (channel := channels[i]) >= 0:
            departure = max(end, idle[channel])
            idle[channel] = arrival = departure + travel[i]
        free[own] = max([end, *(left[other] for other in released.get(i, ()))])
        starts[i], ends[i], departures[i], arrivals[i], goes_on[i] = start, end, departure, arrival, free[own]
    return starts, ends, departures, arrivals, goes_on


_Keys = dict[int, list[tuple[int, int]]]


def _by_action(
    order: PipelineOrder, copies: Sequence[StageCopies | None]
) -> tuple[_Keys, _Keys, dict[tuple[int, int], HostWindow]]:
    """Return action -> what it releases and what it asks for, and the windows, all by numbers in ``order.columns``."""
    released: _Keys = {}
    asked: _Keys = {}
    windows = windows_of(order)
    for key, window in windows.items():
        if copies[key[0]] is not None:
            released.setdefault(window.released, []).append(key)
            asked.setdefault(window.asked, []).append(key)
    for keys in asked.values():  # what is read first comes first
        keys.sort(key=lambda key: windows[key].read)
    return released, asked, windows


def windows_of(order: PipelineOrder) -> dict[tuple[int, int], HostWindow]:
    """Return (stage, microbatch) -> its window, by numbers of actions in ``order.columns``."""
    found: dict[tuple[int, int], HostWindow] = {}
    first = 0
    for row in order.ranks:
        for key, w in host_windows(row).items():
            found[key] = HostWindow(w.made + first, w.released + first, w.asked + first, w.read + first)
        first += len(row)
    return found


# Says between which actions of a rank the offloaded values of a microbatch leave the device, are away, and come back.
#
# Values leave during forward and the next action of the rank, and come back during the last action before backward and
# backward itself, so that copies run beside the work of other microbatches::
#
#     1F1B, rank 0 of 4     F0    F1     F2      F3    B0    F4     B1
#     microbatch 1                made   leaves  away  away  comes  read
#
# Where too few actions lie between, forward waits for the copy at its own end, or backward for its own start.


@dataclass(frozen=True)
class HostWindow:
    """The actions of a rank, by number, that the values of one microbatch of one stage pass.

    Attributes:
        made: forward.
        released: the action at whose end the rank waits for the copies to the host, and frees the memory.
        asked: the action at whose start the memory is taken again, and the copies back are asked for.
        read: backward, or its input part.
    """

    made: int
    released: int
    asked: int
    read: int


def host_windows(row: Sequence[Action]) -> dict[tuple[int, int], HostWindow]:
    """Return (stage, microbatch) -> its window, for the actions of one rank."""
    made: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, int], HostWindow] = {}
    for number, (stage, kind, microbatch) in enumerate(row):
        key = (stage, microbatch)
        if kind == "F":
            made[key] = number
        elif kind in ("B", "I"):
            start = made[key]
            released = start + 1 if start + 1 < number else start
            asked = number - 1 if number - 1 > released else number
            found[key] = HostWindow(start, released, asked, number)
    return found


def most_on_host(row: Sequence[Action], nbytes: Mapping[int, int]) -> int:
    """Return the most bytes that one rank has on the host at once.

    Args:
        row: the actions of the rank.
        nbytes: stage -> bytes that a microbatch moves there: from the start of its forward to the end of its backward.
    """
    now = most = 0
    for stage, kind, _ in row:
        now += nbytes.get(stage, 0) * (kind == "F")
        most = max(most, now)
        now -= nbytes.get(stage, 0) * (kind in ("B", "I"))
    return most
