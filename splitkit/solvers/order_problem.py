"""Defines the problem of ordering the actions of a pipeline step, and times a given order.

All stages take the microbatches in turn. For one stage per rank this loses nothing: in any order, let the k-th forward
of a stage take microbatch k, and likewise the k-th input and weight part. Whatever the k-th action waited for, k such
things had been made by its start, so that every start stays possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

F, I, W = range(3)  # noqa: E741  # the field's letters
"""The kinds of actions: forward, input part and weight part of backward."""

Row = list[tuple[int, int]]
"""The actions of a rank in order: (stage, kind). The k-th of a stage and kind is that of microbatch k."""
Rows = list[Row]


@dataclass(frozen=True)
class ActionBytes:
    """The bytes that an action takes of its rank.

    Attributes:
        start: allocated at its start, and held on.
        during: held while it runs, besides.
        end: the change at its end, as a rule negative.
    """

    start: int = 0
    during: int = 0
    end: int = 0

    @property
    def peak(self) -> int:
        """The most bytes, during it and after it, above those held before it."""
        return max(self.start + self.during, self.start + self.end)

    @property
    def change(self) -> int:
        """The bytes held after it above those held before it."""
        return self.start + self.end


@dataclass(frozen=True)
class OrderProblem:
    """Stages on ranks, with the times and bytes of their actions.

    Attributes:
        microbatches: of a step.
        rank_of: stage -> its rank.
        seconds: stage -> seconds of forward, input part and weight part.
        travel: stage -> seconds of the message of its forward and of its input part; 0 where nothing travels.
        uses: stage -> the bytes of forward, input part and weight part.
        room: rank -> the bytes that its actions may hold.
        late: rank -> seconds added to the end of its last action before the largest is taken.
    """

    microbatches: int
    rank_of: tuple[int, ...]
    seconds: tuple[tuple[float, float, float], ...]
    travel: tuple[tuple[float, float], ...]
    uses: tuple[tuple[ActionBytes, ActionBytes, ActionBytes], ...]
    room: tuple[float, ...]
    late: tuple[float, ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.room)

    @cached_property
    def of_rank(self) -> tuple[tuple[int, ...], ...]:
        """Rank -> its stages."""
        return tuple(tuple(s for s, r in enumerate(self.rank_of) if r == rank) for rank in range(self.ranks))

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Rank -> the seconds of all its actions."""
        each = [sum(sum(self.seconds[s]) for s in stages) for stages in self.of_rank]
        return tuple(self.microbatches * seconds for seconds in each)

    @cached_property
    def first(self) -> tuple[float, ...]:
        """Rank -> the start of its first action, which is forward of its first stage in every order without delays."""
        arrivals = [0.0]
        for (forward, *_), (on, _) in zip(self.seconds, self.travel, strict=True):
            arrivals.append(arrivals[-1] + forward + on)
        return tuple(arrivals[min(stages)] if stages else 0.0 for stages in self.of_rank)

    @cached_property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """Stage -> the channels of its forward and input messages, by source and target rank; -1 for none."""
        found = []
        for stage, rank in enumerate(self.rank_of):
            ends = [self.rank_of[s] if 0 <= s < self.stages else rank for s in (stage + 1, stage - 1)]
            found.append(tuple(rank * self.ranks + end if end != rank else -1 for end in ends))
        return tuple((on, back) for on, back in found)


@dataclass(frozen=True)
class TimedRows:
    """An order with its times.

    Attributes:
        rows: the actions of each rank.
        starts: the start of each of them.
        value: the largest end of a rank, `OrderProblem.late` included.
        ends: rank -> the end of its last action.
    """

    rows: Rows
    starts: list[list[float]]
    value: float
    ends: tuple[float, ...]


