"""Simulates one microbatch of a stage: the most bytes that it takes while it computes, beyond what it saves."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence

import numpy as np

from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.stage_members import StageMembers
from splitkit.search.pipelines.stage_problem import StageProblem
from splitkit.training.choices import Choice
from splitkit.training.flow import output_nodes
from splitkit.training.peaks import Peaks

_Sum = tuple[int, list[tuple[int, ...]]]
"""The bytes of a sum, and the storages of each term that live no longer than it takes to add it."""


class StageTemporaries:
    """The temporary bytes of all stages of a joint graph; storages and ops go by the numbers of `EmissionOrder`.

    Attributes:
        members: the ops of all stages.
    """

    def __init__(self, positions: JointPositions) -> None:
        flow = self.flow = positions.flow
        peaks = Peaks(flow)
        members = self.members = StageMembers(positions, peaks.order)
        self.order = peaks.order
        self._transient = [max(int(peaks.transient[flow.index[n]]) for n in nodes) for nodes in self.order.ops]
        nodes = tuple(flow.graph.nodes)
        storages = flow.storages
        self._maker = {r: self.order.number.get(nodes[storages.maker[r]], -1) for r in set(storages.root) if r >= 0}
        self._at = members.at
        returned = self.order.storages_of(output_nodes(flow.gradients))
        self._sent = [(c.made, c.last, tuple(flow.storages.under(c.value))) for c in positions.gradients]
        self._returned = frozenset(returned)
        self._outputs = self.order.storages_of(flow.outputs)
        lowest = {s: min(each.places) for each in members.sums for op in each.sums for s in self.order.made[op]}
        at = [lowest.get(root, self._at[op] if (op := self._maker[root]) >= 0 else -1) for root in returned]
        backward = [(p, flow.storages.nbytes[r]) for r, p in zip(returned, at, strict=True) if p >= 0]
        sizes = np.zeros(len(positions.forward) + 1, np.int64)
        for position, nbytes in backward:
            if position >= 0:
                sizes[position + 1] += nbytes
        self.gradients = np.cumsum(sizes)
        """(n + 1,) bytes of the gradients of inputs that backward makes before each position: alive at its end."""

    def _kept(self, start: int, end: int) -> set[int]:
        """Return the storages that live to the end of a stage's backward: it returns them, or sends them back."""
        terms = {s for each in self.members.sums for i in each.own(start, end) for s in each.storages[i]}
        return {*self._returned, *self._up(start, end), *terms}

    def _summed(self, start: int, end: int) -> list[_Sum]:
        """Return the sums that a stage adds up in the end, of some terms of a gradient."""
        found = ((each, each.own(start, end)) for each in self.members.sums)
        held = {*self._returned, *self._up(start, end)}
        return [
            (each.nbytes, [tuple(s for s in each.storages[i] if s not in held) for i in own])
            for each, own in found
            if len(own) > 1
        ]

    def needs_of_backward(self) -> Iterator[tuple[int, int, int]]:
        """Yield (lowest, highest position, bytes) for ops of backward: what each stage with both takes at least.

        While an op runs, memory holds its outputs, and its inputs that backward made.
        """
        inside = (self._at >= 0) & ~self.members.forward & ~self.members.late
        inside[sorted({op for each in self.members.sums for op in each.sums})] = False
        for op in np.flatnonzero(inside).tolist():
            made = {s: self._maker[s] for s in self.order.held[op] if inside[self._maker[s]] and self._maker[s] >= 0}
            at = int(self._at[op])
            own = sum(self.order.nbytes[s] for s, maker in made.items() if maker == op) + self._transient[op]
            yield at, at, own
            places = [at, *(int(self._at[maker]) for maker in made.values())]
            yield min(places), max(places), sum(self.order.nbytes[s] for s in made) + self._transient[op]

    def key(self, problem: StageProblem) -> Hashable:
        """Return a key of what decides the temporary bytes of a stage, equal for isomorphic stages."""
        start, end = problem.start, problem.end
        nowhere = self.members.elsewhere(start, end)
        here = np.flatnonzero((self._at >= start) & (self._at < end)).tolist()
        inside = [op for op in here if op not in nowhere]
        number = {op: i for i, op in enumerate(inside)}
        storages = {s: i for i, s in enumerate(dict.fromkeys(s for op in inside for s in self.order.held[op]))}
        first = {s: number.get(self._maker[s], -1) for s in storages}
        lines = [
            (
                bool(self.members.forward[op]),
                bool(self.members.late[op]),
                op in self.order.bound,
                self._transient[op],
                tuple(number.get(need, -1) for need in self.order.needs[op]),
                tuple(storages[s] for s in self.order.held[op]),
            )
            for op in inside
        ]
        groups = (self._kept(start, end), problem.held_storages, self._outputs, self._returned)
        facts = [(at, self.order.nbytes[s], *(s in group for group in groups)) for s, at in first.items()]
        ops = tuple(number[self.order.number[op]] for op in problem.savings.ops)
        sums = [(n, [[storages[s] for s in term] for term in terms]) for n, terms in self._summed(start, end)]
        text = repr((lines, facts, ops, sums))
        return hashlib.sha256(text.encode()).digest()

    def _up(self, start: int, end: int) -> set[int]:
        """Return the storages of the gradients that a stage sends back."""
        return {r for made, last, roots in self._sent if start <= made < end and last < start for r in roots}

    def temporary(self, start: int, end: int, choice: Choice) -> int:
        """Return the temporary bytes of a stage.

        Args:
            start: its first position.
            end: the position behind its last.
            choice: what it saves and computes again.
        """
        forward, backward = self.members.of(start, end, choice)
        taken = [*self.members.sent(start, end), *self.members.held(start, forward, backward)]
        early = self._peak(self.order.forward_ops(forward, taken), self.order.storages_of(taken), self._outputs)
        # Gradients that backward returns or sends are alive until its end, where terms of one gradient are added up.
        late = self._peak(self.order.backward_ops(backward), (), self._kept(start, end), self._summed(start, end))
        return max(early, late)

    def _peak(
        self, ops: Sequence[int], apart: Collection[int], kept: Collection[int], sums: Sequence[_Sum] = ()
    ) -> int:
        """Return the most bytes alive while these ops run in this order, of storages that they make.

        Args:
            ops: the ops.
            apart: storages that are counted elsewhere.
            kept: storages that live to the end.
            sums: what is added up after the last op.
        """
        made, held, nbytes, maker = self.order.made, self.order.held, self.order.nbytes, self._maker
        last: dict[int, int] = {}
        here: dict[int, frozenset[int]] = {}
        """Op -> the storages made here that its values lie in; a view that forward hands over lies in another copy."""
        for step, op in enumerate(ops):
            read = {s for source in self.order.sources[op] for s in here.get(source, ())}
            own = frozenset(s for s in held[op] if s in read or maker[s] == op)
            last |= dict.fromkeys(own, step)
            here[op] = own.intersection(made[op])
        dies: list[list[int]] = [[] for _ in ops]
        for storage, step in last.items():
            if storage not in apart and storage not in kept:
                dies[step].append(storage)
        live = peak = 0
        for step, op in enumerate(ops):
            live += sum(nbytes[s] for s in made[op] if maker[s] == op and s not in apart)
            peak = max(peak, live + self._transient[op])
            live -= sum(nbytes[s] for s in dies[step])
        left = Counter(s for _, terms in sums for term in terms for s in term)
        for total, (first, *others) in sums:
            for number, term in enumerate(others):
                live += total
                peak = max(peak, live)
                added = term if number else (*first, *term)
                left.subtract(added)
                live -= sum(nbytes[s] for s in {*added} if not left[s]) + (total if number else 0)
        return peak
