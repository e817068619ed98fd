"""The order of parts: a stable topological sort over data and effects, and an error that prints the cycle."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Mapping
from typing import Any, TypeVar

from torch.fx import Node

from splitkit._torch import inputs_of
from splitkit.errors import CycleError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.parts import HOST, PartKey
from splitkit.plans.record import Plan

Unit = tuple[PartKey, Node | None]
"""What the parent graph runs in one step: a part ``(key, None)``, or one of the host's own nodes ``(HOST, node)``."""

Item = TypeVar("Item", bound=Hashable)

Needs = dict[Unit, dict[Unit, tuple[Node, Node]]]
"""unit -> the units that it waits for, each with one edge (producer, reader) that shows why."""


def unit_of(node: Node, key: PartKey) -> Unit:
    """The step of the parent in which part ``key`` computes ``node``."""
    return (key, node if key is HOST else None)


Crossing = tuple[Node, PartKey, Collection[PartKey]]
"""A value that is read, its home, and all its places."""


def crossings(places: Mapping[Node, tuple[PartKey, ...]]) -> dict[Node, list[Crossing]]:
    """reader -> what it reads that is not computed wherever it is itself, in graph order.

    In the host each node is a unit of its own, so that reads within it count as well.
    """
    found: dict[Node, list[Crossing]] = {}
    many: dict[Node, frozenset[PartKey]] = {}
    for node, keys in places.items():
        for read in inputs_of(node):
            sources = places.get(read)  # neither a state op nor a free attribute has one
            if sources and (sources != keys or HOST in keys):
                known: Collection[PartKey] = sources
                if len(sources) > 8:  # looked up for each reader
                    known = many[read] = many.get(read) or frozenset(sources)
                found.setdefault(node, []).append((read, sources[0], known))
    return found


def part_order(flow: Dataflow, plan: Plan, crossing: Mapping[Node, list[Crossing]] | None = None) -> list[Unit]:
    """The units of a *complete* or partial plan in an order that respects data and effects.

    Among those that are ready, the one whose first node came first in the graph runs first (Kahn's algorithm with a
    heap), so the order is the same in every process.

    Args:
        flow: facts about the graph.
        plan: the plan.
        crossing: its `crossings`, if they are known.

    Raises:
        CycleError: SK203 when parts depend on each other in a cycle.
    """
    needs, first = _needs(flow, plan, crossing)
    order = stable_order(needs, first)
    if len(order) < len(needs):
        done = {*order}
        raise _cycle(flow, {u: before for u, before in needs.items() if u not in done})
    return order


def stable_order(needs: Mapping[Item, Collection[Item]], rank: Mapping[Item, Any]) -> list[Item]:
    """Items after all that they need, the ready one of least rank first, then the one that ``needs`` lists first.

    Kahn's algorithm with a heap. Items of a cycle, and what needs them, are left out.
    """
    waits = {item: len(before) for item, before in needs.items()}
    users: dict[Item, list[Item]] = {}
    for item, before in needs.items():
        for other in before:
            users.setdefault(other, []).append(item)
    position = {item: i for i, item in enumerate(needs)}
    ready = [(rank[i], position[i], i) for i, count in waits.items() if not count]
    heapq.heapify(ready)
    order: list[Item] = []
    while ready:
        item = heapq.heappop(ready)[2]
        order.append(item)
        for user in users.get(item, ()):
            waits[user] -= 1
            if not waits[user]:
                heapq.heappush(ready, (rank[user], position[user], user))
    return order


def unit_needs(flow: Dataflow, plan: Plan) -> Needs:
    """The units that each unit waits for."""
    return _needs(flow, plan)[0]


