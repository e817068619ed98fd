"""Explains a plan, or the place of one of its nodes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Node

from splitkit import policies
from splitkit.costs import Costs, Device, Link, Links
from splitkit.errors import PlanError, PolicyError, SplitError, nearest
from splitkit.frontends.aot import joint_flow
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.graph.joint_marks import forward_outputs, is_joint
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.pipeline.purpose import request_of
from splitkit.plans.policy import Policy
from splitkit.plans.record import Plan, module_of_plan, plan_of
from splitkit.prices import require_costs
from splitkit.search.plan_figures import StagePricing
from splitkit.studies.explanation.recompute_explanation import explain_recompute, explain_value
from splitkit.studies.explanation.stage_explanation import explain_node, explain_stages
from splitkit.studies.explanation.told import Explanation


def explain(
    plan: Plan,
    where: Node | str | None = None,
    *,
    policy: Policy | None = None,
    costs: Costs | None = None,
    again: bool = True,
) -> Explanation:
    """Explain why a plan is as it is: what limits it, how far it may be from the best, and what a change would bring.

    Every number is computed as `splitkit.plan` and `splitkit.report` compute it. The explanation prints as text, has
    `to_dict`, and is shown as HTML in a notebook.

    Args:
        plan: a plan, or an object that has one, such as a split.
        where: a node or its name, to explain instead of the whole plan.
        policy: the policy whose limits hold (memory, schedule, links); by default the one that the plan has recorded.
        costs: the prices; by default those that the plan was made with.
        again: whether to plan again with one more device, one fewer and more memory, which takes as long as planning.

    Raises:
        PlanError: SK314 if the graph has no such node, or the plan places no node at all.
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
    node = None if where is None else _node(flow, where)
    if is_joint(flow.graph):
        joint = joint_flow(flow.root, forward_outputs(flow.graph))
        if node is None:
            return explain_recompute(joint, plan, policy, costs, again=again)
        return explain_value(joint, plan, policy, costs, node)
    pricing = StagePricing.of(flow, plan, costs, policy, request)
    if node is None:
        return explain_stages(pricing, plan, policy, costs, again=again)
    return explain_node(pricing, plan, node)


def _node(flow: Dataflow, where: Node | str) -> Node:
    """Return the node that a question is about."""
    nodes = list[Node](flow.graph.nodes)
    if found := [node for node in nodes if where is node or where == node.name]:
        return found[0]
    names = [node.name for node in nodes]
    remedy = nearest(str(where), names, "Nodes have the names of [n.name for n in gm.graph.nodes].")
    raise PlanError("SK314", f"the plan has no node {str(where)!r:.100}", remedy)


# Finds the graph that a plan is for, and makes its policy again: a policy of splitkit with literals, never code.


_MADE: Mapping[str, Callable[..., Any]] = {name: getattr(policies, name) for name in policies.__all__} | {
    made.__name__: made for made in (Device, Link, Links)
}
"""What may be called in the expression of a policy."""


def graph_of_plan(plan: Plan) -> Dataflow:
    """Return the facts of the graph that a plan is for.

    Raises:
        PlanError: SK314 if it places no node, or its graph has no module any more.
    """
    root = module_of_plan(plan)
    if root is None:
        remedy = "Make a plan with splitkit.plan(gm, policy), and keep gm."
        raise PlanError("SK314", "the plan places no node of a graph module that still exists", remedy)
    return analyze(root)


def recorded_policy(plan: Plan) -> Policy | None:
    """Return the policy that made a plan; ``None`` if the plan does not say, or names a policy of another package."""
    try:
        call = ast.parse(plan.policy.strip(), mode="eval").body
        made: Any = _made(call)
    except (SyntaxError, ValueError, TypeError, LookupError, SplitError, RecursionError, MemoryError):
        return None
    return made if isinstance(made, Policy) else None


def _made(node: ast.expr) -> Any:
    """Return the value of a literal or of the call of a policy."""
    if isinstance(node, ast.Name):  # Random is Random()
        node = ast.Call(node, [], [])
    if isinstance(node, ast.List | ast.Tuple):
        items = map(_made, node.elts)
        return list(items) if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict):
        return {_made(key): _made(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    if not isinstance(node.func, ast.Name):
        raise ValueError("no policy of splitkit")
    words = {word.arg: _made(word.value) for word in node.keywords if word.arg is not None}
    return _MADE[node.func.id](*map(_made, node.args), **words)
