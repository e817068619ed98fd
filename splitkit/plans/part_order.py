"""Sort the parts topologically by data and effects, and report the cycle if there is one."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any, TypeVar

from torch.fx import Node

from splitkit._torch import inputs_of
from splitkit.errors import CycleError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.dependences import lowest_first
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan

ParentStep = tuple[PartKey, Node | None]
"""What the parent runs at one point: a part ``(key, None)``, or one of the parent's own nodes ``(PARENT, node)``."""

Item = TypeVar("Item", bound=Hashable)

Needs = dict[ParentStep, dict[ParentStep, tuple[Node, Node]]]
"""step -> the steps that it waits for, each with one edge (producer, reader) as the reason."""


def parent_step_of(node: Node, key: PartKey) -> ParentStep:
    """Return the step of the parent in which part ``key`` computes ``node``."""
    return (key, node if key is PARENT else None)


Crossing = tuple[Node, PartKey, Collection[PartKey]]
"""A value that is read, its home, and all parts that compute it."""


def crossings(places: Mapping[Node, tuple[PartKey, ...]]) -> dict[Node, list[Crossing]]:
    """Return reader -> the values that it reads and that are not computed in the same parts, in graph order.

    In the parent each node is a step of its own, so reads between two of its nodes count as well.
    """
    found: dict[Node, list[Crossing]] = {}
    many: dict[Node, frozenset[PartKey]] = {}
    for node, keys in places.items():
        for read in inputs_of(node):
            sources = places.get(read)  # state ops, and attributes without a place, have none
            if sources and (sources != keys or PARENT in keys):
                known: Collection[PartKey] = sources
                if len(sources) > 8:  # a set, because it is searched once per reader
                    known = many[read] = many.get(read) or frozenset(sources)
                found.setdefault(node, []).append((read, sources[0], known))
    return found


def part_order(flow: Dataflow, plan: Plan, crossing: Mapping[Node, list[Crossing]] | None = None) -> list[ParentStep]:
    """Return the steps of a plan, complete or not, in an order that respects data and effects.

    Of the steps that are ready, the one whose first node comes first in the graph runs first (Kahn's algorithm with a
    heap), so the order is the same in every process.

    Args:
        flow: facts about the graph.
        plan: the plan.
        crossing: the plan's `crossings`, if they are known already.

    Raises:
        CycleError: SK203 if parts depend on each other in a cycle.
    """
    needs, first = _needs(flow, plan, crossing)
    order = stable_order(needs, first)
    if len(order) < len(needs):
        done = {*order}
        raise _cycle(flow, {u: before for u, before in needs.items() if u not in done})
    return order


def stable_order(needs: Mapping[Item, Collection[Item]], rank: Mapping[Item, Any]) -> list[Item]:
    """Sort items topologically; of those that are ready, the one of least rank first, then the first in ``needs``.

    This is Kahn's algorithm with a heap. Items on a cycle, and items that need them, are left out.
    """
    position = {item: i for i, item in enumerate(needs)}
    keys = {item: (rank[item], i) for item, i in position.items()}
    waits: Any = {keys[item]: [keys[b] for b in before] for item, before in needs.items()}
    items, found = list(needs), lowest_first(waits)
    return [items[i] for _, i in found]


def step_needs(flow: Dataflow, plan: Plan) -> Needs:
    """Return the steps that each step waits for."""
    return _needs(flow, plan)[0]


def _needs(
    flow: Dataflow, plan: Plan, crossing: Mapping[Node, list[Crossing]] | None = None
) -> tuple[Needs, dict[ParentStep, int]]:
    needs: Needs = {}
    first: dict[ParentStep, int] = {}
    known: set[tuple[PartKey, ...]] = set()  # places whose steps all have an entry in `needs`
    places, after = _all_places(flow, plan), flow.after
    crossing = crossings(places) if crossing is None else crossing
    for node, keys in places.items():
        # Most nodes add no edge: they read within their part, whose step has been met, and have no effect.
        if keys in known and node not in crossing and node not in after:
            continue
        if PARENT not in keys:
            known.add(keys)
        for key in keys:
            step = parent_step_of(node, key)
            if node.op != "get_attr":
                first.setdefault(step, flow.index[node])
            before = needs.setdefault(step, {})
            for read, home, sources in crossing.get(node, ()):
                _add(before, step, parent_step_of(read, key if key in sources else home), (read, node))
            for earlier in after[node]:  # an effect waits for every copy
                for other in places[earlier]:
                    _add(before, step, parent_step_of(earlier, other), (earlier, node))
    _keep_reads(flow, places, needs)
    return needs, {step: first.get(step, -1) for step in needs}  # the parent's attributes are there from the start


