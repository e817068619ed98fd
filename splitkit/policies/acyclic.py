"""The policy `Acyclic`: stages of very large graphs by multilevel acyclic partitioning."""

from __future__ import annotations

from dataclasses import dataclass

from splitkit.checks import Memory, count, memory_of, settle
from splitkit.costs import Costs, Links
from splitkit.costs.links import as_links
from splitkit.graph.dataflow import Dataflow, enough_nodes
from splitkit.plans.record import Plan
from splitkit.search.request import StageRequest
from splitkit.search.stages.stage_search import StagePlanner
from splitkit.solvers.placement.multilevel.multilevel import multilevel
from splitkit.solvers.placement.stages.contiguous import SECONDS


@dataclass(frozen=True)
class Acyclic:
    """``n`` stages, each a convex set of nodes, for graphs of 10,000 nodes and many more.

    The graph is coarsened without cycles, the coarsest graph is placed, and the stages are refined during uncoarsening
    (Herrmann et al., SIAM J. Sci. Comput. 2019). A stage's load is the work of its nodes and, with ``links``, each
    value that it sends or receives, once; the objective is the greatest load. The plan's claim says how good it is. On
    a small graph, the plan comes from `Stages`, or is better if `Stages` does not find the optimum.

    Attributes:
        n: the number of stages, at most the number of nodes.
        memory: the bytes of each device, for one sample without training: a number or a text (``"80GiB"``) for all
            devices, or a sequence with one for each.
        links: the links between the devices ``0, 1 ...``: `splitkit.costs.Links`, or the name of a preset
            (``"nvlink4"``).
    """

    n: int
    memory: Memory = None
    links: str | Links | None = None

    def __post_init__(self) -> None:
        settle(self, "n", count)
        memory_of(self, self.memory, self.n)
        as_links(self.links)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the stages ``0 .. n - 1``.

        Raises:
            NoPlanError: SK303 if the graph has fewer nodes, or no stages fit the memory; it says what would fit.
        """
        enough_nodes(flow, self.n)
        demand = StageRequest(self, flow, costs, memory=self.memory, links=as_links(self.links), optimizer=None)
        return StagePlanner(demand, tuple(range(self.n)), SECONDS, solver=multilevel).plan()
