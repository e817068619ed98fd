"""Turns cuts of a joint graph, and what its stages save, into a plan with the parts of stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.search.pipelines.stage_members import StageMembers
from splitkit.training.choices import Choice
from splitkit.training.stage_parts import StagePart


def staged_plan(members: StageMembers, ends: Sequence[int], choices: Sequence[Choice], note: str) -> Plan:
    """Return the plan of a joint graph with the parts ``("forward", s)`` and ``("backward", s)``.

    Nodes that are computed again have both, and nodes that nothing needs have none.

    Args:
        members: the ops of all stages.
        ends: the position behind each stage.
        choices: what each stage saves and computes again.
        note: what made the plan.
    """
    places: dict[Node, tuple[PartKey, ...]] = dict.fromkeys(members.positions.flow.nodes, ())
    starts = (0, *ends[:-1])
    for stage, (start, end, choice) in enumerate(zip(starts, ends, choices, strict=True)):
        parts_here = StagePart("forward", stage), StagePart("backward", stage)
        for part, ops in zip(parts_here, members.of(start, end, choice), strict=True):
            for node in members.order.nodes(ops):
                if node in places:
                    places[node] += (part,)
    parts = [StagePart("forward", s) for s in range(len(ends))]
    parts += [StagePart("backward", s) for s in reversed(range(len(ends)))]
    return Plan(places, {key: Part(key) for key in parts}, note=note)
