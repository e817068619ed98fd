"""The bound by covering: sets that are worth most against all sets, the bound against the best of all placements."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import placementcases as cases
import pytest
from campaigns import few_of_many
from hypothesis import given, settings
from hypothesis import strategies as st

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement import packing as module
from splitkit.solvers.placement import set_solver as module_of_bound
from splitkit.solvers.placement.contract import simple_bound_seconds
from splitkit.solvers.placement.core import colour_groups, core_of
from splitkit.solvers.placement.packing import Nets, SetTable, narrow_order
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.set_solver import CoverBound


@st.composite
def sets(draw):
    """Units with work, some barred, nets between them, an order, and what each unit is worth."""
    count = draw(st.integers(1, 7))
    work = np.array([draw(st.integers(0, 6)) for _ in range(count)], float)
    barred = np.array([draw(st.integers(0, 5)) == 0 for _ in range(count)])
    pins = [
        draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=4, unique=True))
        for _ in range(draw(st.integers(0, 6)) if count > 3 else 0)
    ]
    costs = np.array([draw(st.integers(0, 5)) for _ in pins], float)
    worth = np.array([draw(st.integers(-3, 9)) for _ in range(count)], float)
    order = draw(st.permutations(range(count)))
    return work, barred, [np.array(those) for those in pins], costs, worth, np.array(order)


def load_of(work, pins, costs, chosen):
    load = float(work[chosen].sum())
    for those, cost in zip(pins, costs, strict=True):
        load += cost * (0 < chosen[those].sum() < len(those))
    return load


def all_sets(work, barred):
    for bits in product([False, True], repeat=len(work)):
        chosen = np.array(bits)
        if not (chosen & barred).any():
            yield chosen


@few_of_many(50, 200, sets())
def test_the_set_worth_most_within_every_load(case):
    work, barred, pins, costs, worth, order = case
    most = 30
    best = np.zeros(most + 1)
    for chosen in all_sets(work, barred):
        load = int(load_of(work, pins, costs, chosen))
        if load <= most:
            best[load:] = np.maximum(best[load:], worth[chosen].sum())
    found = SetTable(work, barred, Nets.of(pins, costs), order).best(worth, 1.0, most, 0.5)
    assert np.allclose(found.value, best)
    for load in (0, 7, most):
        chosen = found.chosen(load)
        assert worth[chosen].sum() == pytest.approx(best[load])
        assert load_of(work, pins, costs, chosen) <= load


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sets(), st.sampled_from([0.7, 3.0]), st.sampled_from([0.0, 0.4]), st.sampled_from([2, 200]))
def test_rounding_and_left_out_nets_lose_no_set(case, unit, price, states):
    work, barred, pins, costs, worth, order = case
    saved = module._MOST_STATES
    module._MOST_STATES = states
    try:
        frontier = SetTable(work, barred, Nets.of(pins, costs), order)
    finally:
        module._MOST_STATES = saved
    most = 12
    found = frontier.best(worth, unit, most, price)
    reach = np.maximum.accumulate(found.value - price * unit * np.arange(most + 1))
    for chosen in all_sets(work, barred):
        load = load_of(work, pins, costs, chosen)
        if load < (most + 1) * unit:
            assert worth[chosen].sum() <= reach[int(load / unit)] + price * load + 1e-9


def bound_of(problem, limit, seconds=0.15):
    core = core_of(problem, colour_groups(problem))
    return CoverBound(core, limit).run(max(0.0, simple_bound_seconds(core)), seconds, Clock(60))


@few_of_many(5, 25, cases.problems(units=6))
def test_no_placement_is_better_than_the_bound(problem):
    problem = replace(problem, in_flight=(), ordered=False)
    best = cases.best_sets(problem)
    if best < cases.INF:
        assert bound_of(problem, 1.3 * best) <= best * (1 + 1e-12)


def test_it_knows_that_cuts_cost_where_the_work_is_shared_out():
    """A ring of 12 units on 4 devices: whoever holds less than all of it cuts it twice at least."""
    nets = [(2.0, (i, (i + 1) % 12)) for i in range(12)]
    problem = Problem.of(np.ones((1, 12)), nets, [], [Slot()] * 4)
    assert bound_of(problem, 8.0, 2.0) == pytest.approx(7.0, rel=0.01)  # three units in a row, and two cuts


def test_a_narrow_order_of_a_chain_is_the_chain():
    random = np.random.default_rng(0)
    name = random.permutation(40)
    pins = [np.array([name[i], name[i + 1]]) for i in range(39)]
    nets = Nets.of(pins, np.ones(39))
    order = narrow_order(40, nets).tolist()
    place = [order.index(unit) for unit in name.tolist()]
    assert place in (list(range(40)), list(range(39, -1, -1)))
    assert SetTable(np.ones(40), np.zeros(40, bool), nets, np.array(order)).states <= 80


def test_a_bound_just_below_the_limit_is_raised_no_further():
    """The limit divided by a step of it may be less than the number of steps."""
    limit, nets = 21.1, [(1.0, (0, 1)), (1.0, (1, 2))]
    assert int(limit / (limit / module_of_bound._COARSE)) < module_of_bound._COARSE
    problem = Problem.of(np.full((1, 3), limit / 3), nets, [], [Slot()] * 2)
    core, low = core_of(problem, colour_groups(problem)), limit * (1 - 1e-7)
    assert low <= CoverBound(core, limit).run(low, 0.15, Clock(60)) <= limit
