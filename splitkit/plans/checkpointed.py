"""Parts that backward runs again (``Part.call="checkpoint"``): make a plan's parts so, and check that they can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node

from splitkit.errors import PlanError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.shared_memory import NO_MEMORY, Memory, memory_classes
from splitkit.graph.storages import attribute
from splitkit.plans.parts import PARENT
from splitkit.plans.record import Plan

NOTE = "numbers are without recompute, which was chosen afterwards"
"""What the note of a plan says whose parts were all made so."""


def checkpointed(plan: Plan) -> Plan:
    """Return the plan with parts that save only their inputs and are recomputed in backward (activation checkpointing).

    Its claim is dropped and its note says so, since both were made without recompute.
    """
    parts = {key: replace(part, call="checkpoint") for key, part in plan.parts.items()}
    if parts == plan.parts:
        return plan
    return replace(plan, parts=parts, claim=None, note=f"{plan.note}; {NOTE}" if plan.note else "")


def check_checkpoints(flow: Dataflow, plan: Plan) -> None:
    """Raise SK207 for nodes that ``torch.utils.checkpoint`` could not run again in backward.

    It replays random numbers and asserts. It cannot undo a write or a print, nor a later write to a value that the
    part read.
    """
    again = {key for key, part in plan.parts.items() if part.call == "checkpoint"}
    for node in _fixed_in_time(flow) if again else ():
        for key in plan.places.get(flow.producer(node), ()):
            if key is not PARENT and key in again:
                raise PlanError(
                    "SK207",
                    f"part {key!r} is checkpointed and would run {node.name} again in backward, "
                    f"but {flow.once.get(node, 'another node writes the memory that it reads')}",
                    "Move the node to another part, or use call='plain' for that part.",
                    [node],
                )


def _fixed_in_time(flow: Dataflow) -> dict[Node, None]:
    """Return the nodes that must not run again later: impure nodes, writers, and readers of written memory."""
    impure = (n for n, e in flow.effects.items() if not e.known or e.impure or e.ambient)
    seeded = (n for n, e in flow.effects.items() if e.random and _has_generator(flow, n))
    return dict.fromkeys([*impure, *seeded, *_users_of_written(flow)])


def _users_of_written(flow: Dataflow) -> Iterator[Node]:
    """Yield writers and readers of written memory; opaque code counts with its arguments only."""
    found = memory_classes(flow.effects, flow.root)
    memory = Memory(found.members, found.written)
    running = ((n, e) for n, e in flow.effects.items() if n.op not in ("placeholder", "get_attr", "output"))
    uses = {n: memory.use(n, e) for n, e in running if n not in flow.followers}
    written = {c for writes, _ in uses.values() for c in writes} - NO_MEMORY
    return (n for n, (_, touched) in uses.items() if not written.isdisjoint(touched))


def _has_generator(flow: Dataflow, node: Node) -> bool:
    """Whether ``node`` draws from a generator of its own, whose state checkpoint does not restore."""
    read = [attribute(flow.root, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    inputs = any(
        n.op == "placeholder" and not isinstance(n.meta.get("val"), torch.Tensor) for n in node.all_input_nodes
    )
    return inputs or any(isinstance(v, torch.Generator) for v in (*read, *node.args, *node.kwargs.values()))
