"""Finds the graph that a plan is for, and makes its policy again: a policy of splitkit with literals, never code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from splitkit import policies
from splitkit.costs import Device, Link, Links
from splitkit.errors import PlanError, SplitError
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.plans.policy import Policy
from splitkit.plans.record import Plan, module_of_plan

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
