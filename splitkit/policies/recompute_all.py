"""Recompute all of forward in backward."""

from __future__ import annotations

from dataclasses import dataclass

from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.record import Plan
from splitkit.training.flow import as_joint, homes, recompute


@dataclass(frozen=True)
class RecomputeAll:
    """Save inputs only, and what may not be computed twice: random numbers, effects, sizes, readers of updated inputs.

    The fewest bytes between forward and backward; the peak in backward may well be higher than that of `SaveAll`.
    """

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Parts are ``"forward"`` and ``"backward"``; SK302 for a graph that is no joint graph."""
        joint = as_joint(self, flow)
        return recompute(joint, homes(joint), ())
