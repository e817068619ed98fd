"""Puts counters and running ranges into the part of their module, where a policy has put them into another."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from splitkit.graph.bookkeeping import bookkeeping
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan


def keep_books(flow: Dataflow, plan: Plan) -> Plan:
    """Return the plan with what only keeps a module's books in the part of its module, and without parts left empty.

    A border of a policy that follows the order of the graph may fall between the two. If nothing moves, the plan itself
    is returned.
    """
    changes: dict[Node, tuple[PartKey, ...]] = {}
    for owner, *books in flow.fact(bookkeeping):
        home = plan.places.get(owner, ())
        made = {plan.places.get(first) for node in books for first in flow.waits[node] if first not in books}
        # what they compute from is there, and nothing reads them: no cycle of parts can close
        if len(home) == 1 and made <= {home} and all(len(plan.places.get(node, ())) == 1 for node in books):
            changes |= {node: home for node in books if plan.places[node] != home}
    if not changes:
        return plan
    placed = plan.place(changes)
    used = {key for keys in placed.places.values() for key in keys}
    return replace(placed, parts={key: part for key, part in placed.parts.items() if key in used})
