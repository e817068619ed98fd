"""Turn choices of what waits into a plan with the parts ``"input"`` and ``"weight"`` of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Node

from splitkit.errors import PolicyError
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.search.deferral.deferral_problem import Deferral, with_members
from splitkit.training.checkpoints import apply_checkpoints
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow
from splitkit.training.gradient_terms import gradient_terms
from splitkit.training.stage_parts import stage_part


def plan_in_stages(flow: JointFlow, plan: Plan) -> Plan:
    """Return the plan with stages: ``"forward"`` and ``"backward"`` become those of stage 0.

    A plan of these two is completed first: with eager's places for nodes that it leaves out, and by checkpoint tags.
    Sums of gradients of a parameter over several stages are placed nowhere: the caller adds them up.

    Raises:
        PolicyError: SK302 for a plan with other parts, or whose backward is divided already.
    """
    names: dict[PartKey, PartKey] = {FORWARD: ("forward", 0), BACKWARD: ("backward", 0)}
    if names.keys() >= plan.parts.keys():
        plan = apply_checkpoints(flow, replace(plan, places={**flow.save_all.places, **plan.places}))
        plan = replace(plan, parts={key: plan.parts.get(key, Part(key)) for key in names})
        places = {n: tuple(names[key] for key in keys) for n, keys in plan.places.items()}
        return replace(plan, places=places, parts={names[k]: replace(p, key=names[k]) for k, p in plan.parts.items()})
    halves = {key: part.half for key in plan.parts if (part := stage_part(key)) is not None}
    strange = [repr(key) for key in plan.parts if halves.get(key) not in ("forward", "backward")]
    if strange or "backward" not in halves.values():
        raise PolicyError(
            "SK302",
            "SplitBackward divides the backward of each stage, and the plan has "
            + (f"a part {strange[0]}" if strange else "no backward"),
            "Give it a policy or plan with the parts 'forward' and 'backward', or ('forward', s) and ('backward', s) "
            "for stages s.",
        )
    places = with_members(flow, plan)
    gradient_terms(flow, places)
    return replace(plan, places={n: places[n] for n in plan.places})


def backward_parts(plan: Plan) -> dict[int, PartKey]:
    """Return stage -> the key of its backward, by rising stage."""
    parts = (stage_part(key) for key in plan.parts)
    return dict(sorted((part.stage, part) for part in parts if part is not None and part.half == "backward"))


def divided(plan: Plan, chosen: Mapping[int, Deferral]) -> Plan:
    """Return the plan in which each stage's backward is an input part and a weight part.

    A node in both parts has the input part first. Nodes of backward that nobody needs are dropped. Parts keep their
    device and replicas; both parts are there even if one computes nothing.

    Args:
        plan: a plan with stages.
        chosen: stage -> the choice for its backward.
    """
    halves: dict[PartKey, dict[Node, tuple[PartKey, ...]]] = {}
    for stage, choice in chosen.items():
        early, late = ("input", stage), ("weight", stage)
        rows = zip(choice.problem.ops, choice.early, choice.late, strict=True)
        halves[("backward", stage)] = {op: (early,) * bool(e) + (late,) * bool(w) for op, e, w in rows}
    places = {
        node: tuple(k for key in keys for k in (halves[key].get(node, ()) if key in halves else (key,)))
        for node, keys in plan.places.items()
    }
    parts: dict[PartKey, Part] = {}
    for key, part in plan.parts.items():
        there = stage_part(key) if key in halves else None
        keys: list[PartKey] = [key] if there is None else [("input", there.stage), ("weight", there.stage)]
        parts |= {k: replace(part, key=k) for k in keys}
    return replace(plan, places=places, parts=parts, claim=None)