class StepState:
    """A step under way: every action starts as soon as its rank is free and its message has arrived.

    Attributes:
        counts: stage -> how many of its forwards, input parts and weight parts have run.
        arrivals: stage -> when the messages that its forwards and its input parts wait for arrive, so far.
        free: rank -> when it is free.
        held: rank -> bytes that it holds.
        rows: the actions of each rank so far.
        starts: the start of each of them.
    """

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        self.counts = [[0, 0, 0] for _ in range(problem.stages)]
        self.arrivals: list[tuple[list[float], list[float]]] = [([], []) for _ in range(problem.stages)]
        self.arrivals[0][F].extend([0.0] * problem.microbatches)
        self.free, self.held = [0.0] * problem.ranks, [0] * problem.ranks
        self.rows: Rows = [[] for _ in range(problem.ranks)]
        self.starts: list[list[float]] = [[] for _ in range(problem.ranks)]
        self._idle = {channel: 0.0 for pair in problem.channels for channel in pair if channel >= 0}

    def start(self, stage: int, kind: int) -> float | None:
        """Return when the next action of a stage and kind can start; ``None`` if its inputs have not been made."""
        counts, free = self.counts[stage], self.free[self.problem.rank_of[stage]]
        number = counts[kind]
        if number == self.problem.microbatches or (kind and number == counts[kind - 1]):
            return None
        if kind == W or (kind == I and stage == self.problem.stages - 1):
            return free
        known = self.arrivals[stage][kind]
        return max(free, known[number]) if number < len(known) else None

    def fits(self, stage: int, kind: int) -> bool:
        """Return whether its rank has the memory for an action now."""
        rank = self.problem.rank_of[stage]
        return self.held[rank] + self.problem.uses[stage][kind].peak <= self.problem.room[rank]

    def run(self, stage: int, kind: int, start: float) -> int:
        """Run an action; return the stage that gets its message, -1 for none."""
        problem, rank = self.problem, self.problem.rank_of[stage]
        self.rows[rank].append((stage, kind))
        self.starts[rank].append(start)
        self.counts[stage][kind] += 1
        self.held[rank] += problem.uses[stage][kind].change
        end = self.free[rank] = start + problem.seconds[stage][kind]
        target = stage + 1 if kind == F else stage - 1
        if kind == W or not 0 <= target < problem.stages:
            return -1
        if (channel := problem.channels[stage][kind]) >= 0:
            end = max(end, self._idle[channel]) + problem.travel[stage][kind]
            self._idle[channel] = end
        self.arrivals[target][kind].append(end)
        return target

    @property
    def times(self) -> tuple[float, ...]:
        """All times that matter for what follows: when ranks and channels are free, and messages not read yet come."""
        unread = (
            time
            for counts, arrivals in zip(self.counts, self.arrivals, strict=True)
            for count, known in zip(counts, arrivals, strict=False)
            for time in known[count:]
        )
        return (*self.free, *unread, *self._idle.values())

    def copy(self) -> StepState:
        """Return a copy that can go on by itself."""
        made = StepState.__new__(StepState)
        made.problem, made.counts = self.problem, [list(own) for own in self.counts]
        made.rows, made.starts = [list(row) for row in self.rows], [list(row) for row in self.starts]
        made.arrivals = [(list(forward), list(back)) for forward, back in self.arrivals]
        made.free, made.held, made._idle = list(self.free), list(self.held), dict(self._idle)
        return made

    def timed(self) -> TimedRows:
        """Return the order when all actions have run."""
        value = max(end + late for end, late in zip(self.free, self.problem.late, strict=True))
        return TimedRows(self.rows, self.starts, value, tuple(self.free))


def time_rows(problem: OrderProblem, rows: Sequence[Sequence[tuple[int, int]]]) -> TimedRows | None:
    """Return an order with its times; ``None`` if it deadlocks, leaves actions out, or takes too much memory."""
    state, at = StepState(problem), [0] * problem.ranks
    ready = list(range(problem.ranks))
    while ready:
        rank = ready.pop()
        row = rows[rank]
        while at[rank] < len(row):
            stage, kind = row[at[rank]]
            start = state.start(stage, kind)
            if start is None:
                break
            if not state.fits(stage, kind):
                return None
            at[rank] += 1
            target = state.run(stage, kind, start)
            if target >= 0 and problem.rank_of[target] != rank:
                ready.append(problem.rank_of[target])
    each = 3 * problem.microbatches
    whole = all(len(row) == each * len(stages) for row, stages in zip(state.rows, problem.of_rank, strict=True))
    return state.timed() if whole else None
