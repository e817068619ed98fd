"""The run of a choice, simulated without a plan of it: as `Peaks.trace` of its plan, several times as fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from splitkit.training.checkpoints import asked
from splitkit.training.choices import Choice, Savings
from splitkit.training.flow import BACKWARD, FORWARD, homes, nodes_in
from splitkit.training.peaks import Peaks, PeakTrace


class Replay:
    """Simulates choices of one joint graph, by number of unit: see `EmissionOrder.units`.

    Attributes:
        savings: the choices.
        peaks: simulates the steps of halves.
    """

    def __init__(self, savings: Savings, peaks: Peaks) -> None:
        self.savings, self.peaks, self._order = savings, peaks, peaks.order
        flow, number, home = savings.flow, peaks.order.number, homes(savings.flow)
        self._tagged = bool(asked(flow, *CheckpointPolicy))
        self._op = [number[op] for op in savings.ops]
        self._late = [home.places.get(nodes[0]) == (BACKWARD,) for nodes in self._order.units]
        computed = set(peaks.computed)
        self._steps = [[flow.index[n] for n in nodes if n in computed] for nodes in self._order.units]
        self._all = [True] * len(self._late)
        once = [number[flow.producer(n)] for n in flow.once if flow.producer(n) in number]
        given = [number[n] for n in nodes_in(flow.gradients) if n in number]
        self._roots = {
            FORWARD: [number[n] for n in nodes_in(flow.outputs) if n in number],
            BACKWARD: list[int](),
        }
        for unit in (*once, *given):
            self._roots[BACKWARD if self._late[unit] else FORWARD].append(unit)

    def trace(self, choice: Choice) -> PeakTrace:
        """The run of a choice."""
        if self._tagged:  # what checkpoints want of views, the plan says
            return self.peaks.trace(choice.plan())
        inside = list(self._late)
        for unit, runs in zip(self._op, choice.runs.tolist(), strict=True):
            inside[unit] = runs
        backward, crossing = self._reach(self._roots[BACKWARD], inside)
        forward, _ = self._reach([*self._roots[FORWARD], *crossing], self._all)
        order = self._order
        late = self._in_steps(order.backward_units(backward))
        return self.peaks.run(self._in_steps(order.forward_units(forward, self._taken(backward))), late)

    def _taken(self, backward: Iterable[int]) -> Iterator[Node]:
        """What backward takes from forward, if it computes these units."""
        order, there = self._order, set(backward)
        read = chain(nodes_in(self.savings.flow.gradients), *(order.reads[unit] for unit in there))
        return (node for node in read if node in order.number and order.number[node] not in there)

    def _in_steps(self, units: Iterable[int]) -> list[int]:
        return [step for unit in units for step in self._steps[unit]]

    def _reach(self, roots: Iterable[int], inside: list[bool]) -> tuple[list[int], list[int]]:
        """What is inside of the units that ``roots`` need, by rising number; and those outside that they read."""
        sources, steps = self._order.sources, self._steps
        seen = [False] * len(inside)
        stack = list(roots)
        found, border = list[int](), list[int]()
        while stack:
            unit = stack.pop()
            if seen[unit]:
                continue
            seen[unit] = True
            if not inside[unit]:
                border.append(unit)
                continue
            if steps[unit]:
                found.append(unit)
            stack += sources[unit]
        return sorted(found), border
