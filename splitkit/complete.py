"""From a policy's plan to a place for every node, and the rules that a plan must keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch.fx import Node

from splitkit.dataflow import Dataflow
from splitkit.effects import attribute
from splitkit.errors import PlanError
from splitkit.plan import HOST, PartKey, Plan


def complete(flow: Dataflow, plan: Plan, parameters: Literal["own", "hoist"] = "own") -> Plan:
    """Give every node a place.

    Inputs and the output go to the host, members of a tuple to its producer, attributes to each of their readers
    (with ``parameters="hoist"``, tensors stay in the host and are passed in), and what the plan leaves out stays in
    the host. State ops have no place: they become scopes.

    Raises:
        PlanError: SK201 for nodes of another graph.
    """
    foreign = [n for n in plan if n not in flow.index]
    if foreign:
        raise PlanError(
            "SK201",
            f"the plan places {foreign[0]}, which is no node of this graph",
            "Plan again after editing the graph, or load the plan with Plan.load(path, gm.graph).",
            foreign,
        )
    places: dict[Node, tuple[PartKey, ...]] = {}
    for node in flow.scope:
        if node.op != "get_attr":
            producer = flow.producer(node)
            places[node] = plan.places.get(producer, (HOST,)) if flow.is_placeable(producer) else (HOST,)
    for node in flow.scope:
        if node.op == "get_attr":
            hoisted = parameters == "hoist" and isinstance(attribute(flow.root, str(node.target)), torch.Tensor)
            readers = dict.fromkeys(key for user in node.users for key in places.get(user, ()))
            places[node] = (HOST,) if hoisted else tuple(readers)
    ordered = {node: places[node] for node in flow.scope if places[node]}
    return replace(plan, places=ordered)


def check(flow: Dataflow, plan: Plan) -> None:
    """Refuse a plan that cannot be right.

    Raises:
        PlanError: SK202 for copies of nodes that may run only once, SK207 for effects inside a checkpointed part.
            Circles are found by `splitkit.order.part_order` (SK203).
    """
    for node, reason in flow.once.items():
        keys = plan.places.get(node, ())
        if len(keys) > 1:
            raise PlanError(
                "SK202",
                f"{node.name} is planned in {list(keys)}, but {reason}",
                "Give it one part. splitkit.rematerialize never copies such nodes.",
                [node],
            )
    if any(part.call == "checkpoint" for part in plan.parts.values()):
        _check_checkpoints(flow, plan)


def _check_checkpoints(flow: Dataflow, plan: Plan) -> None:
    """``torch.utils.checkpoint`` replays random numbers and asserts; it cannot undo a write, a print, or a later write
    to what the part read."""
    for node in _fixed_in_time(flow):
        for key in plan.places.get(node, ()):
            if key is not HOST and plan.parts[key].call == "checkpoint":
                raise PlanError(
                    "SK207",
                    f"part {key!r} is checkpointed and would run {node.name} again in backward, "
                    f"but {flow.once.get(node, 'what it reads is written by another node')}",
                    "Move the node to another part, or call that part plainly.",
                    [node],
                )


def _fixed_in_time(flow: Dataflow) -> dict[Node, None]:
    """Nodes that may not run again later: writers, impure nodes, and readers of what is written."""
    writers = {n: None for n, e in flow.effects.items() if e.writes or e.writes_state or not e.known}
    early = (n for w in writers for n in flow.after.get(w, ()))
    late = (n for n, before in flow.after.items() if any(b in writers for b in before))
    impure = (n for n, e in flow.effects.items() if e.impure)
    return dict.fromkeys([*writers, *early, *late, *impure])
