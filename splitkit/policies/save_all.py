"""Forward and backward as eager autograd has them."""

from __future__ import annotations

from dataclasses import dataclass

from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.record import Plan
from splitkit.training.checkpoints import as_eager
from splitkit.training.flow import as_joint


@dataclass(frozen=True)
class SaveAll:
    """Save every value of forward that backward reads, and compute nothing twice.

    As in eager mode, what ``torch.utils.checkpoint`` is wrapped around is recomputed.
    """

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Parts are ``"forward"`` and ``"backward"``; SK302 for a graph that is no joint graph."""
        return as_eager(as_joint(self, flow))
