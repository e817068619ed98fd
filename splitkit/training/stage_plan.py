"""Turn a stage for each node of forward into a plan of a joint graph in pipeline stages, and read such plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from splitkit.errors import PlanError
from splitkit.graph.dataflow import readers_of
from splitkit.graph.joint_marks import forward_owners
from splitkit.graph.storages import value_of
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.training.choices import required_by_forward
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, save_all_plan
from splitkit.training.stage_parts import StagePart, known_part, stage_part

# Find what a plan of a training step in stages computes again.


_TURN = {"forward": 0, "backward": 1, "input": 1, "weight": 2}


def computed_again(flow: JointFlow, plan: Plan, node: Node) -> list[StagePart]:
    """Return the parts that compute a node although an earlier part of the step has done so.

    A view costs nothing wherever it is, and is not counted.

    Args:
        flow: facts about the joint graph.
        plan: a plan whose parts are those of stages.
        node: a placeable node.
    """
    parts = [known_part(key) for key in plan[node]]
    storages, place = flow.storages, flow.index[node]
    if len(parts) < 2 or not any(storages.root[slot] == slot for slot in storages.made[place]):
        return []
    first = min(_TURN[part.half] for part in parts)
    return [part for part in parts if _TURN[part.half] > first]


# Take the gradient of a tied parameter apart, so that each stage returns the term that it computes.


@dataclass(frozen=True)
class GradientTerm:
    """A term of a gradient: the sum of these nodes, in this order, computed in one stage.

    Attributes:
        position: which output of backward it belongs to.
        nodes: what is added up.
        stage: where.
    """

    position: int
    nodes: tuple[Node, ...]
    stage: int


def gradient_terms(flow: JointFlow, places: Places) -> list[GradientTerm]:
    """Return the terms of all gradients, and place nowhere the sums over several stages, which the caller adds up.

    Only sums of nothing but parameter gradients are taken apart: ``add(a, b)`` that is an output of backward and that
    nobody else reads. All other gradients have one term.

    Args:
        flow: facts about the joint graph.
        places: node, or member of a tuple -> its parts; sums that are taken apart get the place ``()``.
    """
    found: list[GradientTerm] = []
    returned = [value for value in flow.gradients if isinstance(value, Node)]
    for position, value in enumerate(flow.gradients):
        if not isinstance(value, Node):
            continue
        nodes, sums = terms_and_sums(value, returned)
        stages = {node: _stage_of(places.get(node, ())) for node in nodes}
        if len(set(stages.values())) < 2:
            found.append(GradientTerm(position, (value,), _stage_of(places.get(value, ()))))
            continue
        places |= dict.fromkeys(sums, ())
        found += [
            GradientTerm(position, tuple(n for n in nodes if stages[n] == stage), stage)
            for stage in sorted(set(stages.values()), reverse=True)
        ]
    return found


def terms_and_sums(value: Node, returned: list[Node]) -> tuple[list[Node], list[Node]]:
    """Return the terms of a gradient, in the order in which they are added, and the sums that add them up.

    Args:
        value: the gradient.
        returned: all gradients that backward returns.
    """
    readers = [*(u for u in value.users if u.op != "output"), *(v for v in returned if v is value)]
    if value.target is not torch.ops.aten.add.Tensor or len(readers) > 1 or not _is_plain(value):
        return [value], []
    (terms, sums), (more, others) = (terms_and_sums(term, returned) for term in value.all_input_nodes)
    return [*terms, *more], [value, *sums, *others]


def _is_plain(value: Node) -> bool:
    """Whether it adds two tensors of its own shape and type, without a factor."""
    like = value.meta["val"]
    terms = [n.meta.get("val") for n in value.all_input_nodes]
    same = all(isinstance(t, torch.Tensor) and (t.shape, t.dtype) == (like.shape, like.dtype) for t in terms)
    return len(value.args) == 2 and len(terms) == 2 and not value.kwargs and same


def _stage_of(keys: tuple[PartKey, ...]) -> int:
    """Return the stage of the last part in which a value is computed."""
    parts: list[StagePart] = [part for key in keys if (part := stage_part(key)) is not None]
    return parts[-1].stage if parts else 0


def tied_parameters(terms: list[GradientTerm]) -> Mapping[int, tuple[int, ...]]:
    """Return position of a gradient with terms of several stages -> these stages, the last one first."""
    stages: dict[int, list[int]] = {}
    for term in terms:
        stages.setdefault(term.position, []).append(term.stage)
    return {position: tuple(found) for position, found in stages.items() if len(found) > 1}


# Turn a stage for each node of forward into a plan of a joint graph in pipeline stages.


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
