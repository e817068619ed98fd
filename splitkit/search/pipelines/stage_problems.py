"""States the recompute problem of one pipeline stage of a joint graph, and prices its solutions.

A stage holds what it received and what it sent until its backward, as torch's `PipelineStage` does. So these values
cost nothing to save, and the problem of a stage is that of the whole graph (`splitkit.training.choices.Savings`)
restricted to an interval of positions::

    received    free: held in any case, read by forward, backward and recompute
    sent        free: held in any case
    inside      saved for its bytes, or computed again for its time
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add

import numpy as np
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.graph.node_values import value_bytes
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.prices import Optimizer, unit_of
from splitkit.search.pipelines.joint_positions import JointPositions, StageMembers, bytes_across, trained_inputs
from splitkit.training.choices import Bools, Choice, Floats, Ints, Savings, savings
from splitkit.training.flow import output_nodes
from splitkit.training.peaks import Peaks

# Holds the recompute problem of one pipeline stage.


@dataclass(frozen=True, eq=False)
class StageProblem:
    """What one stage may save or compute again.

    Attributes:
        start: its first position.
        end: the position behind its last.
        savings: the problem; storages that are held in any case have 0 bytes.
        ops: (n,) the numbers of its ops in the problem of the whole graph.
        held: bytes that are held in any case: received and sent values.
        held_storages: the storages of sent values.
    """

    start: int
    end: int
    savings: Savings
    ops: Ints
    held: int
    held_storages: frozenset[int]


# Divides the backward of a stage into its input and weight parts, for schedules that run these apart.
#
# The input part computes the gradients that go to earlier stages, and what these need. The rest is the weight part, as
# in torchtitan's GraphPP. What the weight part reads waits for it. `StageBackward.waiting` is the one place that knows
# this rule.


class StageBackward:
    """The two parts of backward of all stages of a joint graph.

    Attributes:
        at: (n,) the position of each node of backward.
        reach: (n,) the lowest position to which its value leads. A node is in the weight part of each stage that starts
            there or before and contains its position.
        numbers: (n,) the number of its op.
    """

    def __init__(self, members: StageMembers) -> None:
        self.members, positions = members, members.positions
        self.positions = positions
        forward = set(positions.forward)
        place = positions.place
        nodes = [n for n in positions.flow.nodes if n in place and n not in forward]
        reach: dict[Node, int] = {}
        for node in reversed(nodes):
            readers = [reach[r] for r in positions.readers(node) if r in reach and r not in positions.ties]
            reach[node] = min([place[node], *readers])
        self._nodes = nodes
        self.at = np.array([place[n] for n in nodes], np.int64)
        self.reach = np.array([reach[n] for n in nodes], np.int64)
        self.numbers = np.array([members.order.number[n] for n in nodes], np.int64)

    def _weights(self, start: int, end: int) -> np.ndarray:
        return np.flatnonzero((self.at >= start) & (self.at < end) & (self.reach >= start))

    def reads_of_backward(self) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
        """Return (r,) arrays, one entry for each storage that a node of backward reads.

        The reader's position and reach; the storage, its bytes, and the position and reach of its maker, -1 if
        forward makes it.
        """
        flow, place = self.positions.flow, self.positions.place
        reach = dict(zip(self._nodes, self.reach.tolist(), strict=True))
        rows = [
            (place[node], reach[node], root, flow.storages.nbytes[root], place.get(maker, -1), reach.get(maker, -1))
            for node in self._nodes
            for read in node.all_input_nodes
            for maker in [flow.producer(read)]
            for root in flow.storages.under(read)
        ]
        at, own, root, nbytes, made, makers = np.array(rows, np.int64).reshape(-1, 6).T
        return at, own, root, nbytes, made, makers

    def weights(self, start: int, end: int) -> frozenset[int]:
        """Return the numbers of the ops that a stage runs in its weight part if it computes them in backward."""
        return frozenset(self.numbers[self._weights(start, end) if start else self.at < end].tolist())

    def waiting(self, start: int, end: int, received: int) -> int:
        """Return the bytes that wait for the weight part: the storages that it reads and does not make.

        Args:
            start: the first position of the stage, not 0.
            end: the position behind its last.
            received: bytes that the stage received, which are held to the end of its backward.
        """
        flow = self.positions.flow
        weights = [self._nodes[i] for i in self._weights(start, end).tolist()]
        own = set(weights)
        reads = {r for node in weights for r in node.all_input_nodes if flow.producer(r) not in own}
        place = self.positions.place
        inside = (r for r in reads if place.get(flow.producer(r), -1) >= start)
        roots = {root for r in inside for root in flow.storages.under(r)}
        return received + sum(flow.storages.nbytes[root] for root in roots)


_NEVER = np.iinfo(np.int64).max // 2


class StageProblems:
    """Answers for all intervals of positions of a joint graph: the problem, and what a choice costs.

    Attributes:
        positions: the positions of the nodes.
        whole: the recompute problem of the whole graph.
        forward: (n + 1,) seconds before each position of what forward computes, whatever is saved.
        backward: (n + 1,) the same of backward, without sums of gradients that may be of several stages.
        in_backward: (o,) the seconds of the ops of ``backward``, 0 for all others.
        either: (n + 1,) the same of what runs in forward if it is saved, and in backward if not.
        sent: what crosses cuts on its way to later stages: (position of the maker, of the last reader, [(storage,
            position of its maker)]).
    """

    def __init__(
        self, positions: JointPositions, costs: Costs, optimizer: Optimizer, divided: bool, *, recompute: bool = True
    ) -> None:
        self.positions, self.costs, self.optimizer, self.divided = positions, costs, optimizer, divided
        flow = self.flow = positions.flow
        self.whole = savings(flow, costs) if recompute else _saved_only(savings(flow, costs))
        size = len(positions.forward)
        self.peaks = StageTemporaries(positions)
        self.members = self.peaks.members
        self._index_seconds()
        self._index_savings()
        self._index_parameters()
        everywhere = np.arange(size + 1)
        self.sent_on = bytes_across(positions.activations, everywhere)
        self.sent_back = bytes_across(positions.gradients, everywhere)
        self._index_crossings()
        self.halves = StageBackward(self.members)

    def _index_seconds(self) -> None:
        members, flow = self.members, self.flow
        makers = [flow.producer(nodes[0]) for nodes in members.order.ops]
        self._seconds = [self.costs.seconds(n) if n in self.positions.place else 0.0 for n in makers]
        either, sums = np.zeros(len(makers), np.bool_), np.zeros(len(makers), np.bool_)
        either[[members.order.number[op] for op, late in zip(self.whole.ops, self.whole.late, strict=True) if late]] = 1
        sums[sorted({op for each in members.sums for op in each.sums})] = True
        always = (members.at >= 0) & ~either
        self.forward = self._before(always & members.forward)
        self.in_backward = np.where(always & ~members.forward & ~members.late & ~sums, self._seconds, 0.0)
        self.backward = self._before(self.in_backward > 0)
        self.either = self._before(either)

    def _before(self, ops: Bools) -> Floats:
        """Return (n + 1,) the seconds of some ops before each position."""
        found = np.zeros(len(self.positions.forward) + 1)
        np.add.at(found, self.members.at[ops] + 1, np.array(self._seconds)[ops])
        return np.cumsum(found)

    @cached_property
    def seconds(self) -> Floats:
        """(n + 1,) the seconds before each position of forward and backward together, without recompute."""
        return self.forward + self.backward + self.either

    def _index_savings(self) -> None:
        """Find the position of each op, and of the first reader in backward of each value."""
        place, whole, flow = self.positions.place, self.whole, self.flow
        self.op_at = np.array([place[op] for op in whole.ops], np.int64)
        self.need = np.full(len(whole.values), _NEVER)
        self.up = np.full(len(whole.values), _NEVER)
        ops, forward = set(whole.ops), set(self.positions.forward)
        for i, value in enumerate(whole.values):
            readers = [r for r in self.positions.readers(value) if r in place and r not in forward]
            pinned = [place[r] for r in readers if r not in ops]
            if whole.needed[i]:
                self.need[i] = min(pinned, default=place[flow.producer(value)])
            self.up[i] = min((place[r] for r in readers if r in ops), default=_NEVER)
        storages = (flow.storages.under(value) for value in whole.values)
        self.root = np.full(len(whole.nbytes), -1)
        for i, under in zip(whole.storage.tolist(), storages, strict=True):
            self.root[i] = under[0] if under else -1
        self._order = np.lexsort((np.arange(len(self.op_at)), self.op_at))

    def _index_parameters(self) -> None:
        """Find where each input of forward is used, as (bytes, bytes of its gradient, positions)."""
        trained = set(trained_inputs(self.flow))
        self.parameters: list[tuple[int, int, Ints]] = []
        for node in self.flow.graph.find_nodes(op="placeholder"):
            if node not in self.flow.backward_inputs:
                used = sorted({self.positions.place[r] for r in self.positions.readers(node)} - {None})
                nbytes = value_bytes(node)
                self.parameters.append((nbytes, nbytes * (node in trained), np.array(used, np.int64)))

    def _index_crossings(self) -> None:
        storages, flow, place = self.flow.storages, self.flow, self.positions.place
        maker = {
            root: flow.producer(self._nodes[storages.maker[root]]) for root in dict.fromkeys(storages.root) if root >= 0
        }
        self.sent = [
            (c.made, c.last, [(r, place.get(maker[r], -1)) for r in storages.under(c.value)])
            for c in self.positions.activations
        ]
        self._ends = np.array([(made, last) for made, last, _ in self.sent], np.int64).reshape(-1, 2)

    @cached_property
    def _nodes(self) -> tuple[Node, ...]:
        return tuple(self.flow.graph.nodes)

    def problem(self, start: int, end: int, *, relaxed: bool = False) -> StageProblem:
        """Return the problem of the stage with the positions from ``start`` up to ``end``.

        If ``relaxed``, it asks for no more than any stage does that contains these positions.
        """
        whole = self.whole
        ops = self._order[(self.op_at[self._order] >= start) & (self.op_at[self._order] < end)]
        number = np.full(len(whole.ops), -1)
        number[ops] = np.arange(len(ops))
        inside = number[whole.maker] >= 0
        values = np.flatnonzero(inside)
        values = values[np.lexsort((values, number[whole.maker[values]]))]
        place = np.full(len(whole.values), -1)
        place[values] = np.arange(len(values))
        needed = self.need[values] < end
        if not relaxed:
            needed |= self.up[values] < start
        reads = np.stack([number[whole.reads[:, 0]], place[whole.reads[:, 1]]], 1)
        held = self.held_storages(start, end)
        storages, storage = np.unique(whole.storage[values], return_inverse=True)
        nbytes = np.where(np.isin(self.root[storages], list(held)), 0, whole.nbytes[storages])
        local = replace(
            whole,
            ops=tuple(whole.ops[i] for i in ops),
            seconds=whole.seconds[ops],
            fixed=whole.fixed[ops],
            forced=whole.forced[ops],
            late=whole.late[ops],
            values=tuple(whole.values[i] for i in values),
            maker=number[whole.maker[values]],
            storage=storage.astype(np.int64),
            savable=whole.savable[values],
            needed=needed,
            nbytes=nbytes,
            reads=reads[(reads >= 0).all(axis=1)],
        )
        received = int(self.sent_on[start])
        sent = sum(self.flow.storages.nbytes[root] for root in held)
        return StageProblem(start, end, local, ops, received + sent, held)

    def held_storages(self, start: int, end: int) -> frozenset[int]:
        """Return the storages that a stage makes and sends."""
        if not len(self._ends):
            return frozenset()
        leaves = (self._ends[:, 0] >= start) & (self._ends[:, 0] < end) & (self._ends[:, 1] >= end)
        sent = (pair for i in np.flatnonzero(leaves).tolist() for pair in self.sent[i][2])
        return frozenset(root for root, at in sent if at >= start)

    def parameter_bytes(self, start: int, end: int) -> tuple[int, int]:
        """Return the bytes of the parameters, buffers and inputs that a stage reads, and of their gradients."""
        nbytes = gradients = 0
        for own, gradient, used in self.parameters:
            first = np.searchsorted(used, start)
            if first < len(used) and used[first] < end:
                nbytes, gradients = nbytes + own, gradients + gradient
        return nbytes, gradients

    def waiting(self, start: int, end: int) -> int | None:
        """Return the bytes of a stage that wait for its weight part; ``None``: all that it saves."""
        return self.halves.waiting(start, end, int(self.sent_on[start])) if self.divided and start else None

    def temporary(self, problem: StageProblem, choice: Choice) -> int:
        """Return the bytes that a stage takes while it computes, beyond what it saves."""
        return self.peaks.temporary(problem.start, problem.end, choice)

    def costs_of(self, problem: StageProblem, choice: Choice, temporary: int | None = None) -> StageCosts:
        """Return what a stage costs with a choice of its problem."""
        start, end = problem.start, problem.end
        parameters, gradients = self.parameter_bytes(start, end)
        return replace(
            self.seconds_of(problem, choice),
            saved_bytes=problem.held + choice.nbytes,
            deferred_bytes=self.waiting(start, end),
            temporary_bytes=self.temporary(problem, choice) if temporary is None else temporary,
            parameter_bytes=parameters,
            gradient_bytes=gradients,
            optimizer_bytes=gradients * STATE_OF[self.optimizer] if self.optimizer else 0,
        )

    def seconds_of(self, problem: StageProblem, choice: Choice) -> StageCosts:
        """Return the times and messages of a stage with a choice of its problem, without its memory."""
        start, end = problem.start, problem.end
        forward, backward = self.members.of(start, end, choice)
        late = self.halves.weights(start, end) if self.divided else ()
        return self._timed(
            start,
            end,
            self._sum(forward),
            self._sum(op for op in backward if op not in late),
            self._sum(op for op in backward if op in late),
        )

    def _sum(self, ops: Iterable[int]) -> float:
        """Add up seconds in the order of the graph, one by one, so that the last bit is the same as in `StagedStep`."""
        return reduce(add, (self._seconds[op] for op in ops), 0.0)

    def least_seconds(self, start: int, end: int, again: float) -> StageCosts:
        """Return the least times of a stage that recomputes for ``again`` seconds; ops of `either` are left out."""
        backward = float(self.backward[end] - self.backward[start]) + again
        weight = 0.0
        if self.divided:
            weight = float(sum(self.in_backward[op] for op in self.halves.weights(start, end))) if start else backward
        forward = float(self.forward[end] - self.forward[start])
        return self._timed(start, end, max(0.0, forward), max(0.0, backward - weight), min(weight, backward))

    def _timed(self, start: int, end: int, forward: float, inputs: float, weight: float) -> StageCosts:
        return StageCosts(
            forward=forward,
            backward_input=inputs,
            backward_weight=weight,
            activation_bytes=int(self.sent_on[end]),
            input_gradient_bytes=int(self.sent_back[start]),
            unit=unit_of(self.costs),
        )


def _saved_only(problem: Savings) -> Savings:
    """Return the problem in which what can be saved is not computed again."""
    saves = np.zeros(len(problem.ops), np.bool_)
    saves[problem.maker[problem.savable]] = True
    fixed = problem.fixed | (saves & ~problem.late)
    why = {op: "recompute=False" for op, held in zip(problem.ops, fixed, strict=True) if held}
    return replace(problem, fixed=fixed, why={**why, **problem.why})


# Simulates one microbatch of a stage: the most bytes that it takes while it computes, beyond what it saves.


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
