from __future__ import annotations

from dataclasses import replace

import numpy as np
import placementcases as cases
import pytest
from campaigns import few_of_many
from hypothesis import strategies as st

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import DeviceTable, Population, cooling
from splitkit.solvers.placement.contract import contracted_core
from splitkit.solvers.placement.core import colour_groups, core_of
from splitkit.solvers.placement.packing import pack_sets
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.set_solver import noncontiguous
from splitkit.solvers.placement.solution import InfeasibleError, faults, loads


def value_of(problem):
    """The value of the best sets that the solver finds, which it has to prove; infinite if it proves there are none."""
    problem = replace(problem, fill=False)
    try:
        found = noncontiguous(problem, seconds=20)
    except InfeasibleError as error:
        assert error.cause != "unknown"
        return cases.INF
    assert found.optimal
    assert found.value == pytest.approx(max(cases.load_by_definition(problem, found.device)), rel=1e-12)
    assert not faults(replace(problem, in_flight=()), found.device)
    return found.value


@few_of_many(60, 300, cases.problems(units=5))
def test_equals_brute_force(problem):
    best = cases.best_sets(replace(problem, fill=False))
    assert value_of(problem) == pytest.approx(best, rel=1e-5, abs=1e-9)


@few_of_many(25, 60, cases.problems(plain=True), st.randoms(use_true_random=False))
def test_laws(problem, random):
    value = value_of(problem)
    order = list(range(problem.units))
    random.shuffle(order)
    assert value_of(cases.permuted(problem, np.array(order))) == pytest.approx(value, rel=1e-5)
    roomy = replace(problem, devices=tuple(replace(d, capacity=d.capacity + 2) for d in problem.devices))
    assert value_of(roomy) <= value * (1 + 1e-5)
    assert value_of(replace(problem, devices=(*problem.devices, problem.devices[-1]))) <= value * (1 + 1e-5)


@few_of_many(70, 400, cases.problems(units=7))
def test_contractions_lose_no_optimum(problem):
    problem = replace(problem, fill=False)
    core = contracted_core(core_of(problem, colour_groups(problem)), acyclic=False)
    joined = cases.best_sets(replace(problem, colours=core.group))
    assert joined == pytest.approx(cases.best_sets(problem), rel=1e-12)


@few_of_many(10, 40, cases.problems(units=7, plain=True))
def test_annealing_keeps_its_books(problem):
    core = core_of(problem, colour_groups(problem))
    places = DeviceTable.of_problem(problem, core)
    start = pack_sets(core, places)
    if start is None:
        return
    population = Population(core, places, start, 16)
    population.run(cooling(1, Clock(np.inf)))
    for row, device in enumerate(population.device):
        assert cases.fits(replace(problem, in_flight=()), device, ())
        assert np.allclose(population.loads[row], cases.load_by_definition(problem, device))
    assert max(cases.load_by_definition(problem, population.best)) == pytest.approx(population.value)


def test_annealing_finds_what_stages_cannot():
    # Pairs that exchange dear values lie far apart in the order.
    units = 12
    edges = [(i, i + 1) for i in range(units - 1)]
    nets = [(5.0, (i, i + units // 2)) for i in range(units // 2)]
    problem = Problem.of(np.ones((1, units)), nets, edges, [Slot()] * 2)
    found = noncontiguous(problem)
    assert found.value == 6 and found.optimal
    assert loads(problem, found.device).tolist() == [6, 6]


def test_too_little_memory_is_told():
    problem = Problem.of(np.ones((1, 5)), [], [], [Slot(capacity=5)] * 2, nbytes=np.array([3, 3, 3, 2, 1]))
    with pytest.raises(InfeasibleError) as caught:
        noncontiguous(problem)
    assert caught.value.cause == "memory"


def test_what_takes_no_time_on_some_device_is_done_at_once():
    slots = [Slot(0), Slot(0), Slot(1)]  # the bound must not be below 0 because prices were rounded
    problem = Problem.of(np.array([[0.3, 0.7, 0.1], [0.0, 0.0, 0.0]]), [(0.2, (0, 1))], [], slots)
    found = noncontiguous(problem, seconds=0.1)
    assert (found.value, found.bound, found.device.tolist()) == (0.0, 0.0, [2, 2, 2])
