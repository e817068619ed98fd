"""The hull of a stage against all of its choices: no bound is above the best choice, and corners reach theirs."""

from __future__ import annotations

import numpy as np
import pytest
from pipelinegraphs import all_choices, random_joint

from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.search.recompute.pareto_cuts import Hull


@pytest.mark.parametrize("seed", range(8))
def test_bounds_hold_and_corners_reach_them(seed):
    flow, costs = random_joint(seed, ops=5)
    problems = StageProblems(JointPositions(flow), costs, "adam", False)
    savings = problems.problem(0, len(problems.positions.forward)).savings
    every, hull = all_choices(savings), Hull(savings)
    sizes = sorted({choice.nbytes for choice in every})
    for nbytes in np.linspace(sizes[0] - 1, sizes[-1] + 1, 15).tolist():
        best = min((choice.seconds for choice in every if choice.nbytes <= nbytes), default=np.inf)
        assert hull.bound(nbytes) <= best * (1 + 1e-9) and np.isinf(hull.bound(nbytes)) == np.isinf(best)
    assert len(hull.choices) > 1
    for choice in hull.choices:
        best = min(other.seconds for other in every if other.nbytes <= choice.nbytes)
        assert choice.seconds == best == pytest.approx(hull.bound(choice.nbytes), rel=1e-9)
