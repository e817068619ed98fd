"""Make random plans of a joint graph in pipeline stages, for fuzzing what divides and runs them."""

from __future__ import annotations

import random
from dataclasses import replace

from torch.fx import Node

from splitkit.engine.divide_stages import divide_stages
from splitkit.errors import PlanError
from splitkit.graph.dataflow import readers_of
from splitkit.plans.parts import Offloaded, Part, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, output_nodes, save_all_plan, unrepeatable
from splitkit.training.offload_timeline import why_not_moved
from splitkit.training.stage_parts import StagePart, known_part
from splitkit.training.stage_plan import stage_plan


def random_stage_plan(flow: JointFlow, stages: int, seed: int) -> Plan:
    """Return a legal plan with up to so many stages, cut anywhere, which recomputes and defers at random.

    A third of the plans recompute nothing, and every stage has its weight gradients apart with a chance of one half.
    """
    dice = random.Random(seed)
    forward = [n for n in flow.nodes if FORWARD in save_all_plan(flow)[n]]
    cuts = sorted(dice.randrange(len(forward) + 1) for _ in range(stages - 1))
    numbers = [sum(i >= cut for cut in cuts) for i in range(len(forward))]
    dense = {number: i for i, number in enumerate(sorted(set(numbers)))}
    given = {node: dense[number] for node, number in zip(forward, numbers, strict=True)}
    plan = stage_plan(flow, given, _recomputing(flow, dice))
    for stage in sorted(set(given.values())):
        if dice.random() < 0.5:
            plan = _deferred(flow, plan, stage, dice)
    return plan


def _recomputing(flow: JointFlow, dice: random.Random) -> Plan:
    """Return a plan of forward and backward that recomputes random nodes."""
    plan, share, fixed = save_all_plan(flow), dice.choice([0.0, 0.3, 0.8]), unrepeatable(flow)
    again = [n for n in flow.nodes if plan[n] == (FORWARD,) and n not in fixed and dice.random() < share]
    return prune(flow, plan.place(dict.fromkeys(again, (FORWARD, BACKWARD)))) if again else plan


def _deferred(flow: JointFlow, plan: Plan, stage: int, dice: random.Random) -> Plan:
    """Return the plan in which a random part of a stage's backward that nothing else waits for runs later."""
    backward, late, share = StagePart("backward", stage), StagePart("weight", stage), dice.choice([0.5, 1.0])
    places: dict[Node, tuple[PartKey, ...]] = {}
    returned, readers = set(output_nodes(flow.gradients)), readers_of(flow)
    for node in reversed(flow.nodes):
        keys = places.get(node, plan[node])
        if backward not in keys:
            continue
        keys_of_users = (k for user in readers[node] for k in places.get(user, plan[user]))
        others = {key for key in keys_of_users if known_part(key).half != FORWARD}
        free = others <= {late} and (bool(others) or node in returned) and node not in flow.once
        moved = late if free and dice.random() < share else StagePart("input", stage)
        places[node] = tuple(moved if key == backward else key for key in keys)
    parts = dict(plan.parts)
    del parts[backward]
    parts |= {key: Part(key) for key in (StagePart("input", stage), late)}
    return replace(plan, places={n: places.get(n, keys) for n, keys in plan.items()}, parts=parts)


def all_on_host(flow: JointFlow, plan: Plan) -> Plan:
    """Return a staged plan with all saved values on the host that can wait there."""
    nodes = {node.name: node for node in flow.scope}
    held = dict.fromkeys(nodes[name] for stage in divide_stages(flow, plan).stages for name in stage.held)
    moved = [value for value in held if not why_not_moved(flow, value)]
    while True:
        found = replace(plan, offloaded=tuple(map(Offloaded, moved)))
        try:
            divide_stages(flow, found)
        except PlanError as error:
            if error.code != "SK220":
                raise
            moved.remove(nodes[error.nodes[0]])
        else:
            return found
