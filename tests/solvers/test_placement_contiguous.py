from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import placementcases as cases
import pytest
from campaigns import few_and_many, few_of_many
from hypothesis import strategies as st

from splitkit.solvers import clock
from splitkit.solvers.clock import Clock
from splitkit.solvers.placement import contract
from splitkit.solvers.placement.contract import contracted_core
from splitkit.solvers.placement.core import BIG, ORDERS, acyclic_groups, core_of, order_within_stages, orders
from splitkit.solvers.placement.packing import least_capacity, stages_fit
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.solution import InfeasibleError, faults, memory
from splitkit.solvers.placement.stages import stage_solver as search_module
from splitkit.solvers.placement.stages.contiguous import contiguous
from splitkit.solvers.placement.stages.ideal_dp import (
    Effort,
    TooManyError,
    _Search,
    best_stages,
    dominance_applies,
    ideals,
    sums_over_ideals,
)
from splitkit.solvers.placement.stages.order_dp import OrderDP, device_steps, stage_loads
from splitkit.solvers.placement.stages.stage_solver import StageSearch, own_and_other_orders


def value_of(problem):
    """The value of the best stages, which the solver has to prove; infinite if it proves that there are none."""
    try:
        found = contiguous(problem)
    except InfeasibleError as error:
        assert error.cause != "unknown"
        return cases.INF
    assert found.optimal and found.gap <= found.tolerance
    assert found.value == pytest.approx(max(cases.load_by_definition(problem, found.device)), rel=1e-12)
    assert np.allclose(found.loads, cases.load_by_definition(problem, found.device))
    assert not faults(problem, found.device, found.order)
    assert cases.apart(problem, found.device) and cases.fits(problem, found.device, found.order)
    assert cases.goes_down(problem, found.device, found.order)
    return found.value


def equals_brute_force(problem):
    assert value_of(problem) == pytest.approx(cases.best_stages(problem), rel=1e-12)


test_equals_brute_force, test_equals_brute_force_on_many = few_and_many(100, 3000, cases.problems())(equals_brute_force)


@few_of_many(30, 150, cases.problems(units=5))
def test_each_solver_alone_equals_brute_force(problem):
    core = (
        contracted_core(core_of(problem, acyclic_groups(problem)))
        if not problem.fill
        else core_of(problem, acyclic_groups(problem))
    )
    if core.barred.all(axis=0).any():
        return
    steps = device_steps(core, problem.in_flight, ordered=problem.ordered, fill=problem.fill)
    best = cases.best_stages(problem)
    for method, more in (("over_ideals", ()), ("by_program", (60,))):
        search = StageSearch(core.reversed(), steps, 60, joinable=not problem.fill)
        getattr(search, method)(*more)
        found = search.best.value / core.scale if search.best else cases.INF
        assert found == pytest.approx(best, rel=1e-5, abs=1e-9), method
        assert search.bound / core.scale <= best * (1 + 1e-9) + 1e-9 or best == cases.INF


@few_of_many(25, 200, cases.problems(plain=True), st.randoms(use_true_random=False))
def test_laws(problem, random):
    value = value_of(problem)
    order = list(range(problem.units))
    random.shuffle(order)
    assert value_of(cases.permuted(problem, np.array(order))) == pytest.approx(value)
    scaled = replace(problem, seconds=problem.seconds * 3, net_costs=problem.net_costs * 3)
    assert value_of(scaled) == pytest.approx(3 * value)
    roomy = replace(problem, devices=tuple(replace(d, capacity=d.capacity + 2) for d in problem.devices))
    assert value_of(roomy) <= value * (1 + 1e-12)
    if not problem.fill and not problem.ordered:
        more = replace(problem, devices=(*problem.devices, problem.devices[-1]))
        assert value_of(more) <= value * (1 + 1e-12)
    if not problem.in_flight and not problem.ordered:
        assert value_of(replace(problem, edges=problem.edges[:, ::-1])) == pytest.approx(value)


