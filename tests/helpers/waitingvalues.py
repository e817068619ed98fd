"""Which values wait between the input part and the weight part of a divided backward, and how many bytes they take."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from torch.fx import Node

from splitkit.graph.dataflow import reads
from splitkit.graph.node_values import storage_nbytes
from splitkit.graph.storages import plain_size, storage_key, tensors, value_of
from splitkit.plans.record import Plan
from splitkit.training.flow import JointFlow


def waiting_values(flow: JointFlow, plan: Plan, stage: int) -> tuple[Node, ...]:
    """Return the values that the weight part of a stage reads and does not compute, in graph order.

    The weight part reads its own copy of a value if it has one, else that of the input part, else that which the input
    part would read too: what forward saved, or a gradient from the next stage. Parameters, buffers and inputs of the
    model are left out, since every part gets them from the caller.

    Args:
        flow: facts about the joint graph.
        plan: a plan with the parts ``("input", stage)`` and ``("weight", stage)``.
        stage: the stage.
    """
    late = ("weight", stage)
    own = {n for n in flow.scope if late in plan.places.get(flow.producer(n), ())}
    found = {read: None for node in own if node.op != "get_attr" for read in reads(node) if read not in own}
    given = (n for n in found if n.op != "get_attr" and (n.op != "placeholder" or n in flow.backward_inputs))
    return tuple(sorted(given, key=flow.index.__getitem__))


def waiting_bytes(flow: JointFlow, plan: Plan, stage: int) -> int:
    """Return the bytes of the storages of `waiting_values`, each counted once, without those that the caller holds."""
    early = ("input", stage)
    nodes, sizes = tuple(flow.index), dict[Hashable, int]()
    for value in waiting_values(flow, plan, stage):
        recomputed = early in plan.places.get(flow.producer(value), ())
        for key, nbytes in _storages(flow, value):
            # What backward recomputes from a saved base is a second storage, unless it is a view of that base.
            maker = flow.producer(nodes[flow.storages.maker[key]]) if isinstance(key, int) else value
            again = recomputed and early in plan.places.get(maker, ())
            received = maker in plan.places and stage not in {part for _, part in plan.places[maker]}
            sizes[key, again] = _received(flow, plan, stage, key) if received else nbytes
    return sum(sizes.values())


def _received(flow: JointFlow, plan: Plan, stage: int, storage: Hashable) -> int:
    """Return the bytes of all values of a storage that a stage reads and does not compute: each arrives contiguous."""
    own = {n for n in flow.scope if stage in {part for _, part in plan.places.get(flow.producer(n), ())}}
    values = {read for node in own for read in reads(node) if read not in own}
    return sum(t.nbytes for v in values if storage in flow.storages.under(v) for t in tensors(value_of(v)))


def _storages(flow: JointFlow, value: Node) -> Iterator[tuple[Hashable, int]]:
    if value in flow.backward_inputs:
        yield from ((storage_key(t), plain_size(storage_nbytes(t), {})) for t in tensors(value_of(value)))
    else:
        yield from ((root, flow.storages.nbytes[root]) for root in flow.storages.under(value))
