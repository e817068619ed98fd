"""Where links differ, small problems are solved for certain, and no larger one comes out worse than one device."""

from itertools import product

import numpy as np
import pytest
from campaigns import few_of_many
from hypothesis import strategies as st

from splitkit.solvers.clock import endless_clock
from splitkit.solvers.placement.link_model import LinkPrices, UnequalLinks
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.set_solver import noncontiguous
from splitkit.solvers.placement.solution import InfeasibleError, cycles
from splitkit.solvers.placement.stages.contiguous import contiguous
from splitkit.solvers.placement.unequal_solver import Enumeration, _key, best_on_order, on_unequal_links


@st.composite
def cases(draw, units=6, devices=3, chain=False):
    """Work, edges and values with the links between the devices; some devices are CPUs, small, or cannot run all."""
    count, number = draw(st.integers(2, units)), draw(st.integers(2, devices))
    work = np.array([[draw(st.integers(0, 9)) for _ in range(count)] for _ in range(number)], float)
    if not chain and draw(st.integers(0, 3)) == 0:
        work[draw(st.integers(0, number - 1)), draw(st.integers(0, count - 1))] = np.inf
    pairs = [(i, i + 1) for i in range(count - 1)]
    if not chain:
        unit = st.integers(0, count - 1)
        pairs = [(min(p), max(p)) for p in draw(st.lists(st.tuples(unit, unit), max_size=2 * count)) if p[0] != p[1]]
    pins = tuple((a, *sorted({b for c, b in pairs if c == a})) for a in sorted({a for a, _ in pairs}))
    latency = np.array([[draw(st.sampled_from([0.0, 1.0, 7.0])) for _ in range(number)] for _ in range(number)])
    bandwidth = np.array([[draw(st.sampled_from([0.5, 1.0, 8.0])) for _ in range(number)] for _ in range(number)])
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    nbytes = np.array([draw(st.integers(0, 9)) for _ in pins], float)
    prices = LinkPrices(nbytes, pins, latency, bandwidth, draw(st.integers(1, 2)))
    limited = not chain and draw(st.booleans())
    slots = [
        Slot(d, draw(st.integers(count, 3 * count)) if limited else np.inf, not chain and draw(st.integers(0, 5)) == 0)
        for d in range(number)
    ]
    held = np.array([draw(st.integers(0, 4)) for _ in range(count)])
    return problem_of(work, pairs, prices, slots, held), prices


def problem_of(work, pairs, prices, slots, held):
    """What a solver is given that knows one price of each value, and one factor of each link."""
    apart = ~np.eye(len(slots), dtype=bool)
    seconds = prices.again * (prices.latency[None] + prices.nbytes[:, None, None] / prices.bandwidth[None])
    least = np.array([table[apart].min() for table in seconds])
    nets = [(cost, pins) for cost, pins in zip(least.tolist(), prices.pins, strict=True)]
    return Problem.of(work, nets, pairs, slots, nbytes=held, links=np.ones((len(slots), len(slots))))


def true_loads(problem, prices, device):
    """By the definition: a reader pays for the link from the maker, the maker for the slowest that it takes."""
    loads = [sum(problem.seconds[d, u] for u, at in enumerate(device) if at == d) for d in range(len(problem.devices))]
    for nbytes, (maker, *readers) in zip(prices.nbytes.tolist(), prices.pins, strict=True):
        home = device[maker]
        paid = {
            to: prices.again * (prices.latency[home, to] + nbytes / prices.bandwidth[home, to])
            for to in {device[reader] for reader in readers} - {home}
        }
        for to, seconds in [*paid.items(), *([(home, max(paid.values()))] if paid else [])]:
            loads[to] += 0 if problem.devices[to].cpu else seconds
    return loads


def best_of_all(problem, prices, *, acyclic):
    """The least greatest load of all placements that may be; None if there is none."""
    best = None
    for device in product(range(len(problem.devices)), repeat=problem.units):
        held = [sum(problem.nbytes[u] for u, at in enumerate(device) if at == d) for d in range(len(problem.devices))]
        if any(not s.cpu and h > s.capacity for s, h in zip(problem.devices, held, strict=True)):
            continue
        if acyclic and cycles(np.array(device)[problem.edges], len(problem.devices)):
            continue
        value = max(true_loads(problem, prices, device))
        if np.isfinite(value):
            best = value if best is None else min(best, value)
    return best


@few_of_many(15, 600, st.tuples(cases(), st.booleans()))
def test_small_problems_are_solved_for_certain(case):
    (problem, prices), acyclic = case
    best = best_of_all(problem, prices, acyclic=acyclic)
    try:
        first = (contiguous if acyclic else noncontiguous)(problem, seconds=1)
    except InfeasibleError:
        assert best is None
        return
    found = on_unequal_links(problem, prices, first, 1.0, acyclic=acyclic, clock=endless_clock())
    assert found.value == pytest.approx(max(true_loads(problem, prices, found.device.tolist())))
    assert found.value == pytest.approx(best) and found.bound == pytest.approx(best) and found.optimal
    if acyclic:
        assert sorted(found.order) == sorted(set(found.device.tolist()))
        place = {device: i for i, device in enumerate(found.order)}
        ends = [(place[a], place[b]) for a, b in found.device[problem.edges].tolist()]
        assert all(a <= b for a, b in ends)


@few_of_many(20, 400, cases(chain=True))
def test_chains_are_solved_by_lines_over_all_orders_of_devices(case):
    problem, prices = case
    linked = linked_of(problem, prices)
    device = best_on_order(linked, np.arange(problem.units))
    assert linked.loads(device).max() == pytest.approx(best_of_all(problem, prices, acyclic=True))


def linked_of(problem, prices):
    free = np.zeros(len(problem.devices), bool)
    room = np.array([slot.capacity for slot in problem.devices])
    group = np.arange(problem.units)
    return UnequalLinks.of(problem.seconds, problem.nbytes, room, free, problem.edges, prices, group, acyclic=True)


def long_chain(units):
    """A chain over a quick pair of devices and a third one that is far away; far too long to try all placements."""
    far, wide = np.array([[0, 1, 50], [1, 0, 50], [50, 50, 0]], float), np.full((3, 3), np.inf)
    pairs = [(i, i + 1) for i in range(units - 1)]
    prices = LinkPrices(np.ones(units - 1), tuple(pairs), far, wide, 1)
    return problem_of(np.ones((3, units)), pairs, prices, [Slot(d) for d in range(3)], np.zeros(units, int)), prices


def test_a_chain_that_is_long_is_cut_on_the_near_devices():
    """A solver that takes each link for the quickest uses all three, or one."""
    problem, prices = long_chain(60)
    first = contiguous(problem, seconds=1)
    found = on_unequal_links(problem, prices, first, 1.0, acyclic=True, clock=endless_clock())
    assert found.value == 31.0 and set(found.device.tolist()) == {0, 1} and found.bound <= 31.0


def test_steps_that_are_used_up_prove_nothing():
    problem, prices = long_chain(12)
    exact = Enumeration(linked_of(problem, prices), np.arange(12), 20, endless_clock())
    exact.run(np.inf)
    assert not exact.proven


def test_of_two_placements_the_one_whose_largest_loads_are_less_is_better():
    by_key = sorted(
        [(4.0, 1.0, 4.0), (1.0, 4.0, 2.0), (5.0, 0.0, 0.0), (4.0, 2.0, 2.0)], key=lambda x: _key(np.array(x))
    )
    assert by_key == [(1.0, 4.0, 2.0), (4.0, 2.0, 2.0), (4.0, 1.0, 4.0), (5.0, 0.0, 0.0)]
