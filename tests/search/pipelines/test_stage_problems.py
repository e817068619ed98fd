"""What stages hold in any case: parameters, and gradients and optimizer state of the trained parameters."""

from __future__ import annotations

import pytest
from jointgraphs import Hand
from pipelinegraphs import Prices

from splitkit.pipeline.schedules import pipeline_order
from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.rank_choice import RankChoice, rank_loads
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems

KIB = 1024


@pytest.mark.parametrize(("optimizer", "state"), [(None, 0), ("sgd", 0), ("momentum", 1), ("adam", 2)])
def test_what_is_not_trained_has_no_gradient_and_no_state(optimizer, state):
    h = Hand().inputs(w=2, x=3).op("f0", 1, "x", "w").op("f1", 1, "f0").gradients(t=1)
    flow = h.back("g1", 1, "t", "f0").back("gw", 2, "g1", "x").flow("f1", "gw")
    frontiers = StageFrontiers(StageProblems(JointPositions(flow), Prices({}), optimizer, False))
    costs = frontiers.costs(0, 2, frontiers.of(0, 2).corners()[0])
    assert (costs.parameter_bytes, costs.gradient_bytes, costs.optimizer_bytes) == (5 * KIB, 2 * KIB, 2 * state * KIB)
    choices = RankChoice(frontiers, rank_loads(pipeline_order("gpipe", 1, 1)), [None])
    assert choices.fixed((0, 2)) == costs.fixed_bytes
