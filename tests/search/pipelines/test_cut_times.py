"""Lower bounds on the times of stages against all of their choices."""

from __future__ import annotations

import numpy as np
import pytest
from pipelinegraphs import all_choices, bytes_needed, random_joint

from splitkit.pipeline.schedules import pipeline_order
from splitkit.search.pipelines.cut_search import CutSearch, CutTimes, candidate_cuts
from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.rank_choice import RankChoice, rank_loads
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems


@pytest.mark.parametrize("seed", range(3))
def test_bounds_hold_for_all_stages_and_say_something(seed):
    flow, costs = random_joint(seed, ops=5)
    order = pipeline_order("1f1b", 2, 3)
    frontiers = StageFrontiers(StageProblems(JointPositions(flow), costs, "adam", False))
    problems, loads = frontiers.problems, rank_loads(order)
    whole = max(CutSearch(frontiers, order, None, [None] * 2).run()[0].run.peaks)
    cuts = candidate_cuts(problems, 2)  # in a piece of a single op there is nothing to recompute
    places = [(i, j) for i in range(len(cuts)) for j in range(i + 1, len(cuts))]
    every = {
        place: [(c.seconds, problems.costs_of(problem, c)) for c in all_choices(problem.savings)]
        for place in places
        for problem in [problems.problem(*cuts[[*place]].tolist())]
    }
    base = problems.seconds[cuts]
    recompute = impossible = 0
    for limit in (whole * 9 // 10, whole * 3 // 4, whole * 3 // 5, whole // 2):
        times = CutTimes(RankChoice(frontiers, loads, [limit] * 2), cuts)
        for (start, end), known in every.items():
            for stage, load in enumerate(loads):
                fits = [seconds for seconds, held in known if bytes_needed(load, [held]) <= limit]
                own, bound = base[end] - base[start], times.lower[stage, start, end]
                assert bound <= (own + min(fits, default=np.inf)) * (1 + 1e-9)
                recompute += own * (1 + 1e-9) < bound < np.inf
                impossible += bool(np.isinf(bound))
    assert recompute and impossible
