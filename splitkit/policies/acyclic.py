"""Stages of graphs that are too large to be searched whole: multilevel acyclic partitioning."""

from __future__ import annotations

from dataclasses import dataclass

from splitkit.checks import Memory, count, memory_of, settle
from splitkit.costs import Costs, Links
from splitkit.costs.links import links_of
from splitkit.graph.dataflow import Dataflow, enough_nodes
from splitkit.plans.record import Plan
from splitkit.search.demand import Demand
from splitkit.search.stages import Staging
from splitkit.solvers.placement.multilevel.multilevel import multilevel
from splitkit.solvers.placement.stages.contiguous import SECONDS


@dataclass(frozen=True)
class Acyclic:
    """``n`` stages, each a convex set of nodes, for graphs of 10,000 nodes and many more.

    The graph is made coarser and coarser without cycles, the coarsest placed, and the stages refined on the way back
    (Herrmann et al., SIAM J. Sci. Comput. 2019). A stage's load is the work of its nodes and, with ``links``, each
    value that it sends or receives, once; the greatest load is made small. The plan's claim says how good it is. On a
    small graph it does what `Stages` does, or better where that finds no optimum.

    Attributes:
        n: how many stages, at most the number of nodes.
        memory: bytes of each stage's device for one sample without training, as a number or a text (``"80GiB"``), one
            for all or one each.
        links: between the devices ``0, 1 ...``: `splitkit.costs.Links`, or the name of a preset (``"nvlink4"``).
    """

    n: int
    memory: Memory = None
    links: str | Links | None = None

    def __post_init__(self) -> None:
        settle(self, "n", count)
        memory_of(self, self.memory, self.n)
        links_of(self.links)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Stages are ``0 .. n - 1``.

        Raises:
            NoPlanError: SK303 when the graph has fewer nodes, or no stages fit the memory; says what would fit.
        """
        enough_nodes(flow, self.n)
        demand = Demand(self, flow, costs, memory=self.memory, links=links_of(self.links), optimizer=None)
        return Staging(demand, tuple(range(self.n)), SECONDS, solver=multilevel).plan()
