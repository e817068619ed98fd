"""The search for what to recompute simulates few plans, and its bound is near the optimum."""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
from jointmodels import step_of

import splitkit as sk
from splitkit.errors import NoPlanError
from splitkit.policies import Budget
from splitkit.search.recompute.plan_pool import Pool as PlansSeen
from splitkit.search.recompute.recompute_search import RecomputeSearch
from splitkit.solvers.recompute import Limit, Program
from splitkit.training.choices import savings
from splitkit.training.peaks import Peaks


@contextmanager
def simulated():
    """A list with an entry for each plan that is simulated meanwhile."""
    simulate, seen = PlansSeen._simulate, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlansSeen, "_simulate", lambda self, choice: seen.append(choice) or simulate(self, choice))
        yield seen


@cache
def planned_deep():
    """A step of four layers, its prices, a plan for it, and how many plans were simulated for that."""
    joint, prices = step_of(4)
    with simulated() as seen:
        plan = Budget(0.8).assign(joint.flow, prices)
    return joint, prices, plan, len(seen)


@pytest.mark.campaign  # how long a refusal takes, not what it says
def test_a_refusal_of_a_budget_simulates_at_most_twice_as_many_plans_as_a_plan():
    joint, prices, _, planned = planned_deep()
    with simulated() as seen, pytest.raises(NoPlanError) as raised:
        Budget(1).assign(joint.flow, prices)
    assert len(seen) <= 2 * planned
    lowest = int(re.search(r"Budget\((\d+)", raised.value.remedy)[1])
    pair = joint.split(Budget(lowest), prices)
    assert sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak <= lowest


def test_a_program_for_saved_bytes_decides_a_window_of_a_large_graph(monkeypatch):
    """The plan is as quick as that of the whole program, within 1 %."""
    joint, prices, _, _ = planned_deep()
    problem = savings(joint.flow, prices)
    search = RecomputeSearch(PlansSeen(problem, Peaks(joint.flow)))
    most = problem.choose(np.zeros(len(problem.ops), bool)).nbytes
    for share in (0.5, 0.3):
        limit = Limit(np.zeros(len(problem.ops), np.int64), problem.nbytes, int(share * most))
        opened = []
        whole = search._program.search([limit])
        with monkeypatch.context() as patch:
            next_to = Program._next_to
            patch.setattr(Program, "_next_to", lambda *given: opened.append(next_to(*given)) or opened[-1])
            near = search._program.beside([limit], 100)
        assert 100 <= int(opened[0][: len(problem.ops)].sum()) < 150 < len(problem.ops)
        assert limit.holds(near.runs, near.saved) and near.bound <= whole.price * (1 + 1e-6)
        assert near.price <= 1.01 * whole.price


def test_the_bound_of_a_peak_counts_what_forward_makes_only_to_save_it():
    """The derivative of an activation, where it is saved, is there between the halves. Without it the gap is 47 %."""
    _, _, plan, _ = planned_deep()
    assert float(re.search(r"which is ([\d.]+)% less", plan.note)[1]) < 24
