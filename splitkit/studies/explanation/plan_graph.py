"""Finds the graph that a plan is for."""

from __future__ import annotations

from typing import Any

from torch import fx

from splitkit.errors import PlanError
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.plans.record import Plan


def graph_of_plan(plan: Plan) -> Dataflow:
    """Return the facts of the graph that a plan is for.

    Raises:
        PlanError: SK314 if it places no node, or its graph has no module any more.
    """
    root: Any = next(iter(plan.places)).graph.owning_module if plan.places else None
    if not isinstance(root, fx.GraphModule):
        remedy = "Make a plan with splitkit.plan(gm, policy), and keep gm."
        raise PlanError("SK314", "the plan places no node of a graph module that still exists", remedy)
    return analyze(root)
