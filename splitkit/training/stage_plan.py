"""Turn a stage for each node of forward into a plan of a joint graph in pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from splitkit.errors import PlanError
from splitkit.graph.dataflow import readers_of
from splitkit.graph.joint_marks import forward_owners
from splitkit.graph.symbols import value_of
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.training.choices import required_by_forward
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, save_all_plan
from splitkit.training.stage_parts import StagePart

Places = dict[Node, tuple[PartKey, ...]]


def stage_plan(flow: JointFlow, stages: Mapping[Node, int], base: Plan | None = None) -> Plan:
    """Return the plan in which forward runs in the given stages, and backward in the stages of its forward nodes.

    A node of backward belongs to the stage of the forward node whose gradient it helps to compute, but it is never in a
    later stage than a gradient that it reads, because gradients only flow to earlier stages. A sum of the gradients of
    a value that several stages read is thus computed as soon as both terms are there, and one gradient crosses each
    border for each value that crossed it forward.

    Args:
        flow: facts about the joint graph.
        stages: node of forward -> its stage, from 0, for all placeable nodes that ``base`` computes in forward.
        base: a plan with the parts ``"forward"`` and ``"backward"``; by default that of eager autograd. What it
            recomputes is recomputed in the backward of each stage that reads it.

    Raises:
        PlanError: SK208 for a node of forward without a stage.
    """
    base = save_all_plan(flow) if base is None else base
    forward = [n for n in flow.nodes if FORWARD in base[n]]
    if missing := [n for n in forward if n not in stages]:
        raise PlanError("SK208", f"{missing[0].name} runs in forward and has no stage", "Give it a stage.", missing[:1])
    readers = readers_of(flow)
    of_forward = _adjusted(flow, {n: stages[n] for n in forward}, readers)
    last = max(of_forward.values(), default=0)
    of_backward = _backward_stages(flow, of_forward, last, readers)
    places: Places = {}
    for node in reversed(flow.nodes):
        wanted = [key for user in readers[node] for key in places[user]]
        if _is_view_of_input(flow, node):
            unread = StagePart("forward", of_forward.get(node, last))
            places[node] = tuple(dict.fromkeys(reversed(wanted))) or (unread,)
            continue
        keys: list[PartKey] = [StagePart("forward", of_forward[node])] if FORWARD in base[node] else []
        if base[node] == (BACKWARD,):
            keys.append(StagePart("backward", of_backward[node]))
        elif BACKWARD in base[node]:
            keys += [k for k in dict.fromkeys(wanted) if isinstance(k, StagePart) and k.half == "backward"]
        places[node] = tuple(keys)
    parts = [*(StagePart("forward", s) for s in range(last + 1))]
    parts += [StagePart("backward", s) for s in reversed(range(last + 1))]
    return replace(base, places={n: places[n] for n in flow.nodes}, parts={key: Part(key) for key in parts}, claim=None)


def _adjusted(flow: JointFlow, stages: dict[Node, int], readers: Mapping[Node, list[Node]]) -> dict[Node, int]:
    """Return the stages, changed for nodes that cost nothing: they run where their value need not be sent.

    What forward computes for backward alone (the aliases that autograd saves of a result) runs where its result is
    made, and a view of a parameter or an input where it is first read.
    """
    needed = required_by_forward(flow)
    for node in flow.nodes:
        if node in stages and node not in needed:
            stages[node] = max((stages[r] for r in flow.inputs(node) if r in stages), default=stages[node])
    for node in reversed(flow.nodes):
        if node in stages and node in needed and _is_view_of_input(flow, node):
            stages[node] = min((stages[u] for u in readers[node] if u in stages), default=stages[node])
    return stages


def _is_view_of_input(flow: JointFlow, node: Node) -> bool:
    """Whether a node costs nothing wherever it runs: a view of a parameter, a buffer or an input."""
    return isinstance(value_of(node), torch.Tensor) and not flow.storages.under(node) and node not in flow.once


def _backward_stages(
    flow: JointFlow, stages: Mapping[Node, int], last: int, readers: Mapping[Node, list[Node]]
) -> dict[Node, int]:
    """Return the stage of every placeable node if it runs in backward."""
    owners = forward_owners(flow.graph)
    found: dict[Node, int] = dict.fromkeys(flow.backward_inputs, last)
    settled = set(flow.backward_inputs)
    for node in flow.nodes:
        reads = [flow.producer(r) for r in node.all_input_nodes]
        above = [found[r] for r in reads if r in settled]
        owner = owners.get(node)
        own = stages.get(flow.producer(owner), last) if owner is not None else stages.get(node, last)
        is_sum = node.target is torch.ops.aten.add.Tensor and len(above) == 2
        found[node] = min(above if is_sum else [own, *above])
        if above:
            settled.add(node)
    # A node that reads no gradient runs in the latest stage that reads it, from where its value can reach the others.
    for node in reversed(flow.nodes):
        users = [u for u in readers[node] if u in settled]
        if node not in settled and node not in stages and users:
            found[node] = max(found[u] for u in users)
            settled.add(node)
    return found
