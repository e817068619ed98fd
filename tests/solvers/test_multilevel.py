"""Multilevel placement: never below the optimum, never above the best along orders, the same on every machine."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import numpy as np
import placementcases as cases
import pytest
from campaigns import few_of_many, these_first
from hypothesis import strategies as st

from splitkit.solvers import clock
from splitkit.solvers.placement import mip
from splitkit.solvers.placement.colocation import acyclic_groups, strong_components
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.evaluate import faults
from splitkit.solvers.placement.multilevel import multilevel
from splitkit.solvers.placement.multilevel.coarsen import coarsen
from splitkit.solvers.placement.multilevel.multilevel import MOST_EXACT
from splitkit.solvers.placement.multilevel.refine import refine_stages
from splitkit.solvers.placement.multilevel.vcycle import VCycle
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.solution import InfeasibleError
from splitkit.solvers.placement.stages import contiguous
from splitkit.solvers.placement.stages.device_steps import device_steps
from splitkit.solvers.placement.stages.stage_loads import StageRanks, stage_loads
from splitkit.solvers.placement.stages.stage_solver import StageSearch


def layered(count, devices, *, width=20, seed=0, **options):
    """A random graph in layers; a node reads one to three of the layer before."""
    random = np.random.default_rng(seed)
    edges = set()
    for node in range(width, count):
        start = node // width * width - width
        edges |= {(start + int(i), node) for i in random.integers(0, width, int(random.integers(1, 4)))}
    readers = {}
    for a, b in sorted(edges):
        readers.setdefault(a, []).append(b)
    nets = [(float(random.uniform(0, 0.5)), (a, *those)) for a, those in readers.items()]
    seconds = random.lognormal(0, 1, count)
    specs = options.pop("specs", [Slot()] * devices)
    return Problem.of(seconds, nets, sorted(edges), specs, **options)


def searched(problem):
    core = core_of(problem, acyclic_groups(problem))
    steps = device_steps(core, problem.in_flight, ordered=problem.ordered, fill=problem.fill)
    return StageSearch(core.reversed(), steps, 1e9, joinable=False)


@few_of_many(15, 60, cases.problems(units=6))
def test_a_small_problem_has_the_placement_of_contiguous(problem):
    try:
        known = contiguous.contiguous(problem)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            multilevel.multilevel(problem)
        return
    found = multilevel.multilevel(problem)
    assert found.value == known.value and np.array_equal(found.device, known.device)


def without_contiguous(problem):
    """What orders and coarser cores find."""
    core = core_of(problem, acyclic_groups(problem))
    return multilevel._found(problem, core, multilevel.SECONDS, None, time.monotonic())


@few_of_many(30, 150, cases.problems(units=6))
def test_no_value_is_below_the_optimum_and_no_bound_above_it(problem):
    core = core_of(problem, acyclic_groups(problem))
    if core.barred.all(axis=0).any():
        return
    found, best = without_contiguous(problem), cases.best_stages(problem)
    if found is None:
        return
    assert found.value >= best * (1 - 1e-9) and found.bound <= best * (1 + 1e-9)
    assert max(cases.load_by_definition(problem, found.device.tolist())) == pytest.approx(found.value)
    assert not faults(problem, found.device, found.order)


@pytest.mark.parametrize("seeds", these_first([range(4)], [range(4, 40)]), ids=str)
def test_small_random_graphs_are_placed_near_the_optimum(seeds):
    ratios = []
    for seed in seeds:
        problem = layered(7, 3, width=2, seed=seed)
        best = cases.best_stages(problem)
        ratios.append(without_contiguous(problem).value / best)
    assert min(ratios) >= 1 - 1e-9 and np.mean(ratios) < 1.02 and max(ratios) < 1.2


def test_of_contiguous_and_this_the_lesser_value_is_taken_with_the_greater_bound():
    problem = layered(600, 8, width=30)
    known = contiguous.contiguous(problem, seconds=0.2)
    found = multilevel.multilevel(problem, seconds=0.2)
    assert found.value < 0.99 * known.value and known.bound <= found.bound <= found.value
    assert found.solver.startswith("multilevel, ") and not faults(problem, found.device, found.order)


@few_of_many(15, 40, st.integers(0, 10**6), st.integers(2, 30), st.booleans())
def test_coarser_cores_have_no_cycles_and_all_the_work(seed, width, staged):
    problem = layered(400, 4, width=width, seed=seed, nbytes=np.random.default_rng(seed).integers(0, 9, 400))
    core = core_of(problem, acyclic_groups(problem)).reversed()
    stage = np.arange(core.size) // 100 if staged else None
    levels = coarsen(core, 40, stage, seed)
    assert levels and levels[-1].core.size < 200
    for finer, level in zip([core, *(level.core for level in levels)], levels, strict=False):
        coarse = level.core
        assert coarse.size < finer.size and np.array_equal(np.unique(level.label), np.arange(coarse.size))
        assert strong_components(coarse.edges, coarse.size).max() + 1 == coarse.size
        assert coarse.work.sum() == core.work.sum() and coarse.nbytes.sum() == core.nbytes.sum()
        ends = np.unique(level.label[finer.edges], axis=0)
        assert np.array_equal(ends[ends[:, 0] != ends[:, 1]], coarse.edges)
        if stage is not None:
            assert len(np.unique(np.stack([level.label, stage]), axis=1).T) == coarse.size
            stage = stage[np.unique(level.label, return_index=True)[1]]
        rank = np.random.default_rng(seed).integers(0, 3, coarse.size)  # twins that became one cost as much
        assert np.array_equal(stage_loads(coarse, rank, (0,) * 3), stage_loads(finer, rank[level.label], (0,) * 3))


@few_of_many(20, 40, st.integers(0, 10**6), st.booleans())
def test_refined_stages_are_no_worse_and_fit_and_go_one_way(seed, limited):
    random = np.random.default_rng(seed)
    nbytes, saved = random.integers(0, 9, 120), random.integers(0, 3, 120)
    problem = layered(120, 4, width=6, seed=seed, nbytes=nbytes, saved=saved)
    core = core_of(problem, acyclic_groups(problem)).reversed()
    rank = 3 - np.searchsorted([60, 80, 100], np.arange(120), side="right")
    flights = np.array([1, 2, 3, 4])
    held = np.bincount(rank, nbytes + flights[rank] * saved)
    if limited:
        core = replace(core, kinds=(replace(core.kinds[0], capacity=int(held.max())),))
    start = StageRanks(int(stage_loads(core, rank, (0,) * 4).max()), rank, (0,) * 4)
    found = refine_stages(core, start, flights, 6)
    assert found.value < start.value  # the last one has half of the units
    assert found.value == stage_loads(core, found.rank, found.kinds).max()
    assert (found.rank[core.edges[:, 0]] <= found.rank[core.edges[:, 1]]).all()
    assert set(found.rank.tolist()) == {0, 1, 2, 3}
    if limited:
        assert np.bincount(found.rank, nbytes + flights[found.rank] * saved).max() <= held.max()


@pytest.fixture(scope="module")
def large():
    """As large as hundreds of thousands of units to a search that tries nothing exact here."""
    return layered(800, 8, width=40)


@pytest.fixture(autouse=True)
def _large_is_small(request, monkeypatch):
    if "large" in request.fixturenames:
        monkeypatch.setattr(multilevel, "MOST_EXACT", 700)


@pytest.fixture
def placed(large):
    return found_once(large)


@cache
def found_once(problem):
    return multilevel.multilevel(problem)


def test_it_is_better_than_the_best_along_orders(large, placed):
    along = searched(large)
    along.along_orders()
    assert placed.value < 0.985 * along.limit / along.core.scale
    assert placed.bound >= along.bound / along.core.scale * (1 - 1e-9)
    assert placed.bound <= placed.value and placed.solver == "multilevel, bound"
    assert not faults(large, placed.device, placed.order)
    assert max(placed.loads) == placed.value


class Fast:
    """A clock that runs faster, as it seems to run on a slow machine."""

    def __init__(self, factor):
        self._factor, self._start = factor, time.thread_time()

    def thread_time(self):
        return self._start + self._factor * (time.thread_time() - self._start)


def test_the_same_problem_gives_the_same_placement_however_busy_the_machine(large, placed, monkeypatch):
    monkeypatch.setattr(clock, "time", Fast(factor=50))
    again = multilevel.multilevel(large)
    assert np.array_equal(again.device, placed.device) and again.order == placed.order and again.bound == placed.bound


@pytest.mark.parametrize("count, devices", these_first([(40, 3)], [(100, 4)]))
def test_wide_graphs_get_the_same_claim_however_busy_the_machine(monkeypatch, count, devices):
    """Nodes end the one program; the other, whose relaxation tells little, is not begun. The clock ended both."""
    problem = layered(count, devices, width=20)
    nodes: list[int] = []
    milp = mip.milp

    def counted(*args, **options):
        nodes.extend([options["options"]["node_limit"]] if options["integrality"].any() else [])
        return milp(*args, **options)

    monkeypatch.setattr(mip, "milp", counted)
    quiet = contiguous.contiguous(problem, seconds=0.2)
    assert not quiet.timed_out and 0 < quiet.bound < quiet.value * (1 - 1e-3)
    assert len(set(nodes)) == (count == 40)  # on a busy machine HiGHS may run it again
    monkeypatch.setattr(clock, "time", Fast(factor=0.5))  # idle: more time must not be more search
    idle = contiguous.contiguous(problem, seconds=0.2)
    assert not idle.timed_out and len(set(nodes)) == (count == 40)
    assert np.array_equal(idle.device, quiet.device) and (idle.value, idle.bound) == (quiet.value, quiet.bound)


def test_more_seconds_are_more_ways_through_coarser_cores(large, placed, monkeypatch):
    seeds = []
    again = VCycle.again
    monkeypatch.setattr(VCycle, "again", lambda self, stages, seed: seeds.append(seed) or again(self, stages, seed))
    assert multilevel.multilevel(large, seconds=0.3).value >= placed.value
    assert seeds == [1]


def test_memory_flights_kinds_cpus_and_links_are_kept_to(monkeypatch):
    monkeypatch.setattr(multilevel, "MOST_EXACT", 0)
    count = 400
    random = np.random.default_rng(3)
    plain = layered(count, 4, width=10)
    seconds = np.stack([plain.seconds[0], 2 * plain.seconds[0]])
    seconds[0, random.random(count) < 0.02] = cases.INF
    seconds[1, 0] = cases.INF
    total = 5 * count
    specs = [Slot(0, total // 3), Slot(0, total // 2), Slot(1, total // 2), Slot(1, cpu=True)]
    options = {"nbytes": random.integers(0, 9, count), "saved": random.integers(0, 2, count), "in_flight": (1, 2)}
    colours = np.where(np.arange(count) < 20, np.arange(count) // 2, -1)
    problem = replace(plain, seconds=seconds, devices=tuple(specs), colours=colours, **options)
    for other in (problem, replace(problem, ordered=True), replace(problem, fill=True)):
        found = multilevel.multilevel(other)
        assert not faults(other, found.device, found.order)
        assert found.bound <= found.value
    linked = cases.with_links(plain, [[0, 1, 2, 3], [1, 0, 1, 2], [2, 1, 0, 1], [3, 2, 1, 0]])
    found = multilevel.multilevel(linked)
    assert max(cases.load_by_definition(linked, found.device.tolist())) == pytest.approx(found.value)


def test_of_equal_placements_the_preferred_one_is_taken():
    count = MOST_EXACT + 500
    seconds = np.ones(count)
    seconds[count // 2] = count
    edges = [(i, i + 1) for i in range(count - 1)]
    problem = Problem.of(seconds, [], edges, [Slot()] * 4)
    seen = []

    def key(device, order):
        seen.append(device)
        return (float(np.sum(device == order[0])),)

    found = multilevel.multilevel(problem, prefer=key)
    assert len(seen) > 1 and found.value == count
    assert np.sum(found.device == found.order[0]) == min(np.sum(device == found.order[0]) for device in seen)


def test_a_large_problem_without_room_is_refused_with_what_would_do(monkeypatch):
    monkeypatch.setattr(multilevel, "MOST_EXACT", 50)
    problem = layered(100, 2, width=1, nbytes=np.ones(100, np.int64), specs=[Slot(capacity=45)] * 2)
    with pytest.raises(InfeasibleError) as caught:
        multilevel.multilevel(problem, seconds=1)
    assert caught.value.capacity == 50 and caught.value.devices == 3
