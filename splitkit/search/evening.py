"""Stages made even along orders of the graph: what is left to choose when the slowest is as fast as it can be."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow, given_back, readers_of, waits_for
from splitkit.search.fitting import named
from splitkit.search.placing import Placing, Travel
from splitkit.solvers.clock import Clock, endless
from splitkit.solvers.line.even import blocks_of, even_blocks
from splitkit.solvers.line.priced_cuts import best_cuts
from splitkit.solvers.placement.problem import Floats, Ints

_ROUNDING = 1e-9
_NEAR = 1e-3  # relative: a share that is hardly more counts as none
_MOST_PRICED = 5_000  # units that are cut again where cuts are paid for, in time that grows with their square


@dataclass(frozen=True, eq=False)
class Evening:
    """How stages are made even.

    Attributes:
        placing: the units.
        costs: bytes of values.
        stages: how many.
        travel: what a cut costs; None if nothing.
        held: (stages, n) bytes of the units in each stage.
        capacity: (stages,) bytes of each; infinite for no limit.
        bound: seconds; the slowest stage is no faster.
        tolerances: relative, each tried; by how much a stage may be slower than the slowest need be, and less even than
            the most even, where something is gained by it.
        clock: after its end one order has to do.
    """

    placing: Placing
    costs: Costs
    stages: int
    travel: Travel | None
    held: Ints
    capacity: Floats
    bound: float
    tolerances: tuple[float, ...]
    clock: Clock = field(default_factory=endless)

    def along(self, stage: Ints) -> Iterator[Ints]:
        """(n,) the stage of each unit: even ones along the graph's own order, and along orders of given stages.

        An order of given stages has one stage after the other. Units that take no time are anywhere in those that a
        solver gives; they are also tried where those are that read them.
        """
        orders = [np.arange(len(stage)), np.argsort(stage, kind="stable")]
        if self.travel is None:
            orders.append(np.argsort(self._sunk(stage), kind="stable"))
        orders = [o for i, o in enumerate(orders) if not any(np.array_equal(o, before) for before in orders[:i])]
        divisions: list[list[list[int]]] = []
        for order in orders:
            if divisions and self.clock.is_over():
                break
            divisions.append(self._divisions(order, stage))
        for near in range(len(self.tolerances)):
            for order, division in zip(orders, divisions, strict=False):
                if near < len(division):
                    found = np.empty(len(stage), np.int64)
                    found[order] = blocks_of(division[near], len(stage))
                    yield found

    def _divisions(self, order: Ints, stage: Ints) -> list[list[int]]:
        """Where an order is cut, for each tolerance; nothing if no cuts fit, or the order is too long for that."""
        work, limited = self.placing.seconds[0], bool(np.isfinite(self.capacity).any())
        if self.travel is None and not limited:
            value = float(np.bincount(stage, work, self.stages).max())
            prices = self.placing.crossing(order)[1, :-1]
            found = [
                even_blocks(work[order], self.stages, self._limit(value, near), prices, near)
                for near in self.tolerances
            ]
            return [cuts for cuts in found if cuts is not None]
        if len(order) > _MOST_PRICED:
            return []
        prices = np.zeros((self.stages - 1, len(order) + 1))
        if self.travel is not None:
            prices = self.placing.cut_prices(order, self.travel)
        return best_cuts(work[order], prices, self.held[:, order], self.capacity, self.tolerances)

    def _limit(self, value: float, tolerance: float) -> float:
        """Seconds of the slowest stage: within the tolerance of the bound if that is in reach, else of the value."""
        near = self.bound * (1 + tolerance)
        return near if value <= near else value * (1 + tolerance)

    def _sunk(self, stage: Ints) -> Ints:
        """The stages with units that take no time moved to those that read them, where fewer bytes cross then.

        Labels that only the loss reads would be shifted in the first stage.
        """
        placing = self.placing
        found = {node: int(stage[unit]) for node, unit in placing.index.items()}
        bound = {node for members in placing.members if len(members) > 1 for node in members}
        _sink(placing.flow, self.costs, found, bound)
        return np.array([found[unit] for unit in placing.units], np.int64)


def _sink(flow: Dataflow, costs: Costs, stage: dict[Node, int], bound: Collection[Node]) -> None:
    readers, given = readers_of(flow), {*given_back(flow), *bound}
    latest: dict[Node, int] = {}
    for node in reversed(flow.nodes):
        then = latest.get(node, stage[node])
        if then > stage[node] and not costs.seconds(node) and node not in given:
            brought = [read for read in flow.inputs(node) if all(stage[u] != then for u in readers[read])]
            if sum(map(costs.nbytes, brought)) <= costs.nbytes(node):
                stage[node] = then
        for before in waits_for(flow, node):
            latest[before] = min(latest.get(before, stage[node]), stage[node])


def limits(seconds: Mapping[Node, float], ranks: int) -> Iterator[str]:
    """In words, the op that keeps so many ranks from being faster than fewer."""
    heaviest, total = max(seconds, key=seconds.__getitem__), sum(seconds.values())
    share = seconds[heaviest] / total if total else 0.0
    if share * ranks > 1 + _NEAR:
        most = max(1, math.ceil(1 / share - _NEAR))
        yield (
            f"{named(heaviest)}, one op, takes {share:.0%}: more than {most} stages are no faster; "
            "split that op, or ask for fewer"
        )


def preferred(measures: Sequence[tuple[float, ...]], tolerance: float, paid: float) -> int:
    """Which of several is taken: those near the least of each measure in turn, then the first of the least.

    How near: within the tolerance in the load and in evenness; the step and the peak of a schedule, every second one of
    five measures, are what its users pay for, and yield less (``paid``).
    """
    left = list(range(len(measures)))
    last = len(measures[0]) - 1
    for at in range(last):
        near = paid if last > 2 and at % 2 else tolerance
        least = min(measures[i][at] for i in left)
        left = [i for i in left if measures[i][at] <= least * (1 + near + _ROUNDING)]
    return min(left, key=lambda i: measures[i][last])
