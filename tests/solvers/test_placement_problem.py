from __future__ import annotations

from dataclasses import replace

import numpy as np
import placementcases as cases
import pytest
from campaigns import few_of_many
from hypothesis import strategies as st

from splitkit.solvers.placement.contract import contracted_core, tightened_core
from splitkit.solvers.placement.core import acyclic_groups, core_of
from splitkit.solvers.placement.problem import BadProblemError, Problem, Slot
from splitkit.solvers.placement.solution import cycles, faults, loads, memory


def plain(**change):
    return replace(Problem.of(np.ones((1, 3)), [(1.0, (0, 1))], [(0, 1)], [Slot()] * 2), **change)


@few_of_many(60, 300, cases.problems(), st.data())
def test_the_evaluator_follows_the_definition(problem, data):
    number = len(problem.devices)
    factors = data.draw(st.lists(st.lists(st.integers(1, 5), min_size=3, max_size=3), min_size=3, max_size=3))
    if data.draw(st.booleans()):
        problem = cases.with_links(problem, [row[:number] for row in factors[:number]])
    device = np.array(data.draw(st.lists(st.integers(0, number - 1), min_size=problem.units, max_size=problem.units)))
    order = tuple(data.draw(st.permutations(sorted(set(device.tolist())))))
    supported = all(np.isfinite(problem.seconds[problem.devices[d].kind, v]) for v, d in enumerate(device))
    if supported:
        assert loads(problem, device) == pytest.approx(cases.load_by_definition(problem, device))
    fits = cases.fits(problem, device, order)
    assert (
        all(
            d.cpu or held <= d.capacity for d, held in zip(problem.devices, memory(problem, device, order), strict=True)
        )
        == fits
    )
    legal = cases.apart(problem, device) and fits and cases.goes_down(problem, device, order)
    assert (not faults(problem, device, order)) == legal


@few_of_many(60, 300, cases.problems(units=6))
def test_what_must_be_together_is_together_in_every_better_placement(problem):
    problem = replace(problem, fill=False, in_flight=())
    core = core_of(problem, acyclic_groups(problem))
    if core.barred.all(axis=0).any():
        return
    best = cases.best_stages(problem)
    if best == cases.INF:
        return
    joined = tightened_core(core, int(best * core.scale * (1 + 1e-9)) + 1)
    assert cases.best_stages(replace(problem, colours=joined.group)) == pytest.approx(best)
    assert not cycles(joined.edges, joined.size)
    smaller = contracted_core(joined)
    assert cases.best_stages(replace(problem, colours=smaller.group)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("change", "field", "units", "devices"),
    [
        ({"seconds": np.array([[1.0, -1.0, np.nan]])}, "seconds", (1, 2), ()),
        ({"net_costs": np.array([np.nan])}, "net_costs", (0,), ()),
        ({"net_costs": np.array([np.inf])}, "net_costs", (0,), ()),
        ({"links": np.array([[0.0, np.inf], [1.0, 0.0]])}, "links", (), (0,)),
    ],
)
def test_bad_input_is_refused_with_its_field(change, field, units, devices):
    with pytest.raises(BadProblemError) as caught:
        plain(**change)
    assert (caught.value.field, caught.value.units, caught.value.devices) == (field, units, devices)


def test_links_make_who_sends_to_several_pay_for_the_slowest():
    problem = Problem.of(np.zeros((1, 3)), [(2.0, (0, 1, 2))], [(0, 1), (0, 2)], [Slot()] * 3)
    problem = replace(problem, links=np.array([[0.0, 1.0, 3.0], [1.0, 0.0, 1.0], [5.0, 1.0, 0.0]]))
    assert loads(problem, np.array([0, 1, 2])).tolist() == [6.0, 2.0, 6.0]
