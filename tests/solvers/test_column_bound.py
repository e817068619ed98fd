"""The dual of mixtures of cuts: below every plan, and equal to the linear program where it converges."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from splitkit.solvers.line.column_bound import CutMaster, StageColumn
from splitkit.solvers.line.path_bound import least_sum


@pytest.mark.parametrize("seed", range(20))
def test_the_least_cuts_are_those_of_all(seed):
    random = np.random.default_rng(seed)
    stages, size = int(random.integers(1, 4)), 6
    costs = random.integers(0, 50, (stages, size, size)).astype(float)
    costs[:, np.tri(size, dtype=bool)] = np.inf
    every = {(*inner, size - 1) for inner in combinations(range(1, size - 1), stages - 1)}
    sums = {ends: sum(costs[s, i, j] for s, (i, j) in enumerate(pairwise((0, *ends)))) for ends in every}
    least = least_sum(costs, np.zeros(size), np.inf)
    assert least.value == min(sums.values()) == sums[least.ends]


@pytest.mark.parametrize("seed", range(10))
def test_duals_of_all_columns_prove_the_value_of_the_program(seed):
    random = np.random.default_rng(seed)
    stages, size, paths = 3, 5, 4
    limits = random.integers(20, 60, 2).astype(float)
    times = random.integers(1, 9, (stages, size, size, 2)).astype(float)
    loads = random.integers(0, 30, (stages, size, size, 2)).astype(float)
    counts = random.integers(0, 4, (paths, stages, 2)).astype(float) + 0.5
    master = CutMaster(limits)
    for s, i, j in np.ndindex(stages, size, size):
        if i < j and (s or not i) and (s < stages - 1 or j == size - 1):
            master.add_column(StageColumn(s, i, j, times[s, i, j], loads[s, i, j]))
    assert not master.has_paths
    assert all(master.add_path(path) for path in counts) and not master.add_path(counts[0])
    dual = master.solve()
    costs = np.einsum("sijt,st->sij", times, dual.times) + loads @ dual.loads
    costs[:, np.tri(size, dtype=bool)] = np.inf
    bound = least_sum(costs, np.zeros(size), np.inf).value - dual.loads @ limits
    assert bound == pytest.approx(dual.value)
    assert (dual.loads >= 0).all()
    assert dual.longest == pytest.approx(max((path * dual.mean).sum() for path in counts))
    for inner in combinations(range(1, size - 1), stages - 1):
        spans = list(enumerate(pairwise((0, *inner, size - 1))))
        if (sum(loads[s, i, j] for s, (i, j) in spans) <= limits).all():
            longest = max(sum(path[s] @ times[s, i, j] for s, (i, j) in spans) for path in counts)
            assert bound <= longest + 1e-9
