"""Simulate a choice without making a plan of it: the result of `Peaks.trace`, several times as fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from splitkit.training.checkpoints import nodes_with_policy
from splitkit.training.choices import Choice, Savings
from splitkit.training.flow import BACKWARD, FORWARD, output_nodes, save_all_plan
from splitkit.training.peaks import Peaks, PeakTrace


class Replay:
    """Simulates choices of one joint graph, over the ops of its `EmissionOrder`.

    Attributes:
        savings: the problem whose choices are simulated.
        peaks: simulates the steps of both halves.
    """

    def __init__(self, savings: Savings, peaks: Peaks) -> None:
        self.savings, self.peaks, self._order = savings, peaks, peaks.order
        flow, number, home = savings.flow, peaks.order.number, save_all_plan(savings.flow)
        self._tagged = bool(nodes_with_policy(flow, *CheckpointPolicy))
        self._numbers = [number[op] for op in savings.ops]
        self._late = [home.places.get(nodes[0]) == (BACKWARD,) for nodes in self._order.ops]
        computed = set(peaks.computed)
        self._steps = [[flow.index[n] for n in nodes if n in computed] for nodes in self._order.ops]
        self._all = [True] * len(self._late)
        once = [number[flow.producer(n)] for n in flow.once if flow.producer(n) in number]
        given = [number[n] for n in output_nodes(flow.gradients) if n in number]
        self._roots = {
            FORWARD: [number[n] for n in output_nodes(flow.outputs) if n in number],
            BACKWARD: list[int](),
        }
        for op in (*once, *given):
            self._roots[BACKWARD if self._late[op] else FORWARD].append(op)

    def trace(self, choice: Choice) -> PeakTrace:
        """Return the simulated run of a choice."""
        if self._tagged:  # checkpoints also tag views, which only the plan knows
            return self.peaks.trace(choice.plan())
        inside = list(self._late)
        for op, runs in zip(self._numbers, choice.runs.tolist(), strict=True):
            inside[op] = runs
        backward, crossing = self._reach(self._roots[BACKWARD], inside)
        forward, _ = self._reach([*self._roots[FORWARD], *crossing], self._all)
        order = self._order
        late = self._in_steps(order.backward_ops(backward))
        return self.peaks.run(self._in_steps(order.forward_ops(forward, self._taken(backward))), late)

    def _taken(self, backward: Iterable[int]) -> Iterator[Node]:
        """Yield what backward takes from forward if it computes these ops."""
        order, there = self._order, set(backward)
        read = chain(output_nodes(self.savings.flow.gradients), *(order.reads[op] for op in there))
        return (node for node in read if node in order.number and order.number[node] not in there)

    def _in_steps(self, ops: Iterable[int]) -> list[int]:
        return [step for op in ops for step in self._steps[op]]

    def _reach(self, roots: Iterable[int], inside: list[bool]) -> tuple[list[int], list[int]]:
        """Return the ops inside that ``roots`` need, in ascending order, and the ops outside that they read."""
        sources, steps = self._order.sources, self._steps
        seen = [False] * len(inside)
        stack = list(roots)
        found, border = list[int](), list[int]()
        while stack:
            op = stack.pop()
            if seen[op]:
                continue
            seen[op] = True
            if not inside[op]:
                border.append(op)
                continue
            if steps[op]:
                found.append(op)
            stack += sources[op]
        return sorted(found), border
