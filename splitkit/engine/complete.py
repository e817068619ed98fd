"""Complete a policy's plan, so that every node has a place, and check that the plan keeps the graph's semantics."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch.fx import Node

from splitkit.errors import PlanError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.kept_casts import kept_casts
from splitkit.graph.ops.functions import may_change_modes
from splitkit.graph.scope import Scope, region_kind
from splitkit.graph.storages import Lookup, storage_key
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan, check_checkpoints
from splitkit.plans.rewrite import recompute_locally, require_parts


def complete_plan(flow: Dataflow, plan: Plan, parameters: Literal["own", "hoist"] = "own") -> Plan:
    """Return the plan with a place for every node.

    Inputs and the output go to the parent, members of a tuple to its producer, and attributes to each of their readers
    (with ``parameters="hoist"``, tensors stay in the parent and are passed in). Nodes that the plan leaves out stay in
    the parent, and so does a buffer that is written and that several parts read: if each part registered it,
    ``module.double()`` would turn it into several buffers. State ops have no place; they become scopes.

    Raises:
        PlanError: SK201 if the plan places nodes of another graph.
    """
    if foreign := [n for n in plan if n not in flow.index]:
        raise PlanError(
            "SK201",
            f"the plan places {foreign[0]}, which is not a node of this graph",
            "Plan again after editing the graph, or load the plan with Plan.load(path, gm.graph).",
            foreign,
        )
    places: dict[Node, tuple[PartKey, ...]] = dict.fromkeys(flow.scope, (PARENT,))
    places |= {n: plan.places[n] for n in flow.nodes if n in plan.places}
    places |= {n: places[producer] for n, producer in flow.followers.items()}
    recompute_locally(flow, places)
    find = Lookup(flow.root)
    attributes = {n: find(str(n.target)) for n in flow.scope if n.op == "get_attr"}
    for node in attributes:
        places[node] = tuple(dict.fromkeys(key for user in node.users for key in places.get(user, ())))
    for node in _hoisted(flow, places, attributes, everything=parameters == "hoist"):
        places[node] = (PARENT,)
    hoist_rebindable_reads(flow, places)
    return replace(plan, places=places)


def _hoisted(
    flow: Dataflow,
    places: Mapping[Node, tuple[PartKey, ...]],
    attributes: Mapping[Node, object],
    everything: bool,
) -> list[Node]:
    """Return the tensor attributes that the parent keeps and passes in."""
    tensors = {n: value for n, value in attributes.items() if isinstance(value, torch.Tensor)}
    if everything:
        return list(tensors)
    readers: dict[Hashable, set[PartKey]] = {}
    for node, value in tensors.items():
        readers.setdefault(storage_key(value), set()).update(places[node])
    return [
        n
        for n, value in tensors.items()
        if n in flow.written and not isinstance(value, torch.nn.Parameter) and len(readers[storage_key(value)]) > 1
    ]


def check_plan(flow: Dataflow, plan: Plan) -> None:
    """Raise an error for a plan whose parts could not give the results of the graph.

    Raises:
        PlanError: SK202 for copies of nodes that may run only once, SK207 for effects inside a checkpointed part,
            SK208 for nodes that are needed but have no part, SK209 for a relay around the parent, SK217 or SK218 for
            opaque code, SK217 for casts that autocast keeps.
            `splitkit.plans.part_order.part_order` finds cycles (SK203).
    """
    if plan.routing == "relay":
        require_parts(flow, plan)
    _check_dropped(flow, plan)
    check_opaque(flow, plan)
    _check_kept_casts(flow, plan)
    for node, reason in flow.once.items():
        keys = plan.places.get(node, ())
        if len(keys) > 1:
            raise PlanError(
                "SK202",
                f"{node.name} is planned in {list(keys)}, but {reason}",
                "Give it one part. splitkit.extend.rematerialize never copies such nodes.",
                [node],
            )
    check_checkpoints(flow, plan)


def _check_kept_casts(flow: Dataflow, plan: Plan) -> None:
    for cast in kept_casts(flow.effects, flow.graph, flow.root):
        keys = {plan.places.get(node, (PARENT,)) for node in cast.reads}
        if len(keys) > 1 or len(*keys) > 1 or (PARENT,) in keys or not cast.one_region:
            first, last = cast.reads[0], cast.reads[-1]
            raise PlanError(
                "SK217",
                f"{last.name} computes with the cast of a weight that autocast has kept since {first.name}, although "
                f"{cast.write.name} may have written the weight; another part would cast the new weight",
                f"Put {', '.join(n.name for n in cast.reads)} into one part, or open the region with "
                "torch.autocast(..., cache_enabled=False) in the model.",
                [*cast.reads, cast.write],
            )


def _check_dropped(flow: Dataflow, plan: Plan) -> None:
    for node in [n for n, keys in plan.places.items() if not keys and n.op != "get_attr"]:
        readers = [user for user in node.users if plan.places.get(user)]
        if readers or node in flow.once:
            why = f"{readers[0].name} reads it" if readers else flow.once[node]
            raise PlanError(
                "SK208",
                f"{node.name} is in no part of the plan, but {why}",
                "Give it a part. splitkit.extend.prune drops only nodes that nothing needs.",
                [node],
            )


# Rules for plans of graphs with opaque code, which may rebind attributes and change ambient state.


def hoist_rebindable_reads(flow: Dataflow, places: dict[Node, tuple[PartKey, ...]]) -> None:
    """Let the parent read attributes that opaque code may rebind before a part that uses them begins.

    A part reads such an attribute itself if no other part runs opaque code between the read and its uses.

    Args:
        flow: facts about the graph.
        places: the parts of every node; modified in place.
    """
    if not flow.bindings.reads:
        return
    segments = _OpaqueSegments(flow, places)
    for node in flow.bindings.reads:
        keys = places[node]
        if any(key is not PARENT and segments.other_between(node, key) for key in keys):
            places[node] = (PARENT,)


class _OpaqueSegments:
    """Maximal sequences of opaque nodes that run in one part."""

    def __init__(self, flow: Dataflow, places: Mapping[Node, tuple[PartKey, ...]]) -> None:
        self.flow, self.places = flow, places
        opaque = flow.bindings.opaque
        self.number = {node: i for i, node in enumerate(opaque)}
        # start[i]: the index of the first opaque node in the segment of node i
        self.start = [0] * len(opaque)
        for i, (before, node) in enumerate(pairwise(opaque), start=1):
            self.start[i] = self.start[i - 1] if places[before] == places[node] else i
        # node -> how many opaque nodes come before it
        counts = accumulate((node in self.number for node in flow.scope), initial=0)
        self.before = dict(zip(flow.scope, counts, strict=False))

    def other_between(self, read: Node, key: PartKey) -> bool:
        """Whether opaque code of another part runs between the read of an attribute and its uses in part ``key``."""
        users = (u for u in read.users if key in self.places.get(u, ()))
        first, end = self.before[read], max((self.before[u] for u in users), default=0)
        if end <= first:
            return False
        # All opaque code between the read and the last use must lie in one segment, and that must belong to `key`.
        return self.start[end - 1] > first or self.places[self.flow.bindings.opaque[end - 1]] != (key,)


def check_opaque(flow: Dataflow, plan: Plan) -> None:
    """Raise an error for a plan in which opaque code would not have the effects that it has in the graph.

    Raises:
        PlanError: SK217 for a region whose state opaque code may change and that several parts would open; SK218 for
            opaque code that may rebind attributes of the graph module itself.
    """
    by = flow.bindings.of_root
    if by is not None:
        raise PlanError(
            "SK218",
            f"{by.name} can reach the graph module itself and may rebind its attributes, of which each part has "
            "its own",
            "Keep the attributes that it changes in a submodule, or declare its effects with splitkit.extend.declare.",
            [by],
        )
    if any(e.ambient for e in flow.effects.values()):
        _check_regions(flow, plan)


def _check_regions(flow: Dataflow, plan: Plan) -> None:
    """Raise SK217 for a region that opaque code may have changed: another part would open it in its original state."""
    # region or setting in force -> the first node that may have changed its state
    left: dict[object, Node] = {}
    for node, scope in flow.scope.items():
        if node.op in ("placeholder", "get_attr"):
            continue
        now = _in_force(flow.final if node.op == "output" else scope)
        left = {kept: by for kept, by in left.items() if kept in now} if left else left
        for by in {left[kept]: None for kept in now if kept in left}:
            keys = plan.places[by]
            if plan.places[node] != keys or PARENT in keys or node.op == "output":
                what = "the graph ends" if node.op == "output" else f"{node.name} runs"
                raise PlanError(
                    "SK217",
                    f"{what} in a region or mode that was opened before {by.name}, which may have changed the ambient "
                    "state; another part would open it again in its original state",
                    f"Put {by.name} and all nodes after it in the region into one part, or declare its effects with "
                    "splitkit.extend.declare.",
                    [by, node],
                )
        if may_change_modes(node, flow.effects[node]):
            left.update((kept, node) for kept in now if kept not in left)


def _in_force(scope: Scope) -> Iterable[object]:
    regions = (enter for enter in scope.regions if region_kind(enter).name != "record_function")
    return dict.fromkeys((*regions, *scope.settings))
