"""Windows, least crossings and the relaxation within them exclude no stages that there are; walks keep to all."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import placementcases as cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import DeviceTable
from splitkit.solvers.placement.contract import simple_bound
from splitkit.solvers.placement.core import acyclic_groups, core_of
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.solution import faults, loads
from splitkit.solvers.placement.stages.border_bound import (
    BorderBound,
    _Program,
    border_bound,
    borders_apply,
    stage_relaxation,
)
from splitkit.solvers.placement.stages.contiguous import contiguous
from splitkit.solvers.placement.stages.order_dp import device_steps, stage_loads
from splitkit.solvers.placement.stages.stage_solver import UnitAnnealing


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases.problems(units=5), st.booleans())
def test_no_stages_are_better_than_what_crosses_the_borders_allows(problem, back):
    core = core_of(problem, acyclic_groups(problem))
    best = cases.best_stages(problem)
    if best == cases.INF or core.barred.all(axis=0).any():
        return
    most = int(1.5 * best * core.scale) + 2
    turned = core.reversed() if back else core
    assert border_bound(turned, 0, most) <= best * core.scale + core.slack + 1
    steps = device_steps(core, problem.in_flight, ordered=problem.ordered, fill=problem.fill)
    relaxed = stage_relaxation(core.reversed(), steps, 0, most, Clock(60))
    assert relaxed <= (best * core.scale + core.slack) * (1 + 1e-6) + 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases.problems(units=5), st.sampled_from([0, 1]))
def test_windows_hold_all_stages_below_the_limit(problem, more):
    """Each chain of ideals whose loads are below the limit lies in the windows; without one there need be none."""
    core = core_of(problem, acyclic_groups(problem))
    count = len(problem.devices)
    if not borders_apply(core) or core.barred.any():
        return
    legal = [
        (np.array(rank), kinds)
        for rank in product(range(count), repeat=core.size)
        if all(rank[a] <= rank[b] for a, b in core.edges.tolist())
        for kinds in {tuple(k) for k in permutations([i for i, kind in enumerate(core.kinds) for _ in kind.devices])}
    ]
    values = [int(stage_loads(core, rank, kinds).max()) for rank, kinds in legal]
    limit = min(values) + more
    found = BorderBound.of(core).windows(limit)
    for (rank, _), value in zip(legal, values, strict=True):
        if value >= limit:
            continue
        assert found is not None
        inside, outside = found
        for border in range(count + 1):
            assert (rank[inside[border]] < border).all() and (rank[outside[border]] >= border).all()


def layers(wide: int, deep: int, cost: float, devices: int) -> Problem:
    """Layers of equal units, each of which reads two of the layer before."""
    edges = [
        (layer * wide + (i + step) % wide, (layer + 1) * wide + i)
        for layer in range(deep - 1)
        for i in range(wide)
        for step in (0, 1)
    ]
    readers: dict[int, list[int]] = {}
    for first, then in edges:
        readers.setdefault(first, []).append(then)
    nets = [(cost, (first, *those)) for first, those in readers.items()]
    return Problem.of(np.ones((1, wide * deep)), nets, edges, [Slot()] * devices)


@pytest.mark.parametrize("share, solved", [(0.0, 1), (0.5, 2), (1e9, 3)])
def test_a_relaxation_that_excludes_nothing_is_solved_once(monkeypatch, share, solved):
    """Where the lowest of the limits that may come is excluded, what it told is the next."""
    problem = layers(4, 6, 0.1, 3)
    core = core_of(problem, acyclic_groups(problem))
    asked = []
    high = int(core.least_work.sum())
    low = high // 2
    told = int(low + share * (high - low))
    monkeypatch.setattr(_Program, "relaxed", lambda self, *_: asked.append(self._limit) or (told, 0))
    steps = device_steps(core, (), ordered=False, fill=False)
    found = stage_relaxation(core.reversed(), steps, low, high, Clock(60))
    assert 1 <= len(asked) <= solved and asked == sorted(asked) and asked[-1] <= high
    assert found == min(max(low, told), high)


def test_what_a_relaxation_tells_is_a_bound():
    """HiGHS gives no dual bound where no column is whole; taken from there, it was nothing."""
    problem = layers(8, 6, 0.3, 3)
    core = core_of(problem, acyclic_groups(problem)).reversed()
    low, high = (int(core.scale * value) for value in (16, 24))
    assert border_bound(core, low, high) == low
    relaxed = stage_relaxation(core, device_steps(core, (), ordered=False, fill=False), low, high, Clock(60))
    assert 17.0 <= relaxed / core.scale <= contiguous(problem).value


def test_two_stages_of_equal_layers_are_proven_to_be_the_best():
    """The cut between two layers is the least that crosses, and both stages pay for it: 40 units and 8 nets each."""
    problem = layers(8, 10, 0.5, 2)
    core = core_of(problem, acyclic_groups(problem))
    even = np.repeat([0, 1], 40)
    value = loads(problem, even).max()
    assert value == 44.0 and not faults(problem, even, (0, 1))
    assert simple_bound(core) / core.scale == pytest.approx(40.0)
    assert border_bound(core, simple_bound(core), int(value * core.scale)) / core.scale == pytest.approx(44.0, rel=1e-3)


def test_a_cpu_is_free_to_hold_everything():
    problem = Problem.of(np.ones((1, 3)), [(5.0, (0, 1, 2))], [(0, 1), (1, 2)], [Slot(), Slot(cpu=True)])
    core = core_of(problem, acyclic_groups(problem))
    assert border_bound(core, 1, 100) == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases.problems(units=6, plain=True))
def test_a_walk_keeps_to_everything_and_is_never_worse(problem):
    """Its value is that of its placement by definition, no edge goes back, memory holds, no stage to fill is empty."""
    if problem.ordered or problem.in_flight:
        return
    core = core_of(problem, acyclic_groups(problem))
    kinds = tuple(i for i, kind in enumerate(core.kinds) for _ in kind.devices)
    places = DeviceTable.of(core, kinds, (0,) * len(kinds), fill=problem.fill)
    starts = (
        np.array(rank)
        for rank in product(range(len(kinds)), repeat=core.size)
        if all(rank[a] <= rank[b] for a, b in core.edges.tolist()) and _may(core, places, np.array(rank))
    )
    start = next(starts, None)
    if start is None:
        return
    walk = UnitAnnealing(core, places, start)
    walk.run(10_000, Clock(60))
    assert _may(core, places, walk.best) and (walk.best[core.edges[:, 0]] <= walk.best[core.edges[:, 1]]).all()
    found = stage_loads(core, walk.best, kinds).max() / core.scale
    assert walk.value == pytest.approx(found, abs=1e-9)
    assert found <= stage_loads(core, start, kinds).max() / core.scale + 1e-9


def _may(core, places, rank) -> bool:
    held = np.bincount(rank, places.nbytes[rank, np.arange(core.size)], len(places.work))
    whole = not places.fill or len(set(rank.tolist())) == len(places.work)
    return bool(
        whole and (held <= places.capacity).all() and np.isfinite(places.work[rank, np.arange(core.size)]).all()
    )


def test_a_walk_finds_even_layers_from_an_uneven_start():
    problem = layers(6, 12, 0.1, 3)
    core = core_of(problem, acyclic_groups(problem))
    places = DeviceTable.of(core, (0, 0, 0), (0, 0, 0), fill=False)
    start = np.repeat([0, 1, 2], [60, 6, 6])
    walk = UnitAnnealing(core, places, start)
    walk.run(200_000, Clock(60))
    assert walk.value <= 24.0 + 12 * 0.1 + 0.5
