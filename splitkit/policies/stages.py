"""Pipeline stages: convex parts one after the other, the slowest as fast as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import Node

from splitkit.checks import Memory, count, memory_of, seconds, settle
from splitkit.costs import Costs, Links
from splitkit.costs.links import links_of
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow, crossing, enough_nodes, given_back, readers_of, waits_for
from splitkit.pipeline.defaults import ranks_of, require_schedule
from splitkit.pipeline.stageprices import Optimizer, checked_optimizer
from splitkit.plans.parts import Claim
from splitkit.plans.record import Plan
from splitkit.prices import checked
from splitkit.search.demand import Demand
from splitkit.search.fitting import bad_problems
from splitkit.search.placing import Placing
from splitkit.search.stages import Staging
from splitkit.solvers.line.blocks import Floats, blocks_of
from splitkit.solvers.line.blocks import contiguous as along
from splitkit.solvers.placement.problem import Slot
from splitkit.solvers.placement.solution import ending, stages_of
from splitkit.solvers.placement.stages.contiguous import contiguous


@dataclass(frozen=True)
class Stages:
    """``n`` stages, each a convex set of nodes, the slowest as fast as possible: exactly, over all orders of the graph.

    Without links, memory and schedule a stage's load is the work of its nodes; among the best stages along the order
    that is found, the least bytes cross the cuts, and among these the stages are the most even. With ``links`` a stage
    also pays for each value that it sends or receives, once (twice with a schedule: gradients come back), and values
    that need no gradient and come from the inputs alone are computed again where that saves sending them.

    With a ``schedule`` the load is forward and backward, stages are held to ``memory`` with the microbatches that are
    in flight at their place, and of equally good stages those with the shortest simulated step are taken, then those
    with the lowest peak.

    The plan's claim says how good it is: its value, what no plan can be below that computes each node once, and what
    proved that.

    Attributes:
        n: how many stages, at most the number of nodes.
        schedule: of the pipeline, as `splitkit.simulate_schedule` knows it: ``"1f1b"``, ``"gpipe"`` ...
        microbatches: of a step, ``2 n`` by default. The graph was captured with the inputs of one microbatch.
        memory: bytes of each rank, as a number or a text (``"80GiB"``), one for all or one each; a rank runs one stage,
            or two where the schedule says so.
        links: between the ranks ``0, 1 ...``: `splitkit.costs.Links`, or the name of a preset (``"nvlink4"``).
        optimizer: whose state is held: ``"adam"``, ``"momentum"``, ``"sgd"``; ``None``: the model is not trained.
        seconds: about how long to search for a better plan or bound where none is proven before.
    """

    n: int
    schedule: str | None = None
    microbatches: int | None = None
    memory: Memory = None
    links: str | Links | None = None
    optimizer: Optimizer = "adam"
    seconds: float = 10.0

    def __post_init__(self) -> None:
        settle(self, "n", count)
        require_schedule(self, self.schedule, self.microbatches, self.n)
        memory_of(self, self.memory, max(ranks_of(self.schedule, self.microbatches, self.n)) + 1)
        links_of(self.links)
        checked_optimizer(self.optimizer)
        if self.schedule is not None and self.optimizer is None:
            raise PolicyError("SK302", "Stages: a schedule trains, and optimizer is None", "Name one, or no schedule.")
        seconds(self, "seconds", self.seconds, endless=False)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Stages are ``0 .. n - 1``.

        Raises:
            NoPlanError: SK303 when the graph has fewer nodes, or no stages fit the memory; says what would fit.
        """
        enough_nodes(flow, self.n)
        costs = checked(costs)
        if self.schedule is None and self.memory is None and self.links is None:
            return self._by_work(flow, costs)
        links = links_of(self.links)
        demand = Demand(self, flow, costs, self.schedule, self.microbatches, self.memory, links, self.optimizer)
        return Staging(demand, tuple(range(self.n)), self.seconds).plan()

    def _by_work(self, flow: Dataflow, costs: Costs) -> Plan:
        """The work alone counts."""
        placing = Placing(flow, costs, [{n: costs.seconds(n) for n in flow.nodes}])
        with bad_problems(self, placing):
            problem = placing.problem([Slot()] * self.n)
            found = contiguous(problem, seconds=self.seconds)
        stage = dict(zip(placing.units, stages_of(found.device, found.order).tolist(), strict=True))
        _sink(flow, costs, stage)
        orders = [flow.nodes, tuple(sorted(flow.nodes, key=stage.__getitem__))]
        seconds = dict(zip(placing.units, placing.seconds[0].tolist(), strict=True))
        choices = [_along(flow, costs, nodes, self.n, seconds) for nodes in orders]
        labels, loads = min(choices, key=lambda choice: choice[1].max())  # the graph's own order if it does as well
        value = float(loads.max())
        claim = Claim("bottleneck", value, min(value, found.bound), found.solver, int(loads.argmax()), found.tolerance)
        mean = loads.sum() / self.n
        share = value / mean if mean else 1.0
        note = f"{self.n} stages, the slowest {share:.3f} of the mean: {claim}{ending([found])}"
        return replace(Plan.of({n: labels[n] for n in flow.nodes}, note), claim=claim)


def _sink(flow: Dataflow, costs: Costs, stage: dict[Node, int]) -> None:
    """Move nodes that take no time to the stage of those that read them, where fewer bytes cross then.

    A solver puts them anywhere: labels that only the loss reads would be shifted in the first stage.
    """
    readers, given = readers_of(flow), given_back(flow)
    latest: dict[Node, int] = {}
    for node in reversed(flow.nodes):
        then = latest.get(node, stage[node])
        if then > stage[node] and not costs.seconds(node) and node not in given:
            brought = [read for read in flow.inputs(node) if all(stage[u] != then for u in readers[read])]
            if sum(map(costs.nbytes, brought)) <= costs.nbytes(node):
                stage[node] = then
        for before in waits_for(flow, node):
            latest[before] = min(latest.get(before, stage[node]), stage[node])


def _along(
    flow: Dataflow, costs: Costs, nodes: Sequence[Node], count: int, seconds: Mapping[Node, float]
) -> tuple[dict[Node, int], Floats]:
    """The best stages along one order of the nodes, and their loads."""
    work = np.array([seconds[node] for node in nodes], dtype=np.float64)
    starts = along(work, count, live_bytes(flow, costs, nodes))
    return dict(zip(nodes, blocks_of(starts, len(work)).tolist(), strict=True)), np.add.reduceat(work, starts)


def live_bytes(flow: Dataflow, costs: Costs, nodes: Sequence[Node]) -> Floats:
    """Bytes that cross a cut before each of ``nodes``: values made before it and read at or after it, each once."""
    return crossing(flow, costs, nodes)[1, :-1]
