"""Rewrite plans: functions that take a plan and return another. They never change the graph."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from itertools import count

from torch.fx import Node

from splitkit.errors import PlanError, listed
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.plans.part_order import ParentStep, parent_step_of, part_order, step_needs
from splitkit.plans.parts import PARENT, Part, PartKey
from splitkit.plans.record import Plan, plan_of

Copy = tuple[Node, PartKey]  # a node and one of the parts that compute it


def rematerialize(flow: Dataflow, plan: Plan, into: PartKey, keep: Collection[Node] = ()) -> Plan:
    """Copy the nodes that a part reads into the part, transitively, instead of sending their values.

    This single rewrite covers recompute (``into`` is backward), replication of cheap nodes, and activation
    checkpointing (``keep`` is the border of the segment). It stops at ``keep``, at nodes of the parent, and at nodes
    that may run only once::

        part 0: a -> b -> c ──c──> part 1: d        part 0: a ──a──> part 1: b' -> c' -> d
                                              ==>           └ b -> c    keep = [a]

    Args:
        flow: facts about the graph.
        plan: the plan.
        into: the part that receives the copies.
        keep: nodes that the part still reads from their home.
    """
    flow, plan = facts_of(flow), plan_of(plan)
    _require(plan, into)
    stop = {flow.producer(n) for n in keep}
    places = dict(plan.places)
    stack = [r for n in plan.members(into) for r in flow.inputs(n)]
    while stack:
        node = stack.pop()
        keys = places.get(node, (PARENT,))
        if into in keys or keys == (PARENT,) or node in stop or node in flow.once:
            continue
        places[node] = (*keys, into)
        stack += flow.inputs(node)
    return replace(plan, places=places, claim=None)


def prune(flow: Dataflow, plan: Plan) -> Plan:
    """Drop copies that nothing reads. If the home's copy is among them, the first copy that is read becomes the home.

    A node without side effects that nothing needs is then computed nowhere: its place is ``()``. A part that nothing
    needs thus becomes empty.
    """
    flow, plan = facts_of(flow), plan_of(plan)
    live: set[Copy] = set()
    stack = list(_roots(flow, plan))
    while stack:
        node, key = stack.pop()
        if (node, key) not in live:
            live.add((node, key))
            stack += [(r, plan.source(r, key)) for r in flow.inputs(node)]
    changes = {}
    for node, keys in plan.items():
        kept = tuple(k for k in keys if (node, k) in live)
        if kept != keys:
            changes[node] = kept
    return plan.place(changes)


def _roots(flow: Dataflow, plan: Plan) -> Iterator[Copy]:
    """Yield the copies that must run: effects in their parts, the output, and the nodes of the parent."""
    for node in flow.index:
        if node in flow.once:
            yield from ((node, key) for key in plan.places.get(node, (PARENT,)))
        elif node.op == "output" or (flow.is_placeable(node) and PARENT in plan.places.get(node, (PARENT,))):
            yield node, PARENT


def relay(flow: Dataflow, plan: Plan) -> Plan:
    """Forward values through the parts in between, for runtimes in which a part talks only to its neighbours::

        part 0 ──a──> part 2     ==>     part 0 ──a──> part 1 ──a──> part 2

    Each part then takes and returns every value that is live at its borders. Inputs of the graph enter at the first
    part; the parent passes its parameters to each part directly.

    Raises:
        PlanError: SK209 if the parent computes something between the parts.
    """
    flow, plan = facts_of(flow), plan_of(plan)
    require_parts(flow, plan)
    return replace(plan, routing="relay")


def require_parts(flow: Dataflow, plan: Plan) -> None:
    """Raise SK209 if a plan leaves nodes to the parent: values that it computes between parts cannot be relayed."""
    left = [n for n in flow.nodes if PARENT in plan.places.get(n, (PARENT,))]
    if left:
        raise PlanError(
            "SK209",
            f"the parent computes {listed(left, 1)}, between the parts",
            "Give every node a part, as Stages does.",
            left,
        )


def refine(flow: Dataflow, plan: Plan) -> Plan:
    """Turn any labels into an acyclic plan: part ``label`` is divided into visits ``(label, 0), (label, 3) ...``.

    This is list scheduling: a visit takes every ready node of its label, and every node that becomes ready by that;
    then the label of the earliest ready node gets the next visit. Visits are numbered in this order and depend on
    earlier ones only, so they form no cycle::

        labels  a0 b0 a1 b1, a1 reads b0    ==>    (a,0): a0   (b,1): b0 b1   (a,2): a1

    Plans may have copies; nodes in the parent stay there. The time is O((nodes + edges) log nodes).
    """
    flow, plan = facts_of(flow), plan_of(plan)
    visit: dict[Copy, PartKey] = {}
    for number, copy in _schedule(flow, plan):
        visit[copy] = PARENT if copy[1] is PARENT else (copy[1], number)
    placed = (n for n in flow.nodes if n in plan)
    places = {node: tuple(visit[node, key] for key in plan[node]) for node in placed}
    order = sorted({k for keys in places.values() for k in keys if k is not PARENT}, key=_visit_number)
    parts = {key: replace(plan.parts[key[0]], key=key) for key in order}  # type: ignore[index]
    return replace(plan, places=places, parts=parts, claim=None)


def _visit_number(key: Hashable) -> int:
    assert isinstance(key, tuple)
    return int(key[1])


def _schedule(flow: Dataflow, plan: Plan) -> Iterator[tuple[int, Copy]]:
    """Yield every copy with the number of its visit, in an order that respects data and effects."""
    waits, users = _dependences(flow, plan)
    ready: dict[PartKey, list[tuple[int, Node]]] = {}
    upcoming: list[
        tuple[bool, int, int, PartKey]
    ] = []  # one entry per ready copy: the parent's first, then by graph order
    number, pushed = -1, count()

    def push(node: Node, key: PartKey) -> None:
        heapq.heappush(ready.setdefault(key, []), (flow.index[node], node))
        heapq.heappush(upcoming, (key is not PARENT, flow.index[node], next(pushed), key))

    for (node, key), left in waits.items():
        if not left:
            push(node, key)
    while upcoming:
        label = heapq.heappop(upcoming)[-1]
        if not ready[label]:  # a visit that an earlier copy began has taken this one too
            continue
        number += label is not PARENT
        while ready[label]:
            _, node = heapq.heappop(ready[label])
            yield number, (node, label)
            for user in users.get((node, label), ()):
                waits[user] -= 1
                if not waits[user]:
                    push(*user)


def _require(plan: Plan, key: PartKey) -> None:
    if key not in plan.parts:
        raise PlanError("SK206", f"the plan has no part {key!r}", f"Its parts are {list(plan.parts)}.")


def _dependences(flow: Dataflow, plan: Plan) -> tuple[dict[Copy, int], dict[Copy, list[Copy]]]:
    """Return how many copies each copy waits for, and which copies wait for it."""
    waits: dict[Copy, int] = {}
    users: dict[Copy, list[Copy]] = {}
    for node in flow.nodes:
        for key in plan.places.get(node, (PARENT,)):
            # Also wait for the home's copy: a later visit of this label has no copy of its own and reads that one.
            before = {
                (d, k) for d in flow.inputs(node) for k in (plan.source(d, key), plan.home(d)) if plan.get(d) != ()
            }
            for d in flow.after[node]:  # an effect waits for every copy of the nodes before it
                before |= {(d, k) for k in plan.places.get(d, (PARENT,))}
            waits[node, key] = len(before)
            for copy in before:
                users.setdefault(copy, []).append((node, key))
    return waits, users


def condense(flow: Dataflow, plan: Plan) -> Plan:
    """Join parts that depend on each other in a cycle into the first of them, with the parent's nodes on the cycle.

    These are the strongly connected components of the graph of parts (Tarjan 1972), so no smaller joins would do.
    """
    from networkx import DiGraph, strongly_connected_components

    flow, plan = facts_of(flow), plan_of(plan)
    graph = DiGraph((before, step) for step, needs in step_needs(flow, plan).items() for before in needs)
    position = {key: i for i, key in enumerate(plan.parts)}
    joined: dict[ParentStep, PartKey] = {}
    for cycle in strongly_connected_components(graph):
        if len(cycle) > 1:
            first = min((key for key, node in cycle if node is None), key=position.__getitem__)
            joined |= dict.fromkeys(cycle, first)
    places = {
        node: tuple(
            dict.fromkeys(joined.get(parent_step_of(node, key), key) for key in plan.places.get(node, (PARENT,)))
        )
        for node in flow.nodes
    }
    used = {key for keys in places.values() for key in keys}
    return replace(plan, places=places, parts={key: part for key, part in plan.parts.items() if key in used})


def merge(flow: Dataflow, plan: Plan, into: PartKey, other: PartKey) -> Plan:
    """Join part ``other`` into part ``into``.

    Raises:
        CycleError: SK203 if the joined part would depend on itself through a third one.
        PlanError: SK206 if a part does not exist.
    """
    flow, plan = facts_of(flow), plan_of(plan)
    _require(plan, into)
    _require(plan, other)
    if into == other:
        return plan
    moved = {
        node: tuple(dict.fromkeys(into if k == other else k for k in keys))
        for node, keys in plan.items()
        if other in keys
    }
    parts: dict[PartKey, Part] = {k: p for k, p in plan.parts.items() if k != other}
    joined = replace(plan, places={**plan.places, **moved}, parts=parts, claim=None)
    part_order(flow, joined)
    return joined
