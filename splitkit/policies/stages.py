"""Pipeline stages: consecutive parts, the slowest as fast as possible."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splitkit.costs import Costs
from splitkit.dataflow import Dataflow
from splitkit.plan import Plan
from splitkit.policies.parameters import enough_nodes, positive
from splitkit.solvers.contiguous import Floats, contiguous


@dataclass(frozen=True)
class Stages:
    """``n`` consecutive stages in graph order. The slowest is as fast as possible under the given costs, exactly;
    among all such plans the least bytes cross the cuts, and among these the stages are the most even.

    Attributes:
        n: how many stages, at most the number of nodes.
    """

    n: int

    def __post_init__(self) -> None:
        positive(self, "n", self.n)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Stages are ``0 .. n - 1``; SK303 when the graph has fewer nodes."""
        enough_nodes(flow, self.n)
        seconds = np.array([costs.seconds(node) for node in flow.nodes], dtype=np.float64)
        starts = contiguous(seconds, self.n, live_bytes(flow, costs))
        stage = np.searchsorted(starts, np.arange(len(seconds)), side="right") - 1
        loads = np.add.reduceat(seconds, starts)
        share = loads.max() * self.n / loads.sum() if loads.sum() else 1.0
        note = f"{self.n} stages, the slowest {share:.3f} of the mean; optimal for this node order"
        return Plan.of({node: int(s) for node, s in zip(flow.nodes, stage, strict=True)}, note)


def live_bytes(flow: Dataflow, costs: Costs) -> Floats:
    """Bytes that cross a cut before each placeable node: values made before it and read at or after it, each once."""
    position = {node: i for i, node in enumerate(flow.nodes)}
    change = np.zeros(len(position) + 1)
    for value in flow.index:
        if (made := position.get(flow.producer(value))) is None:
            continue
        readers = [position[u] for u in value.users if u in position]  # members of the tuple count for themselves
        if readers and max(readers) > made:
            size = costs.nbytes(value)
            change[made + 1] += size
            change[max(readers) + 1] -= size
    return np.cumsum(change)[:-1]
