"""Finds when the actions of one stage can run at the earliest and at the latest, by dynamic programs over its counts.

Alone on its rank, a stage is a single machine: after f forwards, i input parts and w weight parts it holds a known
number of bytes, whatever their order. One program finds the earliest time at which it can be in a state (f, i, w), one
the latest time from which it can still finish in time; both are exact. An order of all stages contains one of this
stage, so no action ends before its earliest end or after its latest one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitkit.solvers.actions.order_problem import F, I, OrderProblem, W

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass
class Windows:
    """Times between which the actions of all stages run, (stages, microbatches) each.

    Attributes:
        forward_from: when the messages of forward can have arrived.
        forward_to: the latest end of forward.
        input_from: when the messages of the input part can have arrived.
        input_to: the latest end of the input part.
        end: rank -> the latest end of its last action.
    """

    forward_from: Floats
    forward_to: Floats
    input_from: Floats
    input_to: Floats
    end: Floats

    @classmethod
    def within(cls, problem: OrderProblem, value: float) -> Windows:
        """Return windows for orders of a value that is not larger than this."""
        shape = problem.stages, problem.microbatches
        end = value - np.array(problem.late)
        late = np.repeat(end[list(problem.rank_of)][:, None], problem.microbatches, axis=1)
        return cls(np.zeros(shape), late.copy(), np.zeros(shape), late.copy(), end)


def tighten(problem: OrderProblem, windows: Windows, rounds: int = 3, chosen: Collection[int] | None = None) -> bool:
    """Tighten windows, stage after stage there and back; return whether an order can exist within them.

    An end of forward bounds the start of the next stage's forward, and the latest end of that bounds this one's; input
    parts likewise the other way.

    Args:
        problem: the problem.
        windows: changed in place.
        rounds: how often to go there and back at most.
        chosen: the stages for which the dynamic programs run, all by default; in the others the actions of a kind only
            follow one another.
    """
    stages, levels = range(problem.stages), dict[tuple[int, ...], _Levels]()
    for _ in range(rounds):
        before = _total(windows)
        for stage in (*stages, *reversed(stages)):
            if chosen is not None and stage not in chosen:
                _follow(problem, stage, windows)
            elif not _StageProgram(problem, stage, windows, levels).tighten():
                return False
            _hand_on(problem, stage, windows)
        if _total(windows) == before:
            break
    return True


def _total(windows: Windows) -> float:
    earliest = windows.forward_from.sum() + windows.input_from.sum()
    return float(earliest - windows.forward_to.sum() - windows.input_to.sum())


def _follow(problem: OrderProblem, stage: int, windows: Windows) -> None:
    """Tighten the windows of a stage by the sequence of its actions of each kind."""
    numbers = np.arange(problem.microbatches)
    forwards, inputs = windows.forward_from[stage], windows.input_from[stage]
    sides = (forwards, windows.forward_to, F, stage + 1), (inputs, windows.input_to, I, stage - 1)
    for since, due, kind, reader in sides:
        seconds, travel = problem.seconds[stage][kind], problem.travel[stage][kind]
        taken = numbers * seconds
        np.maximum(since, np.maximum.accumulate(since - taken) + taken, out=since)
        np.minimum(due[stage], np.minimum.accumulate((due[stage] - taken)[::-1])[::-1] + taken, out=due[stage])
        if kind == F:
            np.maximum(inputs, since + seconds, out=inputs)
        if 0 <= reader < problem.stages:
            ahead = (windows.forward_from, windows.input_from)[kind][reader]
            np.maximum(ahead, since + seconds + travel, out=ahead)


def _hand_on(problem: OrderProblem, stage: int, windows: Windows) -> None:
    """Tighten the latest ends of the neighbours' actions whose results a stage reads."""
    seconds, travel = problem.seconds[stage], problem.travel
    if stage:
        latest = windows.forward_to[stage] - seconds[F] - travel[stage - 1][F]
        np.minimum(windows.forward_to[stage - 1], latest, out=windows.forward_to[stage - 1])
    if stage + 1 < problem.stages:
        latest = windows.input_to[stage] - seconds[I] - travel[stage + 1][I]
        np.minimum(windows.input_to[stage + 1], latest, out=windows.input_to[stage + 1])