def _keep_reads(flow: Dataflow, places: Mapping[Node, tuple[PartKey, ...]], needs: Needs) -> None:
    """Order the parent's reads of attributes that opaque code may rebind.

    Such an attribute is read after the opaque code that precedes it in the graph, and before the code that follows.
    """
    for node, (earlier, later) in flow.bindings.reads.items():
        if PARENT not in places.get(node, ()):
            continue
        step = parent_step_of(node, PARENT)
        for opaque in () if earlier is None else (earlier,):
            for key in places[opaque]:
                _add(needs[step], step, parent_step_of(opaque, key), (opaque, node))
        for opaque in () if later is None else (later,):
            for key in places[opaque]:
                other = parent_step_of(opaque, key)
                _add(needs.setdefault(other, {}), other, step, (node, opaque))


_IN_PARENT = (PARENT,)


def _all_places(flow: Dataflow, plan: Plan) -> Mapping[Node, tuple[PartKey, ...]]:
    """Return the parts of each node. A node that the plan leaves out is in the parent, an attribute nowhere."""
    if len(plan.places) == len(flow.scope):
        return plan.places
    nodes = (n for n in flow.scope if n.op != "get_attr" or n in plan.places)
    return {n: plan.places.get(flow.producer(n), _IN_PARENT) for n in nodes}


def _add(
    before: dict[ParentStep, tuple[Node, Node]], step: ParentStep, other: ParentStep, edge: tuple[Node, Node]
) -> None:
    if other != step:
        before.setdefault(other, edge)


def _cycle(flow: Dataflow, left: Mapping[ParentStep, Mapping[ParentStep, tuple[Node, Node]]]) -> CycleError:
    """Return the error for a cycle: it prints a short one among the steps that never became ready."""
    loop = _shortest_loop({u: [b for b in before if b in left] for u, before in left.items()})
    pairs = list(zip(loop, [*loop[1:], loop[0]], strict=True))
    edges = [left[a][b] for a, b in pairs]
    lines = [
        f"    {_name(a)} waits for {_name(b)}: {reader.name} {_verb(reader, producer)} {producer.name}"
        for (a, b), (producer, reader) in zip(pairs, edges, strict=True)
    ]
    opaque = next((n for edge in edges for n in edge if n in flow.effects and not flow.effects[n].known), None)
    declare = f" The effects of {opaque.name} are unknown: declare them with splitkit.extend.declare." if opaque else ""
    return CycleError(
        "SK203",
        "parts depend on each other in a cycle:\n" + "\n".join(lines),
        "Give these nodes one part, or say on_cycle='refine' to visit a part several times, 'merge' to join the parts."
        + declare,
        dict.fromkeys(n for edge in edges for n in edge),
    )


def _shortest_loop(graph: Mapping[ParentStep, list[ParentStep]]) -> list[ParentStep]:
    """Return a cycle, each step of it before one that it waits for.

    It is the shortest through one of the steps on a cycle, not of the graph.
    """
    from networkx import DiGraph, find_cycle, shortest_path

    arrows = DiGraph((step, before) for step, needs in graph.items() for before in needs)
    step = find_cycle(arrows)[0][0]
    back = shortest_path(arrows, target=step)
    return [step, *min((back[before] for before in graph[step] if before in back), key=len)[:-1]]


def _name(step: ParentStep) -> str:
    key, node = step
    return f"the parent's node {node.name}" if node is not None else f"part {key!r}"


def _verb(reader: Node, producer: Node) -> str:
    return "reads" if producer in reader.all_input_nodes else "must run after the effect or read of"