@few_of_many(
    60,
    150,
    cases.problems(units=5),
    st.lists(st.lists(st.integers(1, 4), min_size=3, max_size=3), min_size=3, max_size=3),
)
def test_bounds_hold_with_links_between_pairs(problem, factors):
    linked = cases.with_links(problem, [row[: len(problem.devices)] for row in factors[: len(problem.devices)]])
    try:
        found = contiguous(linked)
    except InfeasibleError:
        assert cases.best_stages(linked) == cases.INF
        return
    best = cases.best_stages(linked)
    assert found.value == pytest.approx(max(cases.load_by_definition(linked, found.device)))
    assert found.bound * (1 - 1e-9) <= best <= found.value * (1 + 1e-9)


@few_of_many(50, 100, cases.problems(units=4), st.booleans())
def test_no_stages_are_better_than_what_must_be_joined_allows(problem, fill):
    problem = replace(problem, fill=fill and len(problem.devices) <= problem.units)
    core = core_of(problem, acyclic_groups(problem))
    best = cases.best_stages(problem)
    if best < cases.INF and not core.barred.all(axis=0).any():
        filled = len(problem.devices) if problem.fill else 0
        high = int(1.5 * best * core.scale) + 1
        bound = contract.joining_bound(core, 0, high, acyclic=True, filled=filled)
        assert bound <= best * core.scale + core.slack + 1


def test_devices_to_fill_make_a_slow_link_count():
    """However little work there is: what is cut once at least bounds the load where no device may be empty."""
    random = np.random.default_rng(0)
    edges = [(layer * 20 + int(random.integers(20)), layer * 20 + 20 + i) for layer in range(11) for i in range(20)]
    readers = {}
    for first, then in edges:
        readers.setdefault(first, []).append(then)
    nets = [(1.0, (first, *those)) for first, those in readers.items()]
    nets += [(1.0, (i, i + 1)) for i in range(239)]  # so that no part is alone
    edges += [(i, i + 1) for i in range(19)]
    problem = Problem.of(random.random((1, 240)) * 1e-5, nets, edges, [Slot()] * 4, fill=True)
    core = core_of(problem, acyclic_groups(problem))
    search = StageSearch(core.reversed(), device_steps(core, (), ordered=False, fill=True), 1.0, joinable=False)
    search.along_orders()
    assert search.bound / core.scale < 0.01
    search.raise_bound()
    assert 1.0 <= search.bound / core.scale <= search.limit / core.scale


def test_the_order_of_the_graph_is_among_those_tried():
    """Work in an order that no walk takes: even cuts along the numbers are the best stages."""
    random = np.random.default_rng(1)
    edges = [(i, j) for i in range(0, 90) for j in (i + int(random.integers(1, 30)),) if j < 90]
    problem = Problem.of(np.ones((1, 90)), [(0.01, edge) for edge in edges], edges, [Slot()] * 3)
    core = core_of(problem, acyclic_groups(problem))
    tried = [order.tolist() for order in own_and_other_orders(core.reversed())]
    assert list(range(89, -1, -1)) in tried


def test_the_lines_of_a_search_are_made_once(monkeypatch):
    """What the search looked for along each order serves the ties too."""
    problem = chain([1.0] * 12, devices=[Slot()] * 3)
    core = core_of(problem, acyclic_groups(problem))
    made, made_loads = [], []
    init, computed = OrderDP.__init__, OrderDP._computed
    monkeypatch.setattr(OrderDP, "__init__", lambda self, *args: made.append(1) or init(self, *args))
    monkeypatch.setattr(OrderDP, "_computed", lambda self, kind: made_loads.append(1) or computed(self, kind))
    search = StageSearch(core.reversed(), device_steps(core, (), ordered=False, fill=False), 1.0, joinable=False)
    search.along_orders()
    before = search.ties()
    assert len(list(orders(core))) == ORDERS
    assert len(made) == len(made_loads) == ORDERS + 1  # and its own
    monkeypatch.setattr(search_module, "_MOST_KEPT", 0)
    again = StageSearch(core.reversed(), search.device_steps, 1.0, joinable=False)
    again.along_orders()
    assert [found.rank.tolist() for found in again.ties()] == [found.rank.tolist() for found in before]


