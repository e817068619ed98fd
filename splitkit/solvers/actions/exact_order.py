"""Finds the best order by branching on the next action of the rank that is free first, with dominance between states.

A rank runs one of the actions that are ready, or waives them and waits: its next action is then one that is not ready
yet. So each order is reached once. If the same actions have run in two states, and the same ones are waived, they hold
the same bytes. Where no time of one is later, it is as good for every way to go on, and the other one is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from splitkit.solvers.actions.order_problem import F, I, OrderProblem, Rows, TimedRows, W, time_rows
from splitkit.solvers.actions.stage_windows import Windows

_Kept = tuple[float, ...]


@dataclass
class BranchResult:
    """What branching found.

    Attributes:
        best: the best order below the value that was given; ``None`` if there is none, or none was found.
        whole: whether all orders were covered, so that none is better than ``best`` or the given value.
        nodes: the number of states.
    """

    best: TimedRows | None
    whole: bool
    nodes: int


def branch(problem: OrderProblem, windows: Windows, value: float, most_nodes: int) -> BranchResult:
    """Search for an order better than a value.

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
        counts: 3 * stage + kind -> how many have run.
        free: rank -> when it is free.
        held: rank -> bytes.
        waived: rank -> bits of 3 * stage + kind that it will not run before another message.
        arrivals: 2 * stage + kind -> arrivals of messages that are not read yet.
        idle: channel -> when it is free, in a fixed order.
        tail: the actions so far, the last one first: (rank, stage, kind, rest).
    """

    counts: tuple[int, ...]
    free: _Kept
    held: tuple[int, ...]
    waived: tuple[int, ...]
    arrivals: tuple[_Kept, ...]
    idle: _Kept
    tail: tuple[Any, ...] | None


class _Branching:
    def __init__(self, problem: OrderProblem, windows: Windows, value: float, most_nodes: int) -> None:
        self.problem, self.value, self.most = problem, value, most_nodes
        self.due = windows.forward_to.tolist(), windows.input_to.tolist()
        self.best: TimedRows | None = None
        self.seen: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Kept]] = {}
        channels = sorted({c for pair in problem.channels for c in pair if c >= 0})
        self.channel = {channel: place for place, channel in enumerate(channels)}
        self.nodes = 0

    def run(self) -> BranchResult:
        problem = self.problem
        arrivals: list[_Kept] = [()] * (2 * problem.stages)
        arrivals[F] = (0.0,) * problem.microbatches
        none = (0,) * problem.ranks
        root = _Node(
            (0,) * (3 * problem.stages),
            (0.0,) * problem.ranks,
            none,
            none,
            tuple(arrivals),
            (0.0,) * len(self.channel),
            None,
        )
        stack = [root]
        while stack:
            node = stack.pop()
            self.nodes += 1
            if self.nodes > self.most:
                return BranchResult(self.best, False, self.nodes)
            stack.extend(reversed(self._children(node)))
        return BranchResult(self.best, True, self.nodes)

    def _children(self, node: _Node) -> list[_Node]:
        """Return the states after the next choice, that with the earliest deadline first."""
        problem = self.problem
        ready = [self._ready(node, rank) for rank in range(problem.ranks)]
        ranks = [rank for rank, actions in enumerate(ready) if actions]
        if not ranks:
            if sum(node.counts) == 3 * problem.stages * problem.microbatches:
                self._note(node)
            return []
        rank = min(ranks, key=lambda r: (node.free[r], r))
        found = []
        for due, start, stage, kind in sorted(ready[rank]):
            child = self._after(node, rank, start, stage, kind)
            if self._in_time(child, rank, due, stage, kind) and self._is_new(child):
                found.append(child)
        wait = self._waiting(node, rank, ready[rank])
        if wait is not None and self._is_new(wait):
            found.append(wait)
        return found

    def _ready(self, node: _Node, rank: int) -> list[tuple[float, float, int, int]]:
        """Return (deadline, start, stage, kind) of what a rank can run and has not waived."""
        found = []
        for stage in self.problem.of_rank[rank]:
            for kind in (F, I, W):
                if node.waived[rank] >> (3 * stage + kind) & 1:
                    continue
                start = self._start(node, rank, stage, kind)
                if start is not None:
                    number = node.counts[3 * stage + kind]
                    due = self.due[kind][stage][number] if kind != W else float("inf")
                    found.append((due, start, stage, kind))
        return found

    def _start(self, node: _Node, rank: int, stage: int, kind: int) -> float | None:
        at = 3 * stage + kind
        number = node.counts[at]
        if number == self.problem.microbatches or (kind and number == node.counts[at - 1]):
            return None
        if node.held[rank] + self.problem.uses[stage][kind].peak > self.problem.room[rank]:
            return None
        if kind == W or (kind == I and stage == self.problem.stages - 1):
            return node.free[rank]
        waiting = node.arrivals[2 * stage + kind]
        return max(node.free[rank], waiting[0]) if waiting else None

    def _after(self, node: _Node, rank: int, start: float, stage: int, kind: int) -> _Node:
        problem, at = self.problem, 3 * stage + kind
        end = start + problem.seconds[stage][kind]
        arrivals, idle = list(node.arrivals), node.idle
        target = stage + 1 if kind == F else stage - 1
        if kind != W:
            if arrivals[2 * stage + kind]:
                arrivals[2 * stage + kind] = arrivals[2 * stage + kind][1:]
            if 0 <= target < problem.stages:
                arrival, channel = end, problem.channels[stage][kind]
                if channel >= 0:
                    place = self.channel[channel]
                    arrival = max(end, idle[place]) + problem.travel[stage][kind]
                    idle = (*idle[:place], arrival, *idle[place + 1 :])
                arrivals[2 * target + kind] = (*arrivals[2 * target + kind], arrival)
        return _Node(
            (*node.counts[:at], node.counts[at] + 1, *node.counts[at + 1 :]),
            (*node.free[:rank], end, *node.free[rank + 1 :]),
            (*node.held[:rank], node.held[rank] + problem.uses[stage][kind].change, *node.held[rank + 1 :]),
            (*node.waived[:rank], 0, *node.waived[rank + 1 :]),
            tuple(arrivals),
            idle,
            (rank, stage, kind, node.tail),
        )

    def _in_time(self, node: _Node, rank: int, due: float, stage: int, kind: int) -> bool:
        """Return whether the action that ran last leaves its rank the time for the rest of its work."""
        left = sum(
            (self.problem.microbatches - node.counts[3 * s + k]) * self.problem.seconds[s][k]
            for s in self.problem.of_rank[rank]
            for k in (F, I, W)
        )
        end, eps = node.free[rank], 1e-9 * self.value
        return end <= due + eps and end + left + self.problem.late[rank] < self.value - eps

    def _waiting(self, node: _Node, rank: int, ready: list[tuple[float, float, int, int]]) -> _Node | None:
        """Return the state in which a rank waives what is ready; ``None`` if no message gives it another choice."""
        if not any(self._awaited(node, rank, stage, kind) for stage in self.problem.of_rank[rank] for kind in (F, I)):
            return None
        bits = node.waived[rank]
        for _, _, stage, kind in ready:
            bits |= 1 << (3 * stage + kind)
        return node._replace(waived=(*node.waived[:rank], bits, *node.waived[rank + 1 :]))

    def _awaited(self, node: _Node, rank: int, stage: int, kind: int) -> bool:
        """Return whether an action lacks nothing but a message of another rank."""
        source, number = stage - 1 if kind == F else stage + 1, node.counts[3 * stage + kind]
        return (
            0 <= source < self.problem.stages
            and self.problem.rank_of[source] != rank
            and number < self.problem.microbatches
            and (kind == F or number < node.counts[3 * stage + F])
            and not node.arrivals[2 * stage + kind]
            and node.held[rank] + self.problem.uses[stage][kind].peak <= self.problem.room[rank]
        )

    def _is_new(self, node: _Node) -> bool:
        """Return whether no state with the same counts has times that are not later, and keep this one."""
        times = (*node.free, *(time for waiting in node.arrivals for time in waiting), *node.idle)
        kept = self.seen.setdefault((node.counts, node.waived), [])
        for other in kept:
            if all(a <= b for a, b in zip(other, times, strict=True)):
                return False
        kept[:] = [other for other in kept if not all(a <= b for a, b in zip(times, other, strict=True))]
        kept.append(times)
        return True

    def _note(self, node: _Node) -> None:
        rows: Rows = [[] for _ in range(self.problem.ranks)]
        tail = node.tail
        while tail is not None:
            rank, stage, kind, tail = tail
            rows[rank].insert(0, (stage, kind))
        found = time_rows(self.problem, rows)
        if found is not None and found.value < self.value * (1 - 1e-9):
            self.best, self.value = found, found.value