def _needs(
    flow: Dataflow, plan: Plan, crossing: Mapping[Node, list[Crossing]] | None = None
) -> tuple[Needs, dict[Unit, int]]:
    needs: Needs = {}
    first: dict[Unit, int] = {}
    known: set[tuple[PartKey, ...]] = set()  # places all of whose units have been met
    places, after = _all_places(flow, plan), flow.after
    crossing = crossings(places) if crossing is None else crossing
    for node, keys in places.items():
        if keys in known and node not in crossing and node not in after:
            continue
        if HOST not in keys:
            known.add(keys)
        for key in keys:
            unit = unit_of(node, key)
            if node.op != "get_attr":
                first.setdefault(unit, flow.index[node])
            before = needs.setdefault(unit, {})
            for read, home, sources in crossing.get(node, ()):
                _add(before, unit, unit_of(read, key if key in sources else home), (read, node))
            for earlier in after[node]:  # an effect waits for every copy
                for other in places[earlier]:
                    _add(before, unit, unit_of(earlier, other), (earlier, node))
    _keep_reads(flow, places, needs)
    return needs, {unit: first.get(unit, -1) for unit in needs}  # the host's attributes are there from the start


def _keep_reads(flow: Dataflow, places: Mapping[Node, tuple[PartKey, ...]], needs: Needs) -> None:
    """An attribute that opaque code may bind anew: the host reads it after the code before it, before that after it."""
    for node, (earlier, later) in flow.bindings.reads.items():
        if HOST not in places.get(node, ()):
            continue
        unit = unit_of(node, HOST)
        for opaque in () if earlier is None else (earlier,):
            for key in places[opaque]:
                _add(needs[unit], unit, unit_of(opaque, key), (opaque, node))
        for opaque in () if later is None else (later,):
            for key in places[opaque]:
                other = unit_of(opaque, key)
                _add(needs.setdefault(other, {}), other, unit, (node, opaque))


_IN_HOST = (HOST,)


def _all_places(flow: Dataflow, plan: Plan) -> Mapping[Node, tuple[PartKey, ...]]:
    """Where each node is computed, also by a plan that is not complete; attributes without a place are free."""
    if len(plan.places) == len(flow.scope):
        return plan.places
    nodes = (n for n in flow.scope if n.op != "get_attr" or n in plan.places)
    return {n: plan.places.get(flow.producer(n), _IN_HOST) for n in nodes}


def _add(before: dict[Unit, tuple[Node, Node]], unit: Unit, other: Unit, edge: tuple[Node, Node]) -> None:
    if other != unit:
        before.setdefault(other, edge)


def _cycle(flow: Dataflow, left: Mapping[Unit, Mapping[Unit, tuple[Node, Node]]]) -> CycleError:
    """The error that prints one shortest cycle among the units that never became ready."""
    loop = _shortest_loop({u: [b for b in before if b in left] for u, before in left.items()})
    pairs = list(zip(loop, [*loop[1:], loop[0]], strict=True))
    edges = [left[a][b] for a, b in pairs]
    lines = [
        f"    {_name(a)} waits for {_name(b)}: {reader.name} {_verb(reader, producer)} {producer.name}"
        for (a, b), (producer, reader) in zip(pairs, edges, strict=True)
    ]
    opaque = next((n for edge in edges for n in edge if n in flow.effects and not flow.effects[n].known), None)
    declare = f" It is not known what {opaque.name} does: say so with splitkit.extend.declare." if opaque else ""
    return CycleError(
        "SK203",
        "parts depend on each other in a cycle:\n" + "\n".join(lines),
        "Give these nodes one part, or say on_cycle='refine' to visit a part several times, 'merge' to join the parts."
        + declare,
        dict.fromkeys(n for edge in edges for n in edge),
    )


def _shortest_loop(graph: Mapping[Unit, list[Unit]]) -> list[Unit]:
    """Walk until a unit repeats, then shorten by breadth-first search from it back to itself."""
    unit = next(u for u, before in graph.items() if before)
    seen: set[Unit] = set()
    while unit not in seen:
        seen.add(unit)
        unit = graph[unit][0]
    parent: dict[Unit, Unit] = {}
    queue = [unit]
    for current in queue:
        for before in graph[current]:
            if before == unit:
                loop = [current]
                while loop[-1] != unit:
                    loop.append(parent[loop[-1]])
                return loop[::-1]
            if before not in parent:
                parent[before] = current
                queue.append(before)
    raise AssertionError("a unit that never became ready lies on no cycle")


def _name(unit: Unit) -> str:
    key, node = unit
    return f"the host's node {node.name}" if node is not None else f"part {key!r}"


def _verb(reader: Node, producer: Node) -> str:
    return "reads" if producer in reader.all_input_nodes else "must run after the effect or read of"
