"""Find what a plan of a training step in stages computes again."""

from __future__ import annotations

from torch.fx import Node

from splitkit.plans.record import Plan
from splitkit.training.flow import JointFlow
from splitkit.training.stage_parts import StagePart, known_part

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
