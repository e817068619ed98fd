from __future__ import annotations

import placementcases as cases
import pytest
from hypothesis import given, settings

from splitkit.solvers.placement.anneal import Places
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.cpsat import sets_by_cpsat, stages_by_cpsat
from splitkit.solvers.placement.evaluate import faults, loads
from splitkit.solvers.placement.groups import coloured, fused
from splitkit.solvers.placement.sets.packing import packed
from splitkit.solvers.placement.stages.ladder import ladder
from splitkit.solvers.placement.stages.search import StageSearch
from splitkit.solvers.placement.stages.stages import StageRanks, stage_loads

pytest.importorskip("ortools")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases.problems(units=5))
def test_stages_equal_brute_force(problem):
    core = core_of(problem, fused(problem)).reversed()
    steps = ladder(core, problem.in_flight, ordered=problem.ordered, fill=problem.fill)
    search = StageSearch(core, steps, 60, joinable=False)
    search.along_orders()
    if not search.best:
        return
    worse = StageRanks(search.best.value + 1, search.best.rank, search.best.kinds)  # so that the best is found again
    found, bound = stages_by_cpsat(core, steps, worse, 20)
    best = cases.best_stages(problem) * core.scale
    assert found.value == pytest.approx(best, rel=1e-5)
    assert bound <= best * (1 + 1e-9)
    assert stage_loads(core, found.rank, found.kinds).max() == found.value


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases.problems(units=5))
def test_sets_equal_brute_force(problem):
    core = core_of(problem, coloured(problem))
    places = Places.of_problem(problem, core)
    start = packed(core, places)
    if start is None or problem.in_flight:
        return
    limit = int(loads(problem, start[core.group]).max() * core.scale * (1 + 1e-6)) + 1
    device, bound = sets_by_cpsat(core, start, limit, problem.fill, 20)
    assert not faults(problem, device[core.group])
    best = cases.best_sets(problem)
    assert loads(problem, device[core.group]).max() == pytest.approx(best, rel=1e-5, abs=1e-6)
    assert bound / core.scale <= best * (1 + 1e-9) + 1e-9
