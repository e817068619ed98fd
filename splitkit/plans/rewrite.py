"""Rewrites: functions that take a plan and return a plan. They never touch the graph."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterator
from dataclasses import replace
from itertools import count

from torch.fx import Node

from splitkit.errors import PlanError, listed
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.plans.order import Unit, part_order, unit_needs, unit_of
from splitkit.plans.parts import HOST, Part, PartKey
from splitkit.plans.record import Plan, plan_of

Copy = tuple[Node, PartKey]  # a node as one part computes it


def rematerialize(flow: Dataflow, plan: Plan, into: PartKey, keep: Collection[Node] = ()) -> Plan:
    """Copy into a part what it reads, transitively, instead of sending it.

    Recompute (``into`` is backward), replication (cheap nodes) and checkpointing (``keep`` is the segment's border)
    are this one rewrite. It stops at ``keep``, at the host and its inputs, and at nodes that may run only once::

        part 0: a -> b -> c ──c──> part 1: d        part 0: a ──a──> part 1: b' -> c' -> d
                                              ==>           └ b -> c    keep = [a]

    Args:
        flow: facts about the graph.
        plan: the plan.
        into: the part that receives the copies.
        keep: nodes that it goes on reading from their home.
    """
    flow, plan = facts_of(flow), plan_of(plan)
    _require(plan, into)
    stop = {flow.producer(n) for n in keep}
    places = dict(plan.places)
    stack = [r for n in plan.members(into) for r in flow.inputs(n)]
    while stack:
        node = stack.pop()
        keys = places.get(node, (HOST,))
        if into in keys or keys == (HOST,) or node in stop or node in flow.once:
            continue
        places[node] = (*keys, into)
        stack += flow.inputs(node)
    return replace(plan, places=places, claim=None)


def prune(flow: Dataflow, plan: Plan) -> Plan:
    """Drop copies that nobody reads. If the home's copy is among them, the first copy that is read becomes the home.

    A node that nobody needs at all, and that has no effect, is computed nowhere any more: its place is ``()``. So a
    part without use goes away.
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
    """What must run: effects where they are, and what the output and the host read."""
    for node in flow.index:
        if node in flow.once:
            yield from ((node, key) for key in plan.places.get(node, (HOST,)))
        elif node.op == "output" or (flow.is_placeable(node) and HOST in plan.places.get(node, (HOST,))):
            yield node, HOST


def relay(flow: Dataflow, plan: Plan) -> Plan:
    """Pass values on through the parts in between, for runtimes in which a part talks to its neighbours only::

        part 0 ──a──> part 2     ==>     part 0 ──a──> part 1 ──a──> part 2

    Each part then takes and returns all that is live at its borders. Inputs of the graph enter with the first part;
    parameters that the host holds are handed to each part.

    Raises:
        PlanError: SK209 when the host computes something between the parts.
    """
    flow, plan = facts_of(flow), plan_of(plan)
    require_parts(flow, plan)
    return replace(plan, routing="relay")


def require_parts(flow: Dataflow, plan: Plan) -> None:
    """Refuse (SK209) a plan that leaves nodes to the host: what it computes between the parts cannot be relayed."""
    left = [n for n in flow.nodes if HOST in plan.places.get(n, (HOST,))]
    if left:
        raise PlanError(
            "SK209",
            f"the host computes {listed(left, 1)}, between the parts",
            "Give every node a part, as Stages does.",
            left,
        )


def refine(flow: Dataflow, plan: Plan) -> Plan:
    """Turn any labels into an acyclic plan: part ``label`` becomes its visits ``(label, 0), (label, 3) ...``.

    A list schedule: a visit takes every node of its label that is ready, and all that becomes ready by that; then
    the label of the earliest ready node gets the next visit. The number grows on every crossing, so the parts cannot
    depend on each other in a cycle::

        labels  a0 b0 a1 b1, a1 reads b0    ==>    (a,0): a0   (b,1): b0 b1   (a,2): a1

    Works on plans with copies; nodes in the host stay there. Linear in nodes and edges (times a logarithm).
    """
    flow, plan = facts_of(flow), plan_of(plan)
    visit: dict[Copy, PartKey] = {}
    for number, copy in _schedule(flow, plan):
        visit[copy] = HOST if copy[1] is HOST else (copy[1], number)
    placed = (n for n in flow.nodes if n in plan)
    places = {node: tuple(visit[node, key] for key in plan[node]) for node in placed}
    order = sorted({k for keys in places.values() for k in keys if k is not HOST}, key=_visit_number)
    parts = {key: replace(plan.parts[key[0]], key=key) for key in order}  # type: ignore[index]
    return replace(plan, places=places, parts=parts, claim=None)


def _visit_number(key: Hashable) -> int:
    assert isinstance(key, tuple)
    return int(key[1])


def _schedule(flow: Dataflow, plan: Plan) -> Iterator[tuple[int, Copy]]:
    """Every copy with the number of its visit, in an order that respects data and effects."""
    waits, users = _dependences(flow, plan)
    ready: dict[PartKey, list[tuple[int, Node]]] = {}
    upcoming: list[tuple[bool, int, int, PartKey]] = []  # of every ready copy: the host's first, then graph order
    number, pushed = -1, count()

    def push(node: Node, key: PartKey) -> None:
        heapq.heappush(ready.setdefault(key, []), (flow.index[node], node))
        heapq.heappush(upcoming, (key is not HOST, flow.index[node], next(pushed), key))

    for (node, key), left in waits.items():
        if not left:
            push(node, key)
    while upcoming:
        label = heapq.heappop(upcoming)[-1]
        if not ready[label]:  # all done in a visit that an earlier copy began
            continue
        number += label is not HOST
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
    """For each copy, how many copies it waits for; and who waits for it."""
    waits: dict[Copy, int] = {}
    users: dict[Copy, list[Copy]] = {}
    for node in flow.nodes:
        for key in plan.places.get(node, (HOST,)):
            # The home too: a later visit of this label no longer has the copy and reads the home's.
            before = {
                (d, k) for d in flow.inputs(node) for k in (plan.source(d, key), plan.home(d)) if plan.get(d) != ()
            }
            for d in flow.after[node]:  # an effect waits for every copy
                before |= {(d, k) for k in plan.places.get(d, (HOST,))}
            waits[node, key] = len(before)
            for copy in before:
                users.setdefault(copy, []).append((node, key))
    return waits, users


def condense(flow: Dataflow, plan: Plan) -> Plan:
    """Join parts that depend on each other in a cycle into one, the first of them; nodes of the host on the way too.

    The strongly connected components of the graph of parts (Tarjan 1972), so that as little as possible is joined.
    """
    from networkx import DiGraph, strongly_connected_components

    flow, plan = facts_of(flow), plan_of(plan)
    graph = DiGraph((before, unit) for unit, needs in unit_needs(flow, plan).items() for before in needs)
    position = {key: i for i, key in enumerate(plan.parts)}
    joined: dict[Unit, PartKey] = {}
    for cycle in strongly_connected_components(graph):
        if len(cycle) > 1:
            first = min((key for key, node in cycle if node is None), key=position.__getitem__)
            joined |= dict.fromkeys(cycle, first)
    places = {
        node: tuple(dict.fromkeys(joined.get(unit_of(node, key), key) for key in plan.places.get(node, (HOST,))))
        for node in flow.nodes
    }
    used = {key for keys in places.values() for key in keys}
    return replace(plan, places=places, parts={key: part for key, part in plan.parts.items() if key in used})


def merge(flow: Dataflow, plan: Plan, into: PartKey, other: PartKey) -> Plan:
    """Join part ``other`` into part ``into``.

    Raises:
        CycleError: SK203 when the joined part would depend on itself through a third one.
        PlanError: SK206 when a part of that name does not exist.
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
