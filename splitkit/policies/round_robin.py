"""The policy `RoundRobin`: assign nodes to labels in turn, as a baseline and as a hard test for the engine."""

from __future__ import annotations

from dataclasses import dataclass

from splitkit.checks import count, settle
from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.record import Plan, keep_books
from splitkit.plans.rewrite import refine


@dataclass(frozen=True)
class RoundRobin:
    """Assign nodes to ``n`` labels in turn; a label is visited as often as the graph requires.

    Attributes:
        n: the number of labels.
    """

    n: int

    def __post_init__(self) -> None:
        settle(self, "n", count)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan whose parts are visits ``(label, number)``."""
        dealt = {node: i % self.n for i, node in enumerate(flow.nodes)}
        return keep_books(flow, refine(flow, Plan.of(dealt, note=f"round robin over {self.n} labels")))