def chain(sums_over_ideals, **more):
    edges = [(i, i + 1) for i in range(len(sums_over_ideals) - 1)]
    return Problem.of(np.array([sums_over_ideals], float), [(0.0, edge) for edge in edges], edges, **more)


def test_sums_of_floats_do_not_round():
    assert contiguous(chain([0.1] * 10, devices=[Slot()] * 5)).optimal
    sums_over_ideals = [2.0**40, 1.0, 2.0**40, 2.0**40, 1.0, 2.0**40]  # as float32 or scaled to 1e6 the ones are lost
    found = contiguous(chain(sums_over_ideals, devices=[Slot()] * 2))
    assert found.value == 2.0**41 + 1 and found.bound == found.value
    assert found.device.tolist() == [0, 0, 0, 1, 1, 1]


def test_convex_sets_that_depend_on_each_other_are_refused():
    # a1 -> b1 and b2 -> a2: {a1, a2} and {b1, b2} are convex, and neither can run first.
    problem = Problem.of(
        np.array([[4.0, 4.0, 4.0, 4.0]]),
        [(1.0, (0, 1)), (9.0, (0, 3)), (1.0, (2, 3)), (9.0, (1, 2))],
        [(0, 1), (2, 3)],
        [Slot()] * 2,
    )
    assert "devices depend on each other in a cycle" in faults(problem, np.array([0, 1, 1, 0]), (0, 1))
    assert value_of(problem) == cases.best_stages(problem)


def test_early_stages_hold_more_in_flight():
    # Every unit keeps 1 byte a microbatch; the stage with two after it holds three of them.
    flying = chain([1.0] * 5, devices=[Slot(capacity=3)] * 3, saved=np.ones(5, np.int64), in_flight=(1, 2, 3))
    found = contiguous(flying)
    assert found.device.tolist() == [found.order[0], found.order[1], *[found.order[2]] * 3]
    assert memory(flying, found.device, found.order).tolist() == [3, 2, 3]


def test_ties_are_broken_by_the_key():
    problem = chain([1.0, 1.0, 1.0, 5.0], devices=[Slot()] * 3)

    def units_of_the_first(device, order):
        return (-np.count_nonzero(device == order[0]),)

    found = contiguous(problem, prefer=units_of_the_first)
    assert found.value == 5 and np.count_nonzero(found.device == found.order[0]) == 3
    found = contiguous(problem, prefer=lambda device, order: (-units_of_the_first(device, order)[0],))
    assert np.count_nonzero(found.device == found.order[0]) == 1


@few_of_many(40, 100, cases.problems(units=5, devices=2))
def test_the_least_memory_that_quick_tests_find_is_enough(problem):
    def with_capacity(capacity):
        return replace(problem, devices=tuple(replace(d, capacity=capacity) for d in problem.devices))

    if cases.best_stages(with_capacity(np.inf)) < cases.INF:
        capacity = least_capacity(with_capacity(3), stages_fit)
        assert cases.best_stages(with_capacity(capacity)) < cases.INF


def test_units_that_cannot_be_together_are_named():
    seconds = np.array([[1.0, np.inf, 1.0], [np.inf, 1.0, 1.0]])
    problem = Problem.of(seconds, [], [], [Slot(0), Slot(1)], colours=np.array([7, 7, -1]))
    with pytest.raises(InfeasibleError, match=r"units \[0, 1\]") as caught:
        contiguous(problem)
    assert caught.value.cause == "support" and caught.value.units == (0, 1)


