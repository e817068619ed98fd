"""Check that a staged plan of a joint graph keeps what the graph does to memory, random numbers and the world."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from splitkit.engine.joint_stages.stage_traffic import StageLine
from splitkit.errors import CycleError, PlanError
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow
from splitkit.training.stage_parts import FULL_BACKWARD, SPLIT_BACKWARD, known_part, stage_part

_REMEDY = "Use a policy that divides a training step into stages, such as splitkit.extend.stage_plan makes."


def stage_line(plan: Plan) -> StageLine:
    """Return the parts of a staged plan in their order.

    Raises:
        PlanError: SK206 for a part that is not of a stage, a number that is left out, or a stage with both
            ``"backward"`` and ``"input"`` or ``"weight"``.
    """
    halves: dict[int, set[str]] = {}
    for key in plan.parts:
        part = stage_part(key)
        if part is None:
            raise PlanError(
                "SK206",
                f"{key!r} is not part of a stage, unlike the other parts of this plan",
                f"Parts of stages are {', '.join(repr((half, 0)) for half in FULL_BACKWARD)}, and so on, or "
                f"{', '.join(repr((half, 0)) for half in SPLIT_BACKWARD)}.",
            )
        halves.setdefault(part.stage, set()).add(part.half)
    count = max(halves) + 1
    if missing := [stage for stage in range(count) if stage not in halves]:
        raise PlanError("SK206", f"stage {missing[0]} of {count} has no nodes", "Number stages from 0.")
    for stage, found in sorted(halves.items()):
        if "backward" in found and found & {"input", "weight"}:
            raise PlanError(
                "SK206",
                f"stage {stage} has parts {sorted(found)}",
                "Its backward is either one part, 'backward', or two, 'input' and 'weight'.",
            )
    return StageLine(tuple(bool(halves[stage] & {"input", "weight"}) for stage in range(count)))


def check_effects(flow: JointFlow, plan: Plan, line: StageLine) -> None:
    """Refuse an effect in the other half than under eager autograd, in a weight part, or in another order.

    Raises:
        PlanError: SK210 for an effect in a half or part where it may run too late, or never.
        CycleError: SK203 for a node that would run before an effect that it must follow.
    """
    home = flow.save_all
    when: dict[PartKey, int] = {part: i for i, part in enumerate(line.parts)}
    for node, reason in flow.once.items():
        producer = flow.producer(node)
        if producer not in home or not plan[producer]:
            continue
        part = known_part(plan[producer][0])
        expected = home.home(producer)
        half = FORWARD if part.half == "forward" else BACKWARD
        if half != expected or part.half == "weight":
            raise PlanError(
                "SK210",
                f"{producer.name} is planned in {tuple(part)!r}, but it belongs to {expected!r}: {reason}",
                "Leave it in the half where splitkit.training.flow.save_all_plan has it, and not in 'weight', which "
                "may run much later.",
                [producer],
            )
    for node in flow.nodes:
        for before in flow.after.get(node, ()):
            _check_after(node, before, plan, when, home)


def _check_after(node: Node, before: Node, plan: Plan, when: Mapping[PartKey, int], home: Plan) -> None:
    """Refuse a copy of ``node`` that runs before a copy of ``before`` in the same half."""
    # A copy that backward recomputes follows the whole of forward, so only effects of its own half can come too late.
    for key in plan[node]:
        for earlier in plan.get(before, ()):
            same_half = (known_part(key).half == "forward") == (home.get(before) == (FORWARD,))
            if when[earlier] > when[key] and same_half:
                raise CycleError(
                    "SK203",
                    f"{node.name} must run after {before.name}, an effect or a read, but is planned in "
                    f"{tuple(known_part(key))!r}, which runs before {tuple(known_part(earlier))!r}",
                    f"Place {before.name}, and what it reads, in the part of {node.name}, or earlier.",
                    [node, before],
                )