@dataclass(frozen=True)
class _Step:
    """A kind of action between two states of a stage.

    Attributes:
        seconds: its duration.
        before: number -> when its inputs can have arrived.
        due: number -> its latest end.
        allowed: (a, b), the states in which memory lets it start.
        source: the part of an array of states from which it leads, and
        target: the part to which it leads.
    """

    seconds: float
    before: Floats
    due: Floats
    allowed: Flags
    source: tuple[slice, slice]
    target: tuple[slice, slice]


_LAST, _REST, _ALL = slice(None, -1), slice(1, None), slice(None)


class _Levels:
    """Which states exist on each level, for stages of one shape.

    Attributes:
        done: level -> f and i of its rows, (a,) each, within the numbers of microbatches.
        exists: level -> which states exist, (a, b).
    """

    def __init__(self, count: int, deep: int, wide: int) -> None:
        a, b = np.arange(deep), np.arange(wide)[None, :]
        self.done: list[tuple[Ints, Ints]] = []
        self.exists: list[Flags] = []
        for level in range(2 * count + 1):
            forwards, inputs = (level + a) // 2, (level - a) // 2
            whole = ((level - a) % 2 == 0) & (inputs >= 0) & (forwards <= count)
            self.exists.append(whole[:, None] & (b <= inputs[:, None]))
            self.done.append((np.clip(forwards, 0, count), np.clip(inputs, 0, count)))


