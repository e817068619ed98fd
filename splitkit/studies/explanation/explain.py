"""Explains a plan, one of its parts, or one of its nodes."""

from __future__ import annotations

from typing import Any, cast

from torch.fx import Node

from splitkit.costs import Costs
from splitkit.errors import PlanError, PolicyError, SplitError, nearest
from splitkit.frontends.aot import joint_flow
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.joint_marks import forward_outputs, is_joint
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.pipeline.purpose import request_of
from splitkit.plans.parts import PartKey
from splitkit.plans.policy import Policy
from splitkit.plans.record import Plan, plan_of
from splitkit.policies import Stages
from splitkit.prices import require_costs
from splitkit.search.plan_figures import StagePricing
from splitkit.studies.explanation.node_explanation import explain_node
from splitkit.studies.explanation.paired_parts import paired
from splitkit.studies.explanation.part_explanation import explain_part
from splitkit.studies.explanation.plan_graph import graph_of_plan
from splitkit.studies.explanation.recompute_explanation import explain_recompute
from splitkit.studies.explanation.recorded_policy import recorded_policy
from splitkit.studies.explanation.stage_explanation import explain_stages, moves_of
from splitkit.studies.explanation.told import Told
from splitkit.studies.explanation.value_explanation import explain_value
from splitkit.training.flow import JointFlow
from splitkit.units import duration, size
from splitkit.view.data.report import part_title

_MOST_STAGES = 64
"""A plan of more devices is not compared with `Stages`."""


def explain(
    plan: Plan,
    where: Node | PartKey = None,
    *,
    policy: Policy | None = None,
    costs: Costs | None = None,
    again: bool = True,
) -> Told:
    """Explain why a plan is as it is: what limits it, how far it may be from the best, and what a change would bring.

    Every number is computed as `splitkit.plan` and `splitkit.report` compute it. The explanation prints as text, has
    `to_dict`, and is shown as HTML in a notebook.

    Args:
        plan: a plan, or an object that has one, such as a split.
        where: a node or its name, or a part or its name, to explain instead of the whole plan.
        policy: the policy whose limits hold (memory, schedule, links); by default the one that the plan has recorded.
        costs: the prices; by default those that the plan was made with.
        again: whether to plan again with one more device, one fewer and more memory, which takes as long as planning.

    Raises:
        PlanError: SK314 if the plan has no such part or node, or places no node at all.
        PolicyError: SK301 if ``plan`` is not a plan, or ``policy`` is not a policy.
        CycleError: SK203 if parts wait for each other in a cycle.
    """
    plan = plan_of(plan)
    flow = graph_of_plan(plan)
    if policy is not None and not isinstance(policy, Policy):
        raise PolicyError(
            "SK301", f"{policy!r:.200} is not a policy", "Pass a policy such as Stages(4, memory='80GiB')."
        )
    costs = costs_of_plan(plan, flow) if costs is None else require_costs(costs)
    request = plan.request if policy is None else request_of(policy, costs)
    policy = recorded_policy(plan) if policy is None else policy
    if is_joint(flow.graph):
        joint = joint_flow(flow.root, forward_outputs(flow.graph))
        return _of_step(joint, plan, where, policy, costs, again)
    pricing = StagePricing.of(flow, plan, costs, policy, request)
    if where is None:
        other = _beside_stages(pricing, plan, costs) if again and not _is_optimised(plan) else ""
        return explain_stages(pricing, plan, policy, costs, again=again, other=other)
    figures = pricing.figures(plan)
    moves = moves_of(pricing, plan, figures)
    found = _found(flow, plan, where)
    if isinstance(found, Node):
        return explain_node(pricing, moves, found)
    part = explain_part(pricing, moves, plan, figures, found, costs)
    if part is None:
        raise _nothing(flow, plan, where)
    return part


def _is_optimised(plan: Plan) -> bool:
    return plan.claim is not None


def _beside_stages(pricing: StagePricing, plan: Plan, costs: Costs) -> str:
    """Return how a plan that was not optimised differs from `Stages` of as many devices."""
    flow, count = pricing.flow, len(pricing.devices_of(plan))
    if not 1 < count <= _MOST_STAGES or any(part.replicas > 1 for part in plan.parts.values()):
        return ""
    try:
        stages = Stages(count, links=pricing.request.links, optimizer=pricing.request.optimizer)
        found = stages.assign(flow, costs)
    except SplitError as error:
        return f"Stages({count}) finds no plan for this graph: {error.reason}."
    own, theirs = pricing.figures(plan), pricing.figures(found)
    unit = pricing.unit
    moved = _moved(pricing, plan, found)
    return (
        f"Stages({count}) would have its slowest stage at {duration(theirs.value, unit)} instead of "
        f"{duration(own.value, unit)}, and {size(theirs.traffic)} would cross instead of {size(own.traffic)}; "
        f"{moved} of {len(flow.nodes)} nodes would be on other devices."
    )


def _moved(pricing: StagePricing, plan: Plan, found: Plan) -> int:
    """Return how many nodes are on other devices, with the devices paired so that these are few."""
    homes = [(pricing.device_of(plan.home(node)), found.home(node)) for node in pricing.flow.nodes]
    ours, theirs = (list(dict.fromkeys(pair[i] for pair in homes)) for i in (0, 1))
    pairs = paired(homes, ours, theirs)
    return sum(there not in pairs or pairs[there] != here for here, there in homes)


def _of_step(flow: JointFlow, plan: Plan, where: Any, policy: object, costs: Costs, again: bool) -> Told:
    """Explain a plan of forward and backward, or one of its nodes."""
    if where is None:
        return explain_recompute(flow, plan, policy, costs, again=again)
    found = _found(flow, plan, where)
    if isinstance(found, Node):
        return explain_value(flow, plan, policy, costs, found)
    if found in map(part_title, plan.parts):
        remedy = "Ask about the whole plan, or about a node: a training step is explained by its values."
        raise PlanError("SK315", f"{found} is a part of a training step, which is not explained by parts", remedy)
    raise _nothing(flow, plan, where)


def _found(flow: Dataflow, plan: Plan, where: Any) -> Node | str:
    """Return the node, or the name of the part, that a question is about."""
    if isinstance(where, Node):
        if where not in flow.index:
            raise _nothing(flow, plan, where)
        return where
    titles = {part_title(key): key for key in plan.parts}
    try:
        if where in plan.parts:
            return part_title(where)
    except TypeError as error:
        raise _nothing(flow, plan, where) from error
    if isinstance(where, str) and where not in titles:
        for node in flow.graph.nodes:
            if node.name == where:
                return cast(Node, node)
    return str(where)


def _nothing(flow: Dataflow, plan: Plan, where: object) -> PlanError:
    names = [*(part_title(key) for key in plan.parts), *(node.name for node in flow.graph.nodes)]
    parts = ", ".join(part_title(key) for key in list(plan.parts)[:8])
    remedy = nearest(
        str(where), names, f"Its parts are {parts}; nodes have the names of [n.name for n in gm.graph.nodes]."
    )
    return PlanError("SK314", f"the plan has no part and no node {str(where)!r:.100}", remedy)