def test_more_devices_to_fill_than_groups():
    problem = Problem.of(np.ones((1, 3)), [], [], [Slot()] * 3, colours=np.array([1, 1, -1]), fill=True)
    with pytest.raises(InfeasibleError) as caught:
        contiguous(problem)
    assert caught.value.cause == "devices"


def layered(layers, width, seed):
    """A random graph of layers, each unit reading a few of the layer before."""
    random = np.random.default_rng(seed)
    edges = [
        (layer * width - width + int(a), layer * width + b)
        for layer in range(1, layers)
        for b in range(width)
        for a in random.choice(width, 2, replace=False)
    ]
    units = layers * width
    nets = [
        (float(random.random()), (a, *sorted({b for c, b in edges if c == a}))) for a in sorted({a for a, _ in edges})
    ]
    return Problem.of(random.random((1, units)), nets, edges, [Slot()] * 4)


def test_a_graph_with_too_many_ideals_has_a_bound_and_annealing_helps():
    problem = layered(12, 8, 0)
    core = core_of(problem, acyclic_groups(problem)).reversed()
    steps = device_steps(core, (), ordered=False, fill=False)
    search = StageSearch(core, steps, 5, joinable=True)
    search.along_orders()
    before = search.best.value
    search.by_annealing(0.5)
    assert search.best.value < before
    search.raise_bound()
    assert 0 < search.bound <= search.best.value
    assert stage_loads(core, search.best.rank, search.best.kinds).max() == search.best.value


def cells(count, seed, branches=(1, 3, 6, 2)):
    """Cells of parallel chains one after another, from one unit that all read to one that reads all."""
    random = np.random.default_rng(seed)
    edges, last, units = [], 0, 1
    for _ in range(count):
        ends = []
        for length in branches:
            chain_units = [last, *range(units, units + length)]
            units += length
            edges += list(pairwise(chain_units))
            ends.append(chain_units[-1])
        edges += [(end, units) for end in ends]
        last, units = units, units + 1
    readers = {}
    for maker, reader in edges:
        readers.setdefault(maker, []).append(reader)
    nets = [(0.1 + 0.2 * float(random.random()), (maker, *those)) for maker, those in readers.items()]
    work = random.integers(1, 20, units) / 16
    nbytes = random.integers(1, 100, units)
    room = int(nbytes.sum() * 1.1 / 5)
    devices = [Slot(0, room)] * 5 + [Slot(1, cpu=True)]
    return Problem.of(np.array([work, 10 * work]), nets, edges, devices, nbytes=nbytes)


@pytest.mark.parametrize("seed", range(3))
def test_parallel_chains_in_tight_memory_are_proven_whatever_their_numbers(seed):
    problem = cells(8, seed)
    found = contiguous(problem)
    assert found.optimal and found.value > found.loads.sum() / 6 * 1.02  # no bound without search would do
    order = np.random.default_rng(seed).permutation(problem.units)
    assert contiguous(cases.permuted(problem, order)).value == pytest.approx(found.value, rel=1e-12)


def test_what_dominance_leaves_out_is_no_loss():
    problem = cells(3, 7)
    core = contracted_core(core_of(problem, acyclic_groups(problem))).reversed()
    steps = device_steps(core, (), ordered=False, fill=False)
    limit = int(core.work[0].sum() + core.costs[0].sum())
    order = next(orders(core))
    found = ideals(core, steps, limit, order, Effort(10**10, Clock(math.inf)))
    best, bound = best_stages(core, steps, limit, found, Effort(10**10, Clock(math.inf)))
    assert best.value == bound
    assert stage_loads(core, best.rank, best.kinds).max() == best.value
    all_of_them = _Search(core, steps, found, Effort(10**10, Clock(math.inf)))
    dominance, all_of_them.dominance = all_of_them.dominance, None
    assert all_of_them.run(0, limit).value == best.value
    reached = np.where(found.allowed[1], 0, BIG)
    kept = dominance.undominated(reached, BIG)
    assert 0 < kept.sum() < found.allowed[1].sum()
    assert best_stages(core, steps, best.value, found, Effort(10**10, Clock(math.inf))) == (None, best.value)
    with pytest.raises(TooManyError):
        ideals(core, steps, limit, order, Effort(100, Clock(math.inf)))


