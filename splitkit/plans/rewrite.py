"""Rewrite plans: functions that take a plan and return another. They never change the graph."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import count

import torch
from torch.fx import Node

from splitkit.errors import PlanError, listed
from splitkit.graph.dataflow import Dataflow, facts_of, reads
from splitkit.graph.storages import value_of
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
    order = sorted({k for keys in places.values() for k in keys if k is not PARENT}, key=lambda key: key[1])  # type: ignore[index]
    parts = {key: replace(plan.parts[key[0]], key=key) for key in order}  # type: ignore[index]
    return replace(plan, places=places, parts=parts, claim=None)


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


# Copy small values (sizes, numbers, devices, dtypes) into the parts that read them, if their inputs are there anyway.
#
# If a ``torch.Size``, a float or a device crosses a border, whoever compiles, exports or sends the part has to handle
# it; recomputing it costs nothing::
#
#     part 0: size = x.size()  ──size──>  part 1: y.view(size)     ==>     part 1: size = x.size(); y.view(size)
#
# Ints still cross, because symbolic shapes are built from them.


Places = dict[Node, tuple[PartKey, ...]]

_INTS = (int, torch.SymInt)
_NUMBERS = (*_INTS, float, complex, torch.SymFloat, torch.SymBool)
_SMALL = (*_NUMBERS, str, slice, range, torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format)
_OF_A_TENSOR = ("shape", "device", "dtype", "layout")


def recompute_locally(flow: Dataflow, places: Places) -> None:
    """Copy each small value into the parts that read it, unless that would make another value cross.

    Args:
        flow: facts about the graph.
        places: the parts of every node except attributes; modified in place.
    """
    local = _Local(flow, places)
    for node in reversed(flow.nodes):  # readers first: a copy adds readers to its inputs
        if is_small(node) and not isinstance(value_of(node), _INTS):
            local.spread(node)
    places.update({n: places[producer] for n, producer in flow.followers.items()})


def recompute_sizes(flow: Dataflow, plan: Plan) -> Plan:
    """Copy every ``x.size()`` into the parts that read the whole size, and send them ``x``; its members still cross::

        part 0: x -> s = x.size()      ──s──>  part 1: y.view(s)
        part 0: x                      ──x──>  part 1: s = x.size(); y.view(s)

    This serves compilers of single parts, which accept only tensors and ints. A size that is read before its tensor is
    written or resized stays where it is, since it could differ later.
    """
    local = _Local(flow, {n: plan.places.get(n, (PARENT,)) for n in flow.nodes})
    changes: dict[Node, tuple[PartKey, ...]] = {}
    for node in flow.nodes:
        # Ordered nodes are skipped: asked again after a write or resize, the size could differ.
        free = _is_size(node) and node not in flow.once and node not in local.timed
        if free and (readers := local.readers(node)):
            changes[node] = (*plan.places.get(node, (PARENT,)), *readers)
    return prune(flow, plan.place(changes)) if changes else plan


def _is_size(node: Node) -> bool:
    value = value_of(node)
    if value is None:
        return _asks_a_tensor(node) and node.target in ("size", getattr) and node.args[1:2] in ((), ("shape",))
    return isinstance(value, torch.Size)


class _Local:
    def __init__(self, flow: Dataflow, places: Places) -> None:
        self.flow, self.places = flow, places
        self._taken: dict[Node, set[PartKey]] = {}

    def spread(self, node: Node) -> None:
        """Copy ``node`` to the readers that can compute it; drop the original copy if nobody reads it any more."""
        copies = tuple(reader for reader in self.readers(node) if self.may_have(node, reader))
        if not copies:
            return
        left = {key for user in node.users for key in self.places.get(user, ())} - {*copies}
        gone = not left and not any(user in self.flow.followers for user in node.users)
        self.places[node] = copies if gone else (*self.places[node], *copies)

    def readers(self, node: Node) -> list[PartKey]:
        """Return the parts that read the value without computing it."""
        keys = self.places[node]
        found = dict.fromkeys(key for user in self._users(node) for key in self.places[user])
        return [key for key in found if key is not PARENT and key not in keys] if keys else []

    def may_have(self, node: Node, reader: PartKey) -> bool:
        """Whether ``reader`` can compute a copy from values that it computes or receives anyway."""
        needed = self._needs[node]
        return needed is not None and all(reader in self._parts_with(value) for value in needed)

    def _parts_with(self, value: Node) -> set[PartKey]:
        """Return the parts that compute or read a value."""
        if value not in self._taken:
            read = (key for user in self._users(value) for key in self.places[user])
            self._taken[value] = {*self.places[value], *read}
        return self._taken[value]

    def _users(self, node: Node) -> Iterator[Node]:
        return (user for user in node.users if user in self.places and user not in self.flow.followers)

    @cached_property
    def _needs(self) -> dict[Node, frozenset[Node] | None]:
        """Small value -> the large values that it is computed from in the end; ``None`` if it must not be copied."""
        needs: dict[Node, frozenset[Node] | None] = {}
        for node in self.flow.nodes:
            if is_small(node):
                free = node not in self.flow.once and node not in self.timed
                found = frozenset(n for read in reads(node) for n in self._sources(read, needs)) if free else None
                needs[node] = found if found is None or len(found) <= _MOST else None
        return needs

    def _sources(self, value: Node, needs: Mapping[Node, frozenset[Node] | None]) -> Iterable[Node]:
        if value.op in ("placeholder", "get_attr") or isinstance(value_of(value), _INTS):  # ints may cross
            return ()
        found = needs.get(value)
        return (value,) if found is None else found

    @cached_property
    def timed(self) -> set[Node]:
        """Nodes that are ordered with an effect. A copy would be ordered as well, which may close a cycle of parts."""
        after = self.flow.after
        return {*after, *(n for before in after.values() for n in before)}


# The most large values that one small value may be computed from; it bounds the sets of `_needs`, which grow along
# chains of sizes. Not tuned: with 3 and with 10,000 the tests pass too.
_MOST = 16


def is_small(node: Node) -> bool:
    """Whether a node yields a size, a number or a setting, which costs nothing to compute."""
    value = value_of(node)
    if value is None:
        return _asks_a_tensor(node)
    if isinstance(value, torch.Tensor):  # tested first because it is the most frequent case
        return False
    return isinstance(value, _SMALL) or (type(value) is tuple and all(isinstance(v, _NUMBERS) for v in value))


def _asks_a_tensor(node: Node) -> bool:
    """Whether a node is ``x.size()``, ``x.shape``, ``x.device`` ...; for graphs without ``meta["val"]``."""
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1 and not node.kwargs
    return node.target is getattr and len(node.args) > 1 and node.args[1] in _OF_A_TENSOR
