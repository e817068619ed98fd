from __future__ import annotations

from dataclasses import replace

import numpy as np
import placementcases as cases
import pytest
from campaigns import few_of_many

from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.groups import coloured
from splitkit.solvers.placement.latency import moves as latencymoves
from splitkit.solvers.placement.latency.chain import chain_bound
from splitkit.solvers.placement.latency.latency import latency
from splitkit.solvers.placement.latency.makespan import Timing
from splitkit.solvers.placement.orders import by_key
from splitkit.solvers.placement.problem import BadProblemError, Problem, Slot
from splitkit.solvers.placement.solution import InfeasibleError


def simple(problem):
    """The same problem as latency wants it: accelerators first, hosts of one kind, no cycles, all units forward."""
    devices = sorted(problem.devices, key=lambda device: device.host)
    kind = next((device.kind for device in devices if device.host), 0)
    devices = [replace(device, kind=kind) if device.host else device for device in devices]
    edges = np.sort(problem.edges, axis=1)
    return replace(problem, devices=tuple(devices), edges=edges, backward=np.zeros(problem.units, bool), fill=False)


def found_for(problem, **options):
    found = latency(problem, **options)
    hosts = [d for d, device in enumerate(problem.devices) if device.host]
    place = [-1 if d in hosts else int(d) for d in found.device]
    assert cases.makespan_by_definition(problem, place) == pytest.approx(found.value)
    plain = replace(problem, in_flight=(), ordered=False)
    assert cases.apart(plain, found.device) and cases.fits(plain, found.device, ())
    return found


@few_of_many(150, 400, cases.problems(units=5))
def test_equals_brute_force(problem):
    problem = simple(problem)
    best = cases.best_latency(problem)
    try:
        found = found_for(problem)
    except InfeasibleError:
        assert best == cases.INF
        return
    assert found.optimal and found.value == pytest.approx(best)


@few_of_many(15, 60, cases.problems(units=5))
def test_search_and_bound_alone_hold_the_best_between_them(problem):
    problem = simple(problem)
    best = cases.best_latency(problem)
    few = latencymoves._FEW
    latencymoves._FEW = 0
    try:
        found = found_for(problem, seconds=0.5)
    except InfeasibleError:
        return
    finally:
        latencymoves._FEW = few
    assert found.bound * (1 - 1e-5) - 1e-9 <= best <= found.value * (1 + 1e-9)


def ways_of(problem, pieces):
    """What bounds of ways take: the timing, groups of one colour, an order."""
    order = by_key(core_of(problem, np.arange(problem.units)), np.zeros(problem.units))
    return Timing.of(problem, pieces), coloured(problem), order


@few_of_many(200, 500, cases.problems(units=5))
def test_no_makespan_is_less_than_the_bound_of_a_way(problem):
    problem = simple(problem)
    best = cases.best_latency(problem)
    if best < cases.INF:
        for value in (best, 1.5 * best + 1):
            assert chain_bound(problem, *ways_of(problem, 1), value) <= best * (1 + 1e-12)


@few_of_many(60, 150, cases.problems(units=4, devices=2))
def test_no_makespan_of_several_pieces_is_less_than_the_bound_of_a_way(problem):
    problem = simple(problem)
    try:
        best = latency(problem, pieces=2)
    except InfeasibleError:
        return
    assert best.optimal  # by trying all
    bound = chain_bound(problem, *ways_of(problem, 2), 1.5 * best.value + 1)
    assert bound <= best.value * (1 + 1e-12)


def test_the_bound_of_a_way_counts_what_is_beside_it():
    """Only 2 of 3 units in a row fit a device; each leads to a unit beside the way, which is with it or costs a net."""
    nets = [(1.0, (0, 1)), (1.0, (1, 2)), (4.0, (0, 3)), (4.0, (1, 4)), (4.0, (2, 5))]
    edges = [pins for _, pins in nets]
    seconds = np.array([[2.0, 2, 2, 1, 1, 1]])
    problem = Problem.of(seconds, nets, edges, [Slot(capacity=2)] * 3, nbytes=np.array([1, 1, 1, 0, 0, 0]))
    found = latency(problem)
    assert chain_bound(problem, *ways_of(problem, 1), 100.0) == pytest.approx(found.value)
    assert found.value == 11  # work of 9, and the net between two of them on either side
    assert found.optimal


def test_parallel_branches_run_at_once():
    # 0 -> (1, 2) -> 3; each branch on a device of its own
    seconds = np.array([[0.0, 4.0, 4.0, 0.0], [0.0, 9.0, 9.0, 0.0]])
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    nets = [(0.5, (0, 1, 2)), (0.5, (1, 3)), (0.5, (2, 3))]
    found = found_for(Problem.of(seconds, nets, edges, [Slot(), Slot(), Slot(1, host=True)]))
    assert found.value == 5 and len(set(found.device[[1, 2]].tolist())) == 2


def test_two_pieces_let_a_device_wait():
    # 0 -> 1 -> 2, and only the host can do 1; 0 and 2 are dear there.
    seconds = np.array([[1.0, np.inf, 1.0], [9.0, 1.0, 9.0]])
    problem = Problem.of(seconds, [], [(0, 1), (1, 2)], [Slot(), Slot(1, host=True)])
    assert latency(problem, pieces=1).value == 11
    found = latency(problem, pieces=2)
    assert found.value == 3 and found.optimal
    assert found.turn.tolist() == [0, 0, 1] and found.device.tolist() == [0, 1, 0]


def test_a_chain_is_proven():
    random = np.random.default_rng(0)
    edges = [(i, i + 1) for i in range(29)]
    nets = [(float(cost), edge) for cost, edge in zip(random.random(29), edges, strict=True)]
    seconds = random.random((1, 30))
    problem = Problem.of(seconds, nets, edges, [Slot(capacity=12)] * 3, nbytes=np.ones(30, np.int64))
    found = found_for(problem, seconds=10)
    assert found.optimal
    cheapest = min(nets[a][0] + nets[b][0] for a in range(6, 12) for b in range(18 - 1, 24) if b - a <= 12)
    assert found.value == pytest.approx(seconds.sum() + 2 * cheapest)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"edges": np.array([[0, 1], [1, 0]])}, "edges"),
        ({"links": np.array([[0, 2.0], [2.0, 0]])}, "links"),
        ({"devices": (Slot(0, host=True), Slot(1, host=True))}, "devices"),
    ],
)
def test_what_latency_does_not_know_is_refused(change, field):
    problem = Problem.of(np.ones((2, 2)), [], [(0, 1)], [Slot()] * 2)
    with pytest.raises(BadProblemError) as caught:
        latency(replace(problem, **change))
    assert caught.value.field == field
