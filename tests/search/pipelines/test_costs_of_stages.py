"""What the planner counts of a stage is what `StagedStep.stage_costs` reads off the stages that the engine makes."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from campaigns import these_first
from jointmodels import NAMES, captured
from trainingnets import random_training_graph

import splitkit as sk
from splitkit.plans.rewrite import prune
from splitkit.policies import Pipeline
from splitkit.search.pipelines.joint_positions import JointPositions, staged_plan
from splitkit.search.pipelines.stage_problems import StageProblems


def assert_same_costs(joint, costs, seed, tries=3):
    problems = StageProblems(JointPositions(joint.flow), costs, "adam", False)
    legal, dice = problems.positions.legal.tolist(), random.Random(seed)
    for share in (0.0, 0.4, 1.0)[:tries]:
        cuts = sorted(dice.sample(legal, min(dice.randint(1, 3), len(legal))))
        ends = (*cuts, len(problems.positions.forward))
        given = [problems.problem(*span) for span in zip((0, *cuts), ends, strict=True)]
        choices = [p.savings.choose(np.array([dice.random() < share for _ in p.ops], np.bool_)) for p in given]
        counted = [problems.costs_of(*pair) for pair in zip(given, choices, strict=True)]
        plan = staged_plan(problems.members, ends, choices, "")
        assert prune(joint.flow, plan) == plan
        found = joint.split(plan).stage_costs(costs)
        assert [replace(c, deferred_bytes=0) for c in counted] == list(found)


@pytest.mark.parametrize("seed", these_first([0, 5, 11], range(100)))
def test_random_nets(seed):
    assert_same_costs(*random_training_graph(seed), seed)


@pytest.mark.parametrize("name", these_first(["conv", "chain"], NAMES))
def test_models(name):
    joint = captured(name).joint
    assert_same_costs(joint, sk.costs.unit(joint.graph_module), 0, tries=2)


def test_a_claim_is_the_step_of_these_costs():
    joint, costs = random_training_graph(5)
    for memory in (None, "40KiB"):
        plan = Pipeline(2, "1f1b", 6, memory).assign(joint.flow, costs)
        step = sk.simulate_schedule(joint.split(plan).stage_costs(costs), "1f1b", 6)
        assert plan.claim.value == step.seconds
