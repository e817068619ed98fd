"""Explains a plan, one of its parts, or one of its nodes."""

from __future__ import annotations

from torch import fx
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.costs.recorded import costs_of
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import analyze
from splitkit.plans.parts import PartKey
from splitkit.plans.policy import Policy
from splitkit.plans.record import Plan, plan_of
from splitkit.studies.explanation.recorded_policy import policy_of
from splitkit.studies.explanation.stage_explanation import explain_stages
from splitkit.studies.explanation.stage_figures import StagePricing
from splitkit.studies.explanation.told import Told


def explain(
    plan: Plan,
    where: Node | PartKey = None,
    *,
    policy: Policy | None = None,
    costs: Costs | None = None,
    again: bool = True,
) -> Told:
    plan = plan_of(plan)
    root = next(iter(plan.places)).graph.owning_module
    flow = analyze(root)
    costs = costs_of(plan.prices, flow) if costs is None else costs
    policy = policy_of(plan) if policy is None else policy
    pricing = StagePricing.of(flow, plan, costs, policy)
    return explain_stages(pricing, plan, policy, costs, again=again)
