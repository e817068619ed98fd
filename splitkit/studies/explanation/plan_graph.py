"""Finds the graph that a plan is for."""

from __future__ import annotations

from splitkit.errors import PlanError
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.plans.record import Plan, module_of_plan


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
