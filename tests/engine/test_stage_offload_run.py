"""Stages whose saved values wait on the host: equal numbers, exact bytes there, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from campaigns import these_first
from jointmodels import NAMES, SMALL, assert_stages_alike, captured, ran
from randomstageplans import all_on_host, random_stage_plan

from splitkit.engine.divide_stages import divide_stages
from splitkit.engine.staged_step import HostValue
from splitkit.errors import PlanError
from splitkit.memory.kernels import kernel_results
from splitkit.plans.parts import Offloaded
from splitkit.plans.record import Plan
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_plan import stage_plan

CASES = [(name, seed) for seed in range(6) for name in NAMES]
FIRST = [(name, seed) for name in [*SMALL][:4] for seed in (0, 1)]


@pytest.mark.parametrize(("name", "seed"), these_first(FIRST, [case for case in CASES if case not in FIRST]))
def test_random_stages_run_like_eager(name, seed):
    joint, args, kwargs, expected = captured(name)
    plan = all_on_host(joint.flow, random_stage_plan(joint.flow, 2 + seed % 3, seed))
    step = joint.split(plan)
    assert_stages_alike(ran(joint, step, args, kwargs), expected)
    again = Plan.from_dict(joint.graph_module.graph, json.loads(json.dumps(step.plan.to_dict())))
    assert again == step.plan and again.offloaded == plan.offloaded
    with torch.no_grad():
        _, held = step.run_forward(joint.primals(*args, **kwargs))
    kept = joint.split(replace(plan, offloaded=()))
    for stage, same, own in zip(step.stages, kept.stages, held, strict=True):
        there = [value for value in own.values() if isinstance(value, HostValue)]
        assert sum(value.host.nbytes for value in there) == stage.host_bytes == same.saved_bytes - stage.saved_bytes
        assert all(value.source is None for value in there) and len(there) == len(stage.offloaded)


def chain():
    joint = captured("chain").joint
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    return joint, stage_plan(joint.flow, {n: i * 2 // len(forward) for i, n in enumerate(forward)})


def test_a_weight_part_reads_what_has_come_back():
    seen = 0
    for name in [*SMALL][:4]:
        joint, args, kwargs, expected = captured(name)
        for seed in range(8):
            plan = random_stage_plan(joint.flow, 2, seed)
            if any(key[0] == "weight" for key in plan.parts):
                step = joint.split(all_on_host(joint.flow, plan))
                if any({*s.offloaded} & ({*s.deferred} - {*s.saved}) for s in step.stages):
                    assert_stages_alike(ran(joint, step, args, kwargs), expected)
                    seen += 1
                    break
    assert seen


def test_forward_starts_copies_and_backward_waits_right_before_the_first_reader():
    joint, plan = chain()
    stage = divide_stages(joint.flow, all_on_host(joint.flow, plan)).stages[0]
    for name in stage.offloaded:
        forward = {n.name: n for n in stage.forward.graph.nodes}
        copy = next(n for n in forward[name].users if n.target is kernel_results.TO_HOST)
        assert copy.prev is forward[name]
        given = next(n for n in stage.backward.graph.nodes if n.name == name)
        (waits,) = [n for n in given.users if n.target is kernel_results.ARRIVED]
        assert [*given.users] == [waits] and all(user.op == "call_function" for user in waits.users)
    assert "of it on the host" in str(stage)


def test_what_cannot_be_moved_is_refused():
    joint, plan = chain()
    flow = joint.flow
    nodes = {n.name: n for n in flow.scope}
    moved = nodes[divide_stages(flow, all_on_host(flow, plan)).stages[0].offloaded[0]]
    stages = divide_stages(flow, plan).stages
    late = next(n for n in flow.nodes if plan[n][0][0] == "backward")
    first = next(iter(flow.nodes))
    for one, reason in (
        (Offloaded(moved, release=first), "by their actions, not by nodes"),
        (Offloaded(moved, fetch=late), "by their actions, not by nodes"),
        (Offloaded(nodes[stages[0].sent[0]]), "does not take it from forward"),
        (Offloaded(late), "does not compute it in one stage|memory of an input|returned"),
        (Offloaded(nodes["primals_1"]), "memory of an input"),
    ):
        with pytest.raises(PlanError, match=f"SK220.*({reason})"):
            divide_stages(flow, replace(plan, offloaded=(one,)))


def test_a_value_that_crosses_a_border_stays():
    """The runtime holds what a stage has sent in any case."""
    joint = captured("branches").joint
    found = set()
    for seed in range(6):
        plan = random_stage_plan(joint.flow, 2, seed)
        nodes = {n.name: n for n in joint.flow.scope}
        for stage in divide_stages(joint.flow, plan).stages:
            for name in {*stage.held} & {*stage.sent}:
                with pytest.raises(PlanError, match="SK220") as refusal:
                    divide_stages(joint.flow, replace(plan, offloaded=(Offloaded(nodes[name]),)))
                found.add("crosses the border" in str(refusal.value))
    assert True in found
