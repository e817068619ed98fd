"""The policy `RecomputeAll`: recompute all of forward in backward."""

from __future__ import annotations

from dataclasses import dataclass

from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.record import Plan
from splitkit.training.flow import as_joint, recompute, save_all_plan


@dataclass(frozen=True)
class RecomputeAll:
    """Save only inputs and values that may not be computed twice (random numbers, effects, sizes, reads of updated
    inputs).

    The plan saves the fewest bytes between forward and backward, but its peak may be higher than with `SaveAll`.
    """

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with parts ``"forward"`` and ``"backward"``; SK302 for a graph that is not a joint graph."""
        joint = as_joint(self, flow)
        return recompute(joint, save_all_plan(joint), ())
