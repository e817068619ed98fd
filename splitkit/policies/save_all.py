"""The policy `SaveAll`: forward and backward as in eager autograd."""

from __future__ import annotations

from dataclasses import dataclass

from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.record import Plan
from splitkit.training.flow import as_joint
from splitkit.training.peaks import eager_plan


@dataclass(frozen=True)
class SaveAll:
    """Save every value of forward that backward reads, and recompute nothing.

    As in eager mode, code inside ``torch.utils.checkpoint`` is still recomputed.
    """

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with parts ``"forward"`` and ``"backward"``; SK302 for a graph that is not a joint graph."""
        return eager_plan(as_joint(self, flow))
