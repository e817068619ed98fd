"""`RankLoads` against simulated steps: how many microbatches, and how many bytes, a rank holds."""

from __future__ import annotations

import numpy as np
import pytest
from pipelinegraphs import bytes_needed

from splitkit.pipeline.schedules import pipeline_order
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.pipelines.rank_choice import rank_loads


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 4), ("gpipe", 3), ("interleaved-1f1b", 4), ("zbv", 4), ("zbv", 6), ("v-half", 4)]
)
def test_need_is_the_peak_without_messages(schedule, stages):
    dice, order = np.random.default_rng(0), pipeline_order(schedule, stages, 8)
    for _ in range(5):
        costs = [
            StageCosts(
                *dice.integers(1, 9, 3).astype(float).tolist(),
                saved_bytes=int(dice.integers(50, 99)),
                deferred_bytes=int(dice.integers(0, 50)),
                temporary_bytes=int(dice.integers(0, 99)),
                parameter_bytes=int(dice.integers(0, 99)),
                input_gradient_bytes=0,
            )
            for _ in range(stages)
        ]
        run = simulate_schedule(costs, order)
        loads = rank_loads(order)
        assert [bytes_needed(load, [costs[s] for s in load.stages]) for load in loads] == list(run.peaks)


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])])
def test_a_stage_surely_holds_the_microbatches_in_flight(schedule, most):
    order = pipeline_order(schedule, 4, 8)
    assert [int(load.surely()[0]) for load in rank_loads(order)] == most
