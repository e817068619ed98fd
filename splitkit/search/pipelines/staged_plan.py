"""Turns cuts of a joint graph, and what its stages save, into a plan with the parts of stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch.fx import Node

from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune
from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.training.choices import Choice
from splitkit.training.stage_parts import StagePart


def staged_plan(positions: JointPositions, ends: Sequence[int], choices: Sequence[Choice], note: str) -> Plan:
    """Return the plan of a joint graph with the parts ``("forward", s)`` and ``("backward", s)``.

    Nodes that are computed again have both. An op that depends on no gradient is in forward if its value is saved.

    Args:
        positions: the positions of the nodes.
        ends: the position behind each stage.
        choices: what each stage saves and computes again.
        note: what made the plan.
    """
    forward = set(positions.forward)
    stage_of = {node: _stage(at, ends) for node, at in positions.place.items()}
    places: dict[Node, tuple[PartKey, ...]] = {
        node: (StagePart("forward" if node in forward else "backward", stage),) for node, stage in stage_of.items()
    }
    moved: list[Node] = []
    for choice in choices:
        for op, early, again in zip(choice.savings.ops, choice.forward, choice.runs, strict=True):
            stage = stage_of[op]
            early = bool(early) or op in forward
            keys = ((StagePart("forward", stage),) if early else ()) + (
                (StagePart("backward", stage),) if again else ()
            )
            if keys:
                places[op] = keys
            moved += [op] if early and op not in forward else []
    _with_inputs(positions, places, stage_of, moved)
    parts = [StagePart("forward", s) for s in range(len(ends))]
    parts += [StagePart("backward", s) for s in reversed(range(len(ends)))]
    made = Plan({n: places[n] for n in positions.flow.nodes}, {key: Part(key) for key in parts})
    return replace(prune(positions.flow, made), note=note)


def _stage(at: int, ends: Sequence[int]) -> int:
    return next(stage for stage, end in enumerate(ends) if at < end)


def _with_inputs(
    positions: JointPositions, places: dict[Node, tuple[PartKey, ...]], stage_of: dict[Node, int], nodes: Iterable[Node]
) -> None:
    """Let forward compute what these nodes need and only backward had: views of parameters, constants."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        for read in positions.flow.inputs(node):
            if StagePart("forward", stage_of[read]) not in places[read]:
                places[read] = (StagePart("forward", stage_of[read]), *places[read])
                stack.append(read)
