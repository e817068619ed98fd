"""States the recompute problem of one pipeline stage of a joint graph, and prices its solutions.

A stage holds what it received and what it sent until its backward, as torch's `PipelineStage` does. So these values
cost nothing to save, and the problem of a stage is that of the whole graph (`splitkit.training.choices.Savings`)
restricted to an interval of positions::

    received    free: held in any case, read by forward, backward and recompute
    sent        free: held in any case
    inside      saved for its bytes, or computed again for its time
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, reduce
from operator import add

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.graph.byte_sizes import value_bytes
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.prices import Optimizer, unit_of
from splitkit.search.pipelines.joint_positions import JointPositions, bytes_across, trained_inputs
from splitkit.search.pipelines.stage_backward import StageBackward
from splitkit.search.pipelines.stage_problem import StageProblem
from splitkit.search.pipelines.stage_temporaries import StageTemporaries
from splitkit.training.choices import Choice, Savings, savings

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
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
        self.value_at = self.op_at[whole.maker]
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
