"""Simulates one microbatch of a stage: the most bytes that it takes while it computes, beyond what it saves."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Sequence

import numpy as np

from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.stage_problem import StageProblem
from splitkit.training.choices import Choice
from splitkit.training.flow import output_nodes
from splitkit.training.peaks import Peaks


class StageTemporaries:
    """The temporary bytes of all stages of a joint graph; storages and ops go by the numbers of `EmissionOrder`."""

    def __init__(self, positions: JointPositions) -> None:
        self.positions = positions
        flow = self.flow = positions.flow
        peaks = Peaks(flow)
        self.order = peaks.order
        self._transient = [max(int(peaks.transient[flow.index[n]]) for n in nodes) for nodes in self.order.ops]
        nodes = tuple(flow.graph.nodes)
        storages = flow.storages
        self._maker = {r: self.order.number.get(nodes[storages.maker[r]], -1) for r in set(storages.root) if r >= 0}
        place = positions.place
        self._at = np.array([place.get(flow.producer(ops[0]), -1) for ops in self.order.ops], np.int64)
        forward = set(positions.forward)
        self._forward = np.array([flow.producer(ops[0]) in forward for ops in self.order.ops], np.bool_)
        late = positions.late
        self._late = np.array([flow.producer(ops[0]) in late for ops in self.order.ops], np.bool_)
        returned = self.order.storages_of(output_nodes(flow.gradients))
        self._sent = [(c.made, c.last, tuple(flow.storages.under(c.value))) for c in positions.gradients]
        self._returned = frozenset(returned)
        at = [self._at[op] if (op := self._maker[root]) >= 0 else -1 for root in returned]
        backward = [(p, flow.storages.nbytes[r]) for r, p in zip(returned, at, strict=True) if p >= 0]
        sizes = np.zeros(len(positions.forward) + 1, np.int64)
        for position, nbytes in backward:
            if position >= 0:
                sizes[position + 1] += nbytes
        self.gradients = np.cumsum(sizes)
        """(n + 1,) bytes of the gradients of inputs that backward makes before each position: alive at its end."""

    def members(self, start: int, end: int, choice: Choice) -> tuple[list[int], list[int]]:
        """Return the ops of a stage's forward and backward, each in graph order."""
        inside = (self._at >= start) & (self._at < end)
        number, ops = self.order.number, choice.savings.ops
        moved = {number[ops[i]] for i in np.flatnonzero(choice.forward & choice.savings.late)}
        stays = {number[ops[i]] for i in np.flatnonzero(~choice.runs & choice.savings.late)}
        again = {number[ops[i]] for i in np.flatnonzero(choice.runs)}
        forward = sorted({*np.flatnonzero(inside & self._forward).tolist(), *moved})
        backward = sorted({*np.flatnonzero(inside & ~self._forward).tolist(), *again} - stays)
        return forward, backward

    def key(self, problem: StageProblem) -> Hashable:
        """Return a key of what decides the temporary bytes of a stage, equal for isomorphic stages."""
        start, end = problem.start, problem.end
        inside = np.flatnonzero((self._at >= start) & (self._at < end)).tolist()
        number = {op: i for i, op in enumerate(inside)}
        storages = {s: i for i, s in enumerate(dict.fromkeys(s for op in inside for s in self.order.held[op]))}
        first = {s: number.get(self._maker[s], -1) for s in storages}
        lines = [
            (
                bool(self._forward[op]),
                self._transient[op],
                tuple(number.get(need, -1) for need in self.order.needs[op]),
                tuple(storages[s] for s in self.order.held[op]),
            )
            for op in inside
        ]
        kept = self._returned | self._up(start, end)
        facts = [(at, self.order.nbytes[s], s in kept, s in problem.held_storages) for s, at in first.items()]
        ops = tuple(number[self.order.number[op]] for op in problem.savings.ops)
        text = repr((lines, facts, ops))
        return hashlib.sha256(text.encode()).digest()

    def _up(self, start: int, end: int) -> set[int]:
        """Return the storages of the gradients that a stage sends back."""
        return {r for made, last, roots in self._sent if start <= made < end and last < start for r in roots}

    def temporary(self, start: int, end: int, choice: Choice, sent: Collection[int]) -> int:
        """Return the temporary bytes of a stage.

        Args:
            start: its first position.
            end: the position behind its last.
            choice: what it saves and computes again.
            sent: the storages that it sends on, which are held.
        """
        forward, backward = self.members(start, end, choice)
        problem = choice.savings
        saved = {s for i in np.flatnonzero(choice.saved) for s in self.flow.storages.under(problem.values[i])}
        early = self._peak(forward, {*saved, *sent}, ())
        # Gradients that backward returns or sends are alive until its end.
        late = self._peak(self.order.backward_ops(backward), (), self._returned | self._up(start, end))
        return max(early, late)

    def _peak(self, ops: Sequence[int], apart: Collection[int], kept: Collection[int]) -> int:
        """Return the most bytes alive while these ops run in this order, of storages that they make.

        Args:
            ops: the ops.
            apart: storages that are counted elsewhere.
            kept: storages that live to the end.
        """
        made, held, nbytes, maker = self.order.made, self.order.held, self.order.nbytes, self._maker
        last: dict[int, int] = {}
        for step, op in enumerate(ops):
            for storage in held[op]:
                last[storage] = step
        dies: list[list[int]] = [[] for _ in ops]
        here = set(ops)
        for storage, step in last.items():
            if maker[storage] in here and storage not in apart and storage not in kept:
                dies[step].append(storage)
        live = peak = 0
        for step, op in enumerate(ops):
            live += sum(nbytes[s] for s in made[op] if maker[s] == op and s not in apart)
            peak = max(peak, live + self._transient[op])
            live -= sum(nbytes[s] for s in dies[step])
        return peak
