"""Finds the best order by branching on the next action of the rank that is free first, with dominance between states.

A rank runs one of the actions that are ready, or waives them and waits: its next action is then one that is not ready
yet. So each order is reached once. If the same actions have run in two states, and the same ones are waived, they hold
the same bytes. Where no time of one is later, it is as good for every way to go on, and the other one is dropped.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from splitkit.solvers.order_problem import F, I, OrderProblem, StepState, TimedRows, W
from splitkit.solvers.placement.problem import Bools, Floats, Ints

_Kept = tuple[float, ...]


def branch(problem: OrderProblem, windows: Windows, value: float, most_nodes: int) -> tuple[TimedRows | None, bool]:
    """Return the best order below a value, ``None`` if none was found, and whether all orders were covered.

    Args:
        problem: the problem.
        windows: windows of orders that are better than the value.
        value: what must be undercut, by more than rounding.
        most_nodes: the work limit.
    """
    return _Branching(problem, windows, value, most_nodes).run()


class _Node(NamedTuple):
    """A state.

    Attributes:
        step: what has run; it is never changed.
        waived: rank -> bits of 3 * stage + kind that it will not run before another message.
    """

    step: StepState
    waived: tuple[int, ...]


class _Branching:
    def __init__(self, problem: OrderProblem, windows: Windows, value: float, most_nodes: int) -> None:
        self.problem, self.value, self.most = problem, value, most_nodes
        self.due = windows.forward_to.tolist(), windows.input_to.tolist()
        self.best: TimedRows | None = None
        self.seen: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Kept]] = {}

    def run(self) -> tuple[TimedRows | None, bool]:
        stack = [_Node(StepState(self.problem), (0,) * self.problem.ranks)]
        while stack:
            node = stack.pop()
            self.most -= 1
            if self.most < 0:
                return self.best, False
            stack.extend(reversed(self._children(node)))
        return self.best, True

    def _children(self, node: _Node) -> list[_Node]:
        """Return the states after the next choice, that with the earliest deadline first."""
        problem = self.problem
        ready = [self._ready(node, rank) for rank in range(problem.ranks)]
        ranks = [rank for rank, actions in enumerate(ready) if actions]
        if not ranks:
            if sum(map(sum, node.step.counts)) == 3 * problem.stages * problem.microbatches:
                found = node.step.timed()
                if found.value < self.value * (1 - 1e-9):
                    self.best, self.value = found, found.value
            return []
        rank = min(ranks, key=lambda r: (node.step.free[r], r))
        children = []
        for due, start, stage, kind in sorted(ready[rank]):
            step = node.step.copy()
            step.run(stage, kind, start)
            child = _Node(step, (*node.waived[:rank], 0, *node.waived[rank + 1 :]))
            if self._in_time(step, rank, due) and self._is_new(child):
                children.append(child)
        wait = self._waiting(node, rank, ready[rank])
        if wait is not None and self._is_new(wait):
            children.append(wait)
        return children

    def _ready(self, node: _Node, rank: int) -> list[tuple[float, float, int, int]]:
        """Return (deadline, start, stage, kind) of what a rank can run and has not waived."""
        found = []
        for stage in self.problem.of_rank[rank]:
            for kind in (F, I, W):
                if node.waived[rank] >> (3 * stage + kind) & 1:
                    continue
                start = node.step.start(stage, kind)
                if start is not None and node.step.fits(stage, kind):
                    number = node.step.counts[stage][kind]
                    due = self.due[kind][stage][number] if kind != W else float("inf")
                    found.append((due, start, stage, kind))
        return found

    def _in_time(self, step: StepState, rank: int, due: float) -> bool:
        """Return whether the action that ran last leaves its rank the time for the rest of its work."""
        left = sum(
            (self.problem.microbatches - step.counts[s][k]) * self.problem.seconds[s][k]
            for s in self.problem.of_rank[rank]
            for k in (F, I, W)
        )
        end, eps = step.free[rank], 1e-9 * self.value
        return end <= due + eps and end + left + self.problem.late[rank] < self.value - eps

    def _waiting(self, node: _Node, rank: int, ready: list[tuple[float, float, int, int]]) -> _Node | None:
        """Return the state in which a rank waives what is ready; ``None`` if no message gives it another choice."""
        stages = self.problem.of_rank[rank]
        if not any(self._awaited(node.step, rank, stage, kind) for stage in stages for kind in (F, I)):
            return None
        bits = node.waived[rank]
        for _, _, stage, kind in ready:
            bits |= 1 << (3 * stage + kind)
        return node._replace(waived=(*node.waived[:rank], bits, *node.waived[rank + 1 :]))

    def _awaited(self, step: StepState, rank: int, stage: int, kind: int) -> bool:
        """Return whether an action lacks nothing but a message of another rank."""
        source, number = stage - 1 if kind == F else stage + 1, step.counts[stage][kind]
        return (
            0 <= source < self.problem.stages
            and self.problem.rank_of[source] != rank
            and number < self.problem.microbatches
            and (kind == F or number < step.counts[stage][F])
            and number == len(step.arrivals[stage][kind])
            and step.fits(stage, kind)
        )

    def _is_new(self, node: _Node) -> bool:
        """Return whether no state with the same counts has times that are not later, and keep this one."""
        times = node.step.times
        kept = self.seen.setdefault((tuple(chain.from_iterable(node.step.counts)), node.waived), [])
        for other in kept:
            if all(a <= b for a, b in zip(other, times, strict=True)):
                return False
        kept[:] = [other for other in kept if not all(a <= b for a, b in zip(times, other, strict=True))]
        kept.append(times)
        return True


# Finds when the actions of one stage can run at the earliest and at the latest, by dynamic programs over its counts.
#
# Alone on its rank, a stage is a single machine: after f forwards, i input parts and w weight parts it holds a known
# number of bytes, whatever their order. One program finds the earliest time at which it can be in a state (f, i, w),
# one the latest time from which it can still finish in time; both are exact. An order of all stages contains one of
# this stage, so no action ends before its earliest end or after its latest one.


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
    allowed: Bools
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
        self.exists: list[Bools] = []
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