class _StageProgram:
    """The two dynamic programs of one stage.

    An array of states is (a, b) for a level f + i, where a = f - i and b = i - w. States that memory forbids, or whose
    a has another parity than the level, hold infinity.
    """

    def __init__(
        self, problem: OrderProblem, stage: int, windows: Windows, levels: dict[tuple[int, ...], _Levels]
    ) -> None:
        self.stage, self.windows, self.count = stage, windows, problem.microbatches
        self.travel = problem.travel[stage]
        forward, backward, self.weight = problem.seconds[stage]
        self.end = float(windows.end[problem.rank_of[stage]])
        self.eps = 1e-9 * abs(self.end)
        room, uses = problem.room[problem.rank_of[stage]], problem.uses[stage]
        shape = window_shape(problem, stage)
        self.shape = shape[1:]
        if shape not in levels:
            levels[shape] = _Levels(self.count, *self.shape)
        self.levels = levels[shape]
        a, b = np.arange(shape[1])[:, None], np.arange(shape[2])[None, :]
        held = a * uses[F].change + b * (uses[F].change + uses[I].change)
        allowed = [held + use.peak <= room for use in uses]
        self.with_weight = allowed[W] | (held > room)  # no step leads into a state that memory forbids
        self.taken = b * self.weight
        self.steps = (
            _Step(
                forward,
                windows.forward_from[stage],
                windows.forward_to[stage],
                allowed[F],
                (_LAST, _ALL),
                (_REST, _ALL),
            ),
            _Step(
                backward, windows.input_from[stage], windows.input_to[stage], allowed[I], (_REST, _LAST), (_LAST, _REST)
            ),
        )

    def tighten(self) -> bool:
        """Tighten the windows of the stage and of the messages that it sends; return whether it can be done in time."""
        latest = self._latest()
        sooner, later = np.full((2, self.count), np.inf), np.full((2, self.count), -np.inf)
        if not self._earliest(latest, sooner, later):
            return False
        for step, last in zip(self.steps, later, strict=True):
            np.minimum(step.due, last, out=step.due)
        for readers, first, travel, at in (
            (self.windows.forward_from, sooner[F], self.travel[F], self.stage + 1),
            (self.windows.input_from, sooner[I], self.travel[I], self.stage - 1),
        ):
            if 0 <= at < len(readers):
                np.maximum(readers[at], first + travel, out=readers[at])
        return True

    def _latest(self) -> list[Floats]:
        """Return level -> the latest times from which the rest can be done in time."""
        found: list[Floats] = []
        for level in range(2 * self.count, -1, -1):
            done, exists = self.levels.done[level], self.levels.exists[level]
            best = np.full(self.shape, -np.inf)
            if not found:
                best[0, 0] = self.end
            for step, number in zip(self.steps, done, strict=True):
                if found:
                    after = np.full(self.shape, -np.inf)
                    after[step.source] = found[-1][step.target]
                    due = step.due[np.minimum(number, self.count - 1)][:, None]
                    np.maximum(best, np.where(step.allowed, np.minimum(after, due) - step.seconds, -np.inf), out=best)
            best[~exists] = -np.inf
            found.append(np.where(exists, self._weights_first(best), -np.inf))
        return found[::-1]

    def _weights_first(self, best: Floats) -> Floats:
        """Return the latest times if weight parts may run before anything else."""
        if self.with_weight.all():
            return np.asarray(np.maximum.accumulate(best + self.taken, axis=1) - self.taken)
        for b in range(1, best.shape[1]):
            runs = np.where(self.with_weight[:, b], best[:, b - 1] - self.weight, -np.inf)
            np.maximum(best[:, b], runs, out=best[:, b])
        return best

    def _weights_last(self, best: Floats) -> Floats:
        """Return the earliest times if weight parts may run after everything else."""
        if self.with_weight.all():
            return np.asarray(np.minimum.accumulate((best + self.taken)[:, ::-1], axis=1)[:, ::-1] - self.taken)
        for b in range(best.shape[1] - 2, -1, -1):
            runs = np.where(self.with_weight[:, b + 1], best[:, b + 1] + self.weight, np.inf)
            np.minimum(best[:, b], runs, out=best[:, b])
        return best

    def _earliest(self, latest: list[Floats], sooner: Floats, later: Floats) -> bool:
        """Fill in the earliest and latest ends, (2, microbatches), of the steps that lead to the end in time."""
        before = np.full(self.shape, np.inf)
        for level in range(2 * self.count + 1):
            done, exists = self.levels.done[level], self.levels.exists[level]
            best = np.full(self.shape, np.inf)
            if level == 0:
                best[0, 0] = 0.0
            for kind, (step, number) in enumerate(zip(self.steps, done, strict=True)):
                if level:
                    made = np.maximum(number - 1, 0)
                    start = np.full(self.shape, np.inf)
                    start[step.target] = np.where(step.allowed, before, np.inf)[step.source]
                    end = np.maximum(start, step.before[made][:, None]) + step.seconds
                    due = np.minimum(latest[level], step.due[made][:, None])
                    end[(end > due + self.eps) | ~exists] = np.inf
                    np.minimum(best, end, out=best)
                    self._note(made, end, due, sooner[kind], later[kind])
            best = self._weights_last(best)
            best[~exists | (best > latest[level] + self.eps)] = np.inf
            before = best
        return bool(np.isfinite(before[0, 0]))

    def _note(self, made: Ints, end: Floats, due: Floats, sooner: Floats, later: Floats) -> None:
        """Note the earliest and the latest end of the actions that lead to the states of a level, one a row."""
        in_time = np.isfinite(end)
        rows = np.flatnonzero(in_time.any(axis=1))
        np.minimum.at(sooner, made[rows], end[rows].min(axis=1))
        np.maximum.at(later, made[rows], np.where(in_time, due, -np.inf)[rows].max(axis=1))


def window_shape(problem: OrderProblem, stage: int) -> tuple[int, int, int]:
    """Return the levels, and the numbers of a and b, of the states of a stage that memory allows."""
    uses, room = problem.uses[stage], problem.room[problem.rank_of[stage]]
    most = [
        int(min(problem.microbatches, max(1, room // nbytes))) if nbytes > 0 else problem.microbatches
        for nbytes in (uses[F].change, uses[F].change + uses[I].change)
    ]
    return 2 * problem.microbatches + 1, most[0] + 1, most[1] + 1


def window_cells(problem: OrderProblem, stage: int) -> int:
    """Return the work of one round of `tighten` for a stage, in states; each level counts as 1000 more states."""
    levels, deep, wide = window_shape(problem, stage)
    return 2 * levels * (deep * wide + 1000)
