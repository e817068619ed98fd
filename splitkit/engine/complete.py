"""Complete a policy's plan, so that every node has a place, and check that the plan keeps the graph's semantics."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Literal, NoReturn

import torch
from torch.fx import Node

from splitkit.engine.opaque import check_opaque, hoist_rebindable_reads
from splitkit.errors import PlanError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.kept_casts import kept_casts
from splitkit.graph.storages import Lookup, storage_key
from splitkit.plans.checkpointed import check_checkpoints
from splitkit.plans.local_copies import recompute_locally
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import require_parts


def complete_plan(flow: Dataflow, plan: Plan, parameters: Literal["own", "hoist"] = "own") -> Plan:
    """Return the plan with a place for every node.

    Inputs and the output go to the parent, members of a tuple to its producer, and attributes to each of their readers
    (with ``parameters="hoist"``, tensors stay in the parent and are passed in). Nodes that the plan leaves out stay in
    the parent, and so does a buffer that is written and that several parts read: if each part registered it,
    ``module.double()`` would turn it into several buffers. State ops have no place; they become scopes.

    Raises:
        PlanError: SK201 if the plan places nodes of another graph.
    """
    if not plan.places.keys() <= flow.index.keys():
        _refuse_foreign([n for n in plan if n not in flow.index])
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


def _refuse_foreign(foreign: list[Node]) -> NoReturn:
    raise PlanError(
        "SK201",
        f"the plan places {foreign[0]}, which is not a node of this graph",
        "Plan again after editing the graph, or load the plan with Plan.load(path, gm.graph).",
        foreign,
    )


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
            opaque code (`splitkit.engine.opaque`), SK217 for casts that autocast keeps.
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
