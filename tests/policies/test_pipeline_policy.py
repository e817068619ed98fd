"""The policy `Pipeline`: its plans run like eager mode, keep to the memory, and say what they are."""

from __future__ import annotations

import json
from functools import cache

import pytest
from campaigns import these_first
from jointmodels import NAMES, SMALL, assert_stages_alike, captured, ran
from lawtables import STAGED_LAWS
from pipelinegraphs import random_joint

from splitkit.costs import roofline
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import NoPlanError, PolicyError, ScheduleError
from splitkit.plans.record import Plan
from splitkit.policies import Pipeline
from splitkit.search.pipelines.joint_positions import JointPositions, staged_plan
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.training.stage_parts import stage_part


@cache
def prices(name):
    return roofline(captured(name).joint.graph_module, "h100")


SOME = [(name, "Pipeline") for name in [*SMALL][:3]]
CASES = [(name, policy) for name in NAMES for policy in STAGED_LAWS if isinstance(STAGED_LAWS[policy], Pipeline)]


@pytest.mark.parametrize(("name", "policy"), these_first(SOME, [case for case in CASES if case not in SOME]))
def test_stages_run_like_eager(name, policy):
    joint, args, kwargs, expected = captured(name)
    plan = STAGED_LAWS[policy].assign(joint.flow, prices(name))
    step = joint.split(plan)
    assert isinstance(step, StagedStep) and len(step.stages) == STAGED_LAWS[policy].n
    assert_stages_alike(ran(joint, step, args, kwargs), expected)
    again = Plan.from_dict(joint.graph_module.graph, json.loads(json.dumps(plan.to_dict())))
    assert again == plan and all(stage_part(key) for key in plan.parts)


@pytest.mark.parametrize("name", these_first(["chain"], ["gpt2", "llama", "t5"]))
def test_recompute_in_little_memory_runs_like_eager(name):
    joint, args, kwargs, expected = captured(name)
    with pytest.raises(NoPlanError) as refusal:
        Pipeline(2, microbatches=4, memory=1).assign(joint.flow, prices(name))
    plan = refusal.value.nearest
    assert any(len(keys) > 1 for keys in plan.places.values())
    assert_stages_alike(ran(joint, joint.split(plan), args, kwargs), expected)


def test_a_refusal_names_memory_that_fits():
    flow, costs = random_joint(3, ops=4)
    with pytest.raises(NoPlanError, match=r"SK303.*fit 1 B") as refusal:
        Pipeline(2, microbatches=3, memory=1).assign(flow, costs)
    enough = int(str(refusal.value.remedy).split("memory=")[1].split(")")[0])
    plan = Pipeline(2, microbatches=3, memory=enough).assign(flow, costs)
    assert plan.claim.objective == "step" and plan.claim.bound <= plan.claim.value
    assert "Rank" in plan.note and "optimizer" in plan.note and stage_part(plan.claim.limiting)


def test_one_stage_sends_nothing_over_links():
    flow, costs = random_joint(3, ops=4)
    plans = [Pipeline(1, microbatches=3, links=links).assign(flow, costs) for links in ("nvlink4", None)]
    assert plans[0].places == plans[1].places and plans[0].claim == plans[1].claim


def test_without_recompute_nothing_that_can_be_saved_runs_again():
    flow, costs = random_joint(3, ops=4)
    plan = Pipeline(2, microbatches=3, recompute=False).assign(flow, costs)
    assert all(len(keys) == 1 for keys in plan.places.values())


def test_numbers_that_do_not_go_together_are_refused():
    flow, costs = random_joint(3, ops=4)
    with pytest.raises(NoPlanError, match="can be cut into"):
        Pipeline(6, "gpipe").assign(flow, costs)
    with pytest.raises(ScheduleError, match="SK330"):
        Pipeline(3, "zbv")
    with pytest.raises(PolicyError, match="recompute"):
        Pipeline(3, recompute="yes")


@pytest.mark.parametrize("name", these_first(["chain", "normed"], ["gpt2", "llama", "t5"]))
def test_stages_hold_and_send_what_the_plan_counted_on(name):
    joint = captured(name).joint
    frontiers = StageFrontiers(StageProblems(JointPositions(joint.flow), prices(name), "adam", divided=False))
    positions = frontiers.problems.positions
    size = len(positions.forward)
    for cut in positions.legal[:: max(1, len(positions.legal) // 8)].tolist():
        spans = [(0, cut), (cut, size)]
        for corner in (0, -1):
            points = [frontiers.of(*span).corners()[corner] for span in spans]
            choices = [frontiers.choice(*span, point) for span, point in zip(spans, points, strict=True)]
            costs = [frontiers.costs(*span, point) for span, point in zip(spans, points, strict=True)]
            step = joint.split(staged_plan(frontiers.problems.members, (cut, size), choices, ""))
            first = step.stages[0]
            sent = max(first.sent_bytes, sum(first.storages(first.sent).values()))  # a view keeps its storage
            for stage, counted in zip(step.stages, costs, strict=True):
                assert stage.sent_bytes == counted.activation_bytes
                assert stage.gradients_sent_bytes == counted.input_gradient_bytes
                assert stage.saved_bytes <= counted.saved_bytes <= stage.saved_bytes + sent
