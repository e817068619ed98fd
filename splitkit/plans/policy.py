"""Policies, which decide which part computes which node, and the other objects that users may pass instead of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from splitkit.checks import shown
from splitkit.errors import PlanError, PolicyError, near
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.prices import Costs, require_costs


@runtime_checkable
class Policy(Protocol):
    """An object that decides which part computes which node; usually a frozen dataclass of its parameters."""

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return the plan for a graph."""
        ...


PolicyLike = Policy | Plan | Mapping[Any, Any] | Callable[[Node], PartKey]


def as_plan(policy: PolicyLike, flow: Dataflow, costs: Costs) -> Plan:
    """Return the plan that a policy makes, or that an object in its place describes.

    Args:
        policy: a `Policy`, a `Plan`, a mapping from nodes or node names to parts (nodes that it leaves out stay in the
            parent), or a callable ``node -> part``. The callable is called exactly once, in graph order, for every node
            except inputs, attributes and the output; its answers for state ops and tuple members are ignored.
        flow: facts about the graph.
        costs: prices for the policy.

    Raises:
        PolicyError: SK301 if ``policy`` is none of these, or does not return a plan.
        PlanError: SK204 if it names nodes of another graph, SK206 if a label cannot name a part.
    """
    require_policy(policy)
    if isinstance(policy, Plan):
        return policy
    if isinstance(policy, Mapping):
        return _from_mapping(policy, flow)
    if isinstance(policy, Policy):
        made: object = policy.assign(flow, require_costs(costs))
        if not isinstance(made, Plan):
            raise PolicyError(
                "SK301",
                f"the policy {policy!r} returned {made!r:.200}, which is not a plan",
                "Return splitkit.Plan.of({node: part}).",
            )
        return made
    fixed = ("placeholder", "get_attr", "output")
    answers = {n: policy(n) for n in flow.index if n.op not in fixed}
    return Plan.of({n: answers[n] for n in flow.nodes}, note="a callback")


def require_policy(policy: object) -> None:
    """Raise SK301 for what is neither a policy nor another object that `as_plan` takes."""
    known = isinstance(policy, Plan | Mapping | Policy) or callable(policy)
    # what runs a model expects tensors, not nodes
    runs_a_model = isinstance(policy, nn.Module | ExportedProgram) or isinstance(getattr(policy, "plan", None), Plan)
    if known and not isinstance(policy, type) and (isinstance(policy, Plan | Mapping | Policy) or not runs_a_model):
        return
    held = ", but its plan is one" if isinstance(getattr(policy, "plan", None), Plan) else ""
    raise PolicyError(
        "SK301",
        f"{shown(policy)} is not a policy{held}",
        "Pass a policy such as splitkit.policies.Stages(4), a Plan, a mapping of node names to parts, "
        "or a function from a node to its part.",
    )


def _from_mapping(labels: Mapping[Any, Any], flow: Dataflow) -> Plan:
    by_name = {n.name: n for n in flow.index}
    found: dict[Node, Any] = {}
    for item, label in labels.items():
        node = item if isinstance(item, Node) else by_name.get(item)
        if node is None or node not in flow.index:
            raise PlanError(
                "SK204",
                f"the mapping names {str(item)!r}, which is not a node of the graph{_nearest(str(item), by_name)}",
                "Use nodes, or the names in [n.name for n in gm.graph.nodes], as keys.",
                [item],
            )
        found[node] = label
    return Plan.of({n: found[n] for n in flow.nodes if n in found}, note="a mapping")


def _nearest(name: str, names: Mapping[str, Node]) -> str:
    found = near(name, names)
    return f" (did you mean {found[0]!r}?)" if found else ""
