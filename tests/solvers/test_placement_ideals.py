from __future__ import annotations

from itertools import combinations

import numpy as np
import placementcases as cases
import pytest
from campaigns import these_first

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import acyclic_groups, core_of
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.stages.ideal_dp import Effort, _most_held, best_stages, ideals
from splitkit.solvers.placement.stages.order_dp import device_steps


@pytest.mark.parametrize("slower", these_first([1.0, 2.0], [1.5, 5.0]))
def test_a_device_that_is_slower_at_everything_pays_the_same_for_nets(slower):
    random = np.random.default_rng(0)
    for _ in range(40):
        seconds, chain = random.integers(1, 9, 5).astype(float), [(unit, unit + 1) for unit in range(4)]
        nets = [(float(random.integers(0, 5)), pair) for pair in chain]
        problem = Problem.of(np.array([seconds * slower, seconds]), nets, chain, [Slot(0), Slot(1), Slot(0)])
        core = core_of(problem, acyclic_groups(problem)).reversed()
        steps = device_steps(core, (), ordered=False, fill=False)
        best = cases.best_stages(problem) * core.scale
        effort, order = Effort(10**9, Clock(60)), np.arange(core.size)[::-1]
        found, bound = best_stages(
            core, steps, int(best) + 2, ideals(core, steps, int(best) + 2, order, effort), effort
        )
        assert found is not None
        assert bound == found.value == pytest.approx(best)


def test_the_most_that_a_device_holds_is_never_less_than_it_can():
    random = np.random.default_rng(0)
    for _ in range(100):
        size, limit = int(random.integers(1, 7)), int(random.integers(0, 12))
        work, held = random.integers(0, 5, size) * random.integers(0, 2, size), random.integers(0, 30, size)
        sets = (list(units) for count in range(size + 1) for units in combinations(range(size), count))
        assert _most_held(held, work, limit) >= max(held[s].sum() for s in sets if work[s].sum() <= limit)
