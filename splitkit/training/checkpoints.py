"""Apply the tags that ``torch.utils.checkpoint`` leaves on the nodes of a joint graph to any policy's plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, save_all_plan, unrepeatable, with_inputs

_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def checkpoint_policies(flow: JointFlow) -> Mapping[Node, CheckpointPolicy]:
    """Return forward's node -> the policy of its checkpoint, from `meta["recompute"]`.

    A value at the border of two checkpoints, or with a hook on its gradient, is saved (``MUST_SAVE``), for it is an
    input of the second checkpoint. A tuple is one value: it is saved if one of its members must be.
    """
    found: dict[Node, CheckpointPolicy] = {}
    home = save_all_plan(flow)
    for node in flow.scope:
        producer = flow.producer(node)
        if home.get(producer) != (FORWARD,) or (policy := _policy_of(node)) is None:
            continue
        if policy is CheckpointPolicy.MUST_SAVE or found.get(producer) is None:
            found[producer] = policy
    return found


def _policy_of(node: Node) -> CheckpointPolicy | None:
    policy: CheckpointPolicy | None = node.meta.get("recompute")
    if policy in _RECOMPUTE and (_ends_region(node) or _has_hook(node)):
        return CheckpointPolicy.MUST_SAVE
    return policy


def _ends_region(node: Node) -> bool:
    number = node.meta.get("ac_graph_id")
    others = (u.meta.get("ac_graph_id") for u in node.users if u.meta.get("recompute") in _RECOMPUTE)
    return number is not None and any(other is not None and other > number for other in others)


def _has_hook(node: Node) -> bool:
    """Return whether a checkpoint's result has a gradient hook, which may need the value before it is recomputed."""
    inside = any(u.meta.get("recompute") in _RECOMPUTE for u in node.users)
    return bool(node.meta.get("has_backward_hook")) and not inside


def nodes_with_policy(flow: JointFlow, *wanted: CheckpointPolicy) -> list[Node]:
    """Return the nodes of forward whose checkpoint has one of these policies."""
    return [node for node, policy in checkpoint_policies(flow).items() if policy in wanted]


def apply_checkpoints(flow: JointFlow, plan: Plan) -> Plan:
    """Return the plan with ``MUST_SAVE`` nodes saved, and ``MUST_RECOMPUTE`` nodes recomputed if backward needs them.

    Nodes that may not run twice are saved in any case: a random op that runs again would draw other numbers.
    """
    plan = recompute_in_backward(flow, plan, nodes_with_policy(flow, CheckpointPolicy.MUST_RECOMPUTE))
    keep = {n: (FORWARD,) for n in nodes_with_policy(flow, CheckpointPolicy.MUST_SAVE) if BACKWARD in plan.get(n, ())}
    return prune(flow, with_inputs(flow, plan.place(keep), keep)) if keep else plan


def recompute_in_backward(flow: JointFlow, plan: Plan, nodes: Iterable[Node]) -> Plan:
    """Return the plan in which backward recomputes these nodes where it needs them and they may run twice."""
    fixed = unrepeatable(flow)
    copies = {n: (FORWARD, BACKWARD) for n in nodes if n not in fixed and plan.get(n, (FORWARD,)) == (FORWARD,)}
    return prune(flow, plan.place(copies)) if copies else plan


def eager_plan(flow: JointFlow) -> Plan:
    """Return the plan of eager mode: save forward's values, and recompute those inside checkpoints."""
    return recompute_in_backward(flow, save_all_plan(flow), nodes_with_policy(flow, CheckpointPolicy.PREFER_RECOMPUTE))
