"""What ``torch.utils.checkpoint`` wrote on the nodes of a joint graph, honoured in any policy's plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, homes, unrepeatable, with_inputs

_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def wishes(flow: JointFlow) -> Mapping[Node, CheckpointPolicy]:
    """Forward's nodes -> what their checkpoint wants, as `meta["recompute"]` says.

    A value at the border of two checkpoints, or with a hook on its gradient, is saved (``MUST_SAVE``): it is an input
    of the second one. A tuple is one value: it is saved if one of its members must be.
    """
    found: dict[Node, CheckpointPolicy] = {}
    home = homes(flow)
    for node in flow.scope:
        producer = flow.producer(node)
        if home.get(producer) != (FORWARD,) or (wish := _wish(node)) is None:
            continue
        if wish is CheckpointPolicy.MUST_SAVE or found.get(producer) is None:
            found[producer] = wish
    return found


def _wish(node: Node) -> CheckpointPolicy | None:
    wish: CheckpointPolicy | None = node.meta.get("recompute")
    if wish in _RECOMPUTE and (_ends_region(node) or _has_hook(node)):
        return CheckpointPolicy.MUST_SAVE
    return wish


def _ends_region(node: Node) -> bool:
    number = node.meta.get("ac_graph_id")
    others = (u.meta.get("ac_graph_id") for u in node.users if u.meta.get("recompute") in _RECOMPUTE)
    return number is not None and any(other is not None and other > number for other in others)


def _has_hook(node: Node) -> bool:
    """A hook on the gradient of what a checkpoint gives may need the value itself, before it is recomputed."""
    inside = any(u.meta.get("recompute") in _RECOMPUTE for u in node.users)
    return bool(node.meta.get("has_backward_hook")) and not inside


def asked(flow: JointFlow, *wanted: CheckpointPolicy) -> list[Node]:
    """The nodes of forward whose checkpoint wants one of these."""
    return [node for node, wish in wishes(flow).items() if wish in wanted]


def honour(flow: JointFlow, plan: Plan) -> Plan:
    """The plan in which what must be saved has no copy, and what must be recomputed is, if backward needs it.

    What may not be repeated is saved all the same: a random op that is run again would draw other numbers.
    """
    plan = recomputed(flow, plan, asked(flow, CheckpointPolicy.MUST_RECOMPUTE))
    keep = {n: (FORWARD,) for n in asked(flow, CheckpointPolicy.MUST_SAVE) if BACKWARD in plan.get(n, ())}
    return prune(flow, with_inputs(flow, plan.place(keep), keep)) if keep else plan


def recomputed(flow: JointFlow, plan: Plan, nodes: Iterable[Node]) -> Plan:
    """The plan in which backward computes these nodes itself, where it needs them and they may be repeated."""
    fixed = unrepeatable(flow)
    copies = {n: (FORWARD, BACKWARD) for n in nodes if n not in fixed and plan.get(n, (FORWARD,)) == (FORWARD,)}
    return prune(flow, plan.place(copies)) if copies else plan


def as_eager(flow: JointFlow) -> Plan:
    """Eager mode's plan: forward's values are saved but for those that a checkpoint is wrapped around."""
    return recomputed(flow, homes(flow), asked(flow, CheckpointPolicy.PREFER_RECOMPUTE))
