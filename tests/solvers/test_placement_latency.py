from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import placementcases as cases
import pytest
from campaigns import few_of_many

from splitkit.solvers.placement import latency_solver as tree
from splitkit.solvers.placement.core import colour_groups, core_of, order_by_key
from splitkit.solvers.placement.latency_solver import latency
from splitkit.solvers.placement.makespan import CPU, Timing, chain_bound, makespan
from splitkit.solvers.placement.problem import BadProblemError, Problem, Slot
from splitkit.solvers.placement.solution import InfeasibleError


def simple(problem):
    """The same problem as latency wants it: accelerators first, CPUs of one kind, no cycles."""
    devices = sorted(problem.devices, key=lambda device: device.cpu)
    kind = next((device.kind for device in devices if device.cpu), 0)
    devices = [replace(device, kind=kind) if device.cpu else device for device in devices]
    edges = np.sort(problem.edges, axis=1)
    return replace(problem, devices=tuple(devices), edges=edges, fill=False)


def found_for(problem, **options):
    found = latency(problem, **options)
    cpus = [d for d, device in enumerate(problem.devices) if device.cpu]
    place = [-1 if d in cpus else int(d) for d in found.device]
    assert cases.makespan_by_definition(problem, place) == pytest.approx(found.value)
    plain = replace(problem, in_flight=(), ordered=False)
    assert cases.apart(plain, found.device) and cases.fits(plain, found.device, ())
    return found


@few_of_many(75, 400, cases.problems(units=5))
def test_equals_brute_force(problem):
    problem = simple(problem)
    best = cases.best_latency(problem)
    try:
        found = found_for(problem)
    except InfeasibleError:
        assert best == cases.INF
        return
    assert found.optimal and found.value == pytest.approx(best)


@few_of_many(8, 60, cases.problems(units=5))
def test_search_and_bound_alone_hold_the_best_between_them(problem):
    problem = simple(problem)
    best = cases.best_latency(problem)
    with patch.object(tree, "_MOST_UNITS", 0):
        try:
            found = found_for(problem, seconds=0.5)
        except InfeasibleError:
            return
    assert found.bound * (1 - 1e-5) - 1e-9 <= best <= found.value * (1 + 1e-9)


def ways_of(problem, pieces):
    """What bounds of ways take: the timing, groups of one colour, an order."""
    order = order_by_key(core_of(problem, np.arange(problem.units)), np.zeros(problem.units))
    return Timing.of(problem, pieces), colour_groups(problem), order


@few_of_many(100, 500, cases.problems(units=5))
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


def best_of_pieces(problem, pieces):
    """The least makespan over all placements in which units of a colour share a device; infinite if there are none."""
    timing = Timing.of(problem, pieces)
    accelerators = [device for device in problem.devices if not device.cpu]
    cpus = [CPU] if len(accelerators) < len(problem.devices) else []
    best = cases.INF
    for place in product([*range(len(accelerators) * pieces), *cpus], repeat=problem.units):
        device = [CPU if p == CPU else p // pieces for p in place]
        held = np.bincount([d for d in device if d != CPU], problem.nbytes[np.array(device) != CPU], len(accelerators))
        roomy = all(h <= spec.capacity for h, spec in zip(held, accelerators, strict=True))
        if roomy and len(set(zip(problem.colours, device, strict=True)) - {(-1, d) for d in device}) == len(
            {colour for colour in problem.colours if colour >= 0}
        ):
            best = min(best, makespan(timing, list(place)))
    return best


@few_of_many(40, 400, cases.problems(units=4, devices=2))
def test_several_pieces_equal_brute_force(problem):
    """Nothing that is worse is called optimal, nothing that can be placed is refused, no bound is above the optimum."""
    problem = simple(problem)
    best = best_of_pieces(problem, 2)
    try:
        found = latency(problem, pieces=2, seconds=0.5)
    except InfeasibleError:
        assert best == cases.INF
        return
    assert found.optimal and found.value == pytest.approx(best)


def test_what_shares_a_device_may_be_in_two_of_its_pieces():
    nets = [(0.2, (1, 2))]
    colours = np.array([2, -1, 2])
    problem = Problem.of(np.array([[1.0, 1.0, 3.0]]), nets, [(1, 2)], [Slot(), Slot()], colours=colours)
    found = latency(problem, pieces=2)
    assert found.value == pytest.approx(4.4) and found.optimal
    assert found.device[0] == found.device[2] != found.device[1] and found.turn[0] < found.turn[2]
    with patch.object(tree, "_MOST_UNITS", 0):
        assert latency(problem, pieces=2, seconds=0.5).value == pytest.approx(4.4)  # by moves of single units


def test_two_pieces_hold_what_two_stages_cannot():
    nets = [(0.5, (0, 1, 2)), (0.0, (1, 3))]
    problem = Problem.of(
        np.array([[2.0, 2.0, 1.0, 2.0]]),
        nets,
        [(0, 1), (0, 2), (1, 3)],
        [Slot(0, 7), Slot(0, 7)],
        nbytes=np.array([2, 2, 5, 3]),
        colours=np.array([0, 2, 2, -1]),
    )
    assert latency(problem, pieces=2).optimal
    with pytest.raises(InfeasibleError):
        latency(problem, pieces=1)


def test_a_value_that_is_read_twice_on_a_way_is_paid_for_once():
    """What 0 makes goes to 1 and to 2, 1's value to 2: each on its own device pays for each of the two values once."""
    nets = [(4.0, (0, 1, 2)), (1.0, (1, 2))]
    problem = Problem.of(
        np.ones((1, 3)), nets, [(0, 1), (0, 2), (1, 2)], [Slot(capacity=1)] * 3, nbytes=np.ones(3, np.int64)
    )
    best = latency(problem)
    assert best.optimal and best.value == 3 + 3 * 4 + 2 * 1


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
    found = found_for(Problem.of(seconds, nets, edges, [Slot(), Slot(), Slot(1, cpu=True)]))
    assert found.value == 5 and len(set(found.device[[1, 2]].tolist())) == 2


def test_two_pieces_let_a_device_wait():
    # 0 -> 1 -> 2, and only the CPU can do 1; 0 and 2 are dear there.
    seconds = np.array([[1.0, np.inf, 1.0], [9.0, 1.0, 9.0]])
    problem = Problem.of(seconds, [], [(0, 1), (1, 2)], [Slot(), Slot(1, cpu=True)])
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
        ({"devices": (Slot(0, cpu=True), Slot(1, cpu=True))}, "devices"),
    ],
)
def test_what_latency_does_not_know_is_refused(change, field):
    problem = Problem.of(np.ones((2, 2)), [], [(0, 1)], [Slot()] * 2)
    with pytest.raises(BadProblemError) as caught:
        latency(replace(problem, **change))
    assert caught.value.field == field


def test_a_first_placement_puts_each_unit_where_it_ends_first():
    """The longest first: 3 | 2, then 2 behind 2, and 1 behind 3; behind a chain, where that is."""
    problem = Problem.of(np.array([[3.0, 2.0, 2.0, 1.0]]), [], [], [Slot(), Slot()])
    timing = Timing.of(problem, 1)
    found = tree._quickest(problem, timing, 1, tree._by_rank(timing, [0, 1, 2, 3]), np.arange(4))
    assert found.tolist() == [0, 1, 1, 0]
    chained = replace(problem, edges=np.array([(0, 3)]))
    timing = Timing.of(chained, 1)
    assert tree._quickest(chained, timing, 1, tree._by_rank(timing, [0, 1, 2, 3]), np.arange(4)).tolist() == [
        0,
        1,
        1,
        0,
    ]
