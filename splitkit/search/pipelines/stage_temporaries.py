"""Simulates one microbatch of a stage: the most bytes that it takes while it computes, beyond what it saves."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.stage_problem import StageProblem
from splitkit.training.choices import Choice
from splitkit.training.flow import output_nodes
from splitkit.training.gradient_terms import terms_and_sums
from splitkit.training.peaks import Peaks


@dataclass(frozen=True, eq=False)
class _Sum:
    """A gradient that backward sums up from terms; a stage that has only some of them returns their sum.

    Attributes:
        sums: the ops that add the terms up, if one stage has all of them.
        storages: the storages of each term.
        places: the position of each term.
        nbytes: the bytes of the gradient.
    """

    sums: frozenset[int]
    storages: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    nbytes: int

    def own(self, start: int, end: int) -> list[int]:
        """Return the numbers of the terms that a stage computes, if another one has some, too."""
        found = [i for i, place in enumerate(self.places) if start <= place < end]
        return [] if len(found) == len(self.places) else found


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
        self._sums = self._sums_of_terms()
        lowest = {s: min(each.places) for each in self._sums for op in each.sums for s in self.order.made[op]}
        at = [lowest.get(root, self._at[op] if (op := self._maker[root]) >= 0 else -1) for root in returned]
        backward = [(p, flow.storages.nbytes[r]) for r, p in zip(returned, at, strict=True) if p >= 0]
        sizes = np.zeros(len(positions.forward) + 1, np.int64)
        for position, nbytes in backward:
            if position >= 0:
                sizes[position + 1] += nbytes
        self.gradients = np.cumsum(sizes)
        """(n + 1,) bytes of the gradients of inputs that backward makes before each position: alive at its end."""

    def _sums_of_terms(self) -> list[_Sum]:
        """Return the gradients that are sums of terms from possibly different stages."""
        flow, number, found = self.flow, self.order.number, list[_Sum]()
        returned = list(output_nodes(flow.gradients))
        for value in dict.fromkeys(returned):
            terms, sums = terms_and_sums(value, returned)
            places = [int(self._at[number[t]]) if t in number else -1 for t in terms]
            if sums and min(places) >= 0:
                storages = tuple(tuple(flow.storages.under(t)) for t in terms)
                nbytes = sum(flow.storages.nbytes[s] for s in flow.storages.under(value))
                found.append(_Sum(frozenset(number[s] for s in sums), storages, tuple(places), nbytes))
        return found

    def _kept(self, start: int, end: int) -> set[int]:
        """Return the storages that live to the end of a stage's backward: it returns them, or sends them back."""
        terms = {s for each in self._sums for i in each.own(start, end) for s in each.storages[i]}
        return {*self._returned, *self._up(start, end), *terms}

    def _elsewhere(self, start: int, end: int) -> set[int]:
        """Return the sums that no stage computes, since a stage has only some of their terms."""
        return {op for each in self._sums if not all(start <= p < end for p in each.places) for op in each.sums}

    def _summed(self, start: int, end: int) -> int:
        """Return the bytes of the largest sum that a stage adds up in the end, of some terms of a gradient."""
        return max((each.nbytes for each in self._sums if len(each.own(start, end)) > 1), default=0)

    def needs_of_backward(self) -> Iterator[tuple[int, int, int]]:
        """Yield (lowest, highest position, bytes) for ops of backward: what each stage with both takes at least.

        While an op runs, memory holds its outputs, and its inputs that backward made.
        """
        inside = (self._at >= 0) & ~self._forward & ~self._late
        inside[sorted({op for each in self._sums for op in each.sums})] = False
        for op in np.flatnonzero(inside).tolist():
            made = {s: self._maker[s] for s in self.order.held[op] if inside[self._maker[s]] and self._maker[s] >= 0}
            at = int(self._at[op])
            own = sum(self.order.nbytes[s] for s, maker in made.items() if maker == op) + self._transient[op]
            yield at, at, own
            places = [at, *(int(self._at[maker]) for maker in made.values())]
            yield min(places), max(places), sum(self.order.nbytes[s] for s in made) + self._transient[op]

    def members(self, start: int, end: int, choice: Choice) -> tuple[list[int], list[int]]:
        """Return the ops of a stage's forward and backward, each in graph order."""
        inside = (self._at >= start) & (self._at < end)
        number, ops = self.order.number, choice.savings.ops
        moved = {number[ops[i]] for i in np.flatnonzero(choice.forward & choice.savings.late)}
        stays = {number[ops[i]] for i in np.flatnonzero(~choice.runs & choice.savings.late)}
        again = {number[ops[i]] for i in np.flatnonzero(choice.runs)}
        forward = sorted({*np.flatnonzero(inside & self._forward).tolist(), *moved})
        nowhere = stays | self._elsewhere(start, end)
        backward = sorted({*np.flatnonzero(inside & ~self._forward).tolist(), *again} - nowhere)
        return forward, backward

    def key(self, problem: StageProblem) -> Hashable:
        """Return a key of what decides the temporary bytes of a stage, equal for isomorphic stages."""
        start, end = problem.start, problem.end
        nowhere = self._elsewhere(start, end)
        here = np.flatnonzero((self._at >= start) & (self._at < end)).tolist()
        inside = [op for op in here if op not in nowhere]
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
        kept = self._kept(start, end)
        facts = [(at, self.order.nbytes[s], s in kept, s in problem.held_storages) for s, at in first.items()]
        ops = tuple(number[self.order.number[op]] for op in problem.savings.ops)
        text = repr((lines, facts, ops, self._summed(start, end)))
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
        # Gradients that backward returns or sends are alive until its end, where terms of one gradient are added up.
        late = self._peak(self.order.backward_ops(backward), (), self._kept(start, end), self._summed(start, end))
        return max(early, late)

    def _peak(self, ops: Sequence[int], apart: Collection[int], kept: Collection[int], last_bytes: int = 0) -> int:
        """Return the most bytes alive while these ops run in this order, of storages that they make.

        Args:
            ops: the ops.
            apart: storages that are counted elsewhere.
            kept: storages that live to the end.
            last_bytes: bytes that are made after the last op.
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
        return max(peak, live + last_bytes)
