"""Balance stages along orders of the graph, where the bottleneck leaves a choice."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow, given_back, readers_of, waits_for
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.stages.memory_fit import named
from splitkit.solvers.clock import Clock, endless_clock
from splitkit.solvers.line.balanced_blocks import block_of_each, even_blocks
from splitkit.solvers.line.priced_cuts import best_borders
from splitkit.solvers.placement.problem import Floats, Ints

_ROUNDING = 1e-9
_NEAR = 1e-3  # relative: a share that is hardly more counts as none
_MOST_PRICED = 5_000  # units that are cut again where cuts are paid for, in time that grows with their square


@dataclass(frozen=True, eq=False)
class Balancing:
    """How stages are balanced.

    Attributes:
        placing: the units.
        costs: bytes of values.
        stages: the number of stages.
        travel: transfer times at a border; None if transfers are free.
        held: (stages, n) bytes of the units in each stage.
        capacity: (stages,) bytes of each stage; infinite for no limit.
        bound: a lower bound on the seconds of the bottleneck.
        tolerances: relative slack on the bottleneck and on balance; each is tried.
        clock: after its end one order has to do.
    """

    placing: PlacementModel
    costs: Costs
    stages: int
    travel: TransferTimes | None
    held: Ints
    capacity: Floats
    bound: float
    tolerances: tuple[float, ...]
    clock: Clock = field(default_factory=endless_clock)

    def along(self, stage: Ints) -> Iterator[Ints]:
        """Return (n,) stages of the units: balanced ones along the graph's own order and along orders of given stages.

        An order of given stages has one stage after the other. Solvers put units that take no time anywhere; each
        order is also tried with those units in the stage of their readers.
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
                    found[order] = block_of_each(division[near], len(stage))
                    yield found

    def _divisions(self, order: Ints, stage: Ints) -> list[list[int]]:
        """Return the positions of the borders in an order, for each tolerance; nothing if none fit or the order is too
        long.
        """
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
        return best_borders(work[order], prices, self.held[:, order], self.capacity, self.tolerances)

    def _limit(self, value: float, tolerance: float) -> float:
        """Return a limit on the bottleneck: within the tolerance of the bound if reachable, else of the value."""
        near = self.bound * (1 + tolerance)
        return near if value <= near else value * (1 + tolerance)

    def _sunk(self, stage: Ints) -> Ints:
        """Return the stages with units that take no time moved to their readers, where fewer bytes cross then.

        Otherwise labels that only the loss reads would be shifted in the first stage.
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
    """Name the op that keeps so many ranks from being faster than fewer."""
    heaviest, total = max(seconds, key=seconds.__getitem__), sum(seconds.values())
    share = seconds[heaviest] / total if total else 0.0
    if share * ranks > 1 + _NEAR:
        most = max(1, math.ceil(1 / share - _NEAR))
        yield (
            f"{named(heaviest)}, one op, takes {share:.0%}: more than {most} stages are no faster; "
            "split that op, or ask for fewer"
        )


def preferred(measures: Sequence[tuple[float, ...]], tolerance: float, paid: float) -> int:
    """Return the best of several: those near the minimum of each measure in turn, then the first.

    A load or balance is near if it is within the tolerance. The step and peak of a schedule, every second of five
    measures, are what users pay for and get less slack (``paid``).
    """
    left = list(range(len(measures)))
    last = len(measures[0]) - 1
    for at in range(last):
        near = paid if last > 2 and at % 2 else tolerance
        least = min(measures[i][at] for i in left)
        left = [i for i in left if measures[i][at] <= least * (1 + near + _ROUNDING)]
    return min(left, key=lambda i: measures[i][last])
