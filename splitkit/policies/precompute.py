"""The policy `Precompute`: move shapes, masks and the like from backward to forward if that saves memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from splitkit.costs import Costs, unit
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.policy import Policy, as_plan
from splitkit.plans.record import Plan
from splitkit.policies.save_all import SaveAll
from splitkit.search.recompute.pareto_cuts import CutNetwork, cheapest
from splitkit.training.choices import savings
from splitkit.training.flow import BACKWARD, JointFlow, as_joint, save_all_plan
from splitkit.training.peaks import apply_checkpoints, nodes_with_policy


@dataclass(frozen=True)
class Precompute:
    """Move nodes of backward that do not depend on gradients to forward if that saves memory.

    For example, a mask of a large value is computed in forward and saved in place of the value, if backward needs the
    value for nothing else. The same holds for a value that the base plan recomputes from larger saved values.

    Attributes:
        base: the policy that decides about everything else.
    """

    base: Policy = field(default_factory=SaveAll)

    def __post_init__(self) -> None:
        base: object = self.base
        if not isinstance(base, Policy) or isinstance(base, type):
            remedy = "Give a policy object for a joint graph: Precompute(SaveAll())."
            raise PolicyError("SK302", f"Precompute has base={base!r:.200}, which is not a policy object", remedy)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with parts ``"forward"`` and ``"backward"``; SK302 for a graph that is not a joint graph."""
        joint = as_joint(self, flow)
        return precompute(joint, as_plan(self.base, joint, costs))


def precompute(flow: JointFlow, plan: Plan) -> Plan:
    """Return the plan that saves the fewest bytes without adding a node to this plan's backward.

    It is one minimum cut over the nodes that this plan's backward computes. The result never saves more bytes than the
    plan, and never recomputes more.

    Args:
        flow: facts about the joint graph.
        plan: a plan for it.
    """
    plan = apply_checkpoints(flow, replace(plan, places={**save_all_plan(flow).places, **plan.places}))
    problem, tied = savings(flow, unit(flow)), _tied_to_checkpoints(flow, plan)
    savable = problem.savable & np.array([flow.producer(value) not in tied for value in problem.values], np.bool_)
    has_saved = np.bincount(problem.maker, problem.savable, len(problem.ops)) > 0
    elsewhere = np.array([BACKWARD not in plan[op] for op in problem.ops], np.bool_)
    cutting = CutNetwork.of(
        replace(problem, savable=savable), problem.nbytes.astype(np.float64), problem.fixed | elsewhere & has_saved
    )
    return cheapest(cutting, 0.0, problem.why).plan(plan.note)


def _tied_to_checkpoints(flow: JointFlow, plan: Plan) -> set[Node]:
    """Return the nodes that must be recomputed, and the nodes that only backward computes from them.

    Saving one of the latter would save a recomputed node in disguise.
    """
    tied = {n for n in nodes_with_policy(flow, CheckpointPolicy.MUST_RECOMPUTE) if BACKWARD in plan[n]}
    for node in flow.nodes:
        if plan[node] == (BACKWARD,) and any(read in tied for read in flow.inputs(node)):
            tied.add(node)
    return tied