def test_sums_over_ideals_are_exact():
    problem = cells(6, 1)
    core = core_of(problem, acyclic_groups(problem))
    found = ideals(
        core, device_steps(core, (), ordered=False, fill=False), BIG, next(orders(core)), Effort(10**9, Clock(math.inf))
    )
    members = found.members(core.size).astype(object)
    rows = np.stack([core.work[0], core.nbytes])
    assert np.array_equal(sums_over_ideals(rows, found.bits), (rows.astype(object) @ members).astype(np.int64))
    units = np.arange(core.size)
    bits = found.bits[units >> 6] >> (units & 63).astype(np.uint64)[:, None] & np.uint64(1)
    assert np.array_equal(bits, members.astype(np.uint64))
    before, after = core.edges.T
    assert (members[before] >= members[after]).all()


def test_a_clock_that_runs_faster_changes_nothing(monkeypatch):
    class Fast:
        start = time.thread_time()

        def thread_time(self):
            return self.start + 1.5 * (time.thread_time() - self.start)

    problem = layered(10, 5, 1)
    first = contiguous(problem, seconds=2.0)
    monkeypatch.setattr(clock, "time", Fast())
    second = contiguous(problem, seconds=2.0)
    assert np.array_equal(first.device, second.device) and first.value == second.value


def test_a_long_graph_is_cut_at_its_cheap_places():
    units = 20_000
    random = np.random.default_rng(0)
    edges = np.stack([np.arange(units - 1), np.arange(1, units)], axis=1)
    nets = [(float(cost), tuple(edge)) for cost, edge in zip(random.random(units - 1), edges.tolist(), strict=True)]
    found = contiguous(Problem.of(random.random((1, units)), nets, edges, [Slot()] * 16))
    assert found.gap < 2e-3


def test_a_stage_that_holds_more_the_fewer_follow_it_is_not_emptied():
    """To join stages is no worse in seconds, but the stages before would hold more in flight: only three have room."""
    problem = Problem.of(
        np.array([[2.0, 3.0, 7.0]]), [], [(0, 1), (0, 2), (1, 2)], [Slot(0, 6.0)] * 3,
        nbytes=np.array([2, 1, 1]), saved=np.array([3, 0, 0]), in_flight=(3, 2, 1),
    )  # fmt: skip
    core = core_of(problem, acyclic_groups(problem)).reversed()
    steps = device_steps(core, problem.in_flight, ordered=False, fill=False)
    assert not dominance_applies(core, steps) and dominance_applies(core, replace(steps, in_flight=(1, 2, 3)))
    search = StageSearch(core, steps, 60, joinable=True)
    search.over_ideals()
    assert search.best.value / core.scale == cases.best_stages(problem) == 7


def test_random_orders_take_stage_after_stage_and_no_unit_before_what_it_needs():
    random, seen = np.random.default_rng(0), set()
    for _ in range(60):
        units, stages = int(random.integers(1, 9)), int(random.integers(1, 4))
        edges = [(a, b) for b in range(units) for a in range(b) if random.random() < 0.3]
        core = core_of(
            problem := Problem.of(np.ones((1, units)), [], edges, [Slot()] * stages), acyclic_groups(problem)
        )
        rank = np.arange(units) * stages // units
        order = order_within_stages(core, rank, random)
        assert sorted(order.tolist()) == list(range(units)) and (np.diff(rank[order]) >= 0).all()
        place = np.argsort(order)
        assert all(place[a] < place[b] for a, b in edges)
        seen.add(tuple(order.tolist()))
    assert len(seen) > 40
