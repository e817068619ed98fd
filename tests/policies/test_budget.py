"""`Budget`: the best plan for saved bytes, a plan within the peak, and errors that name the smallest budget."""

from __future__ import annotations

import re
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from campaigns import few_of_many, these_first
from choices import steps
from hypothesis import strategies as st
from jointmodels import Branches, Chain, Deep, Normed, wide
from torch import nn

import splitkit as sk
from splitkit.costs import roofline
from splitkit.errors import NoPlanError, PolicyError
from splitkit.frontends.joint_capture import capture_joint
from splitkit.memory.profile import simulate_memory
from splitkit.policies import PlanPool, RecomputeAll, Remat, SaveAll
from splitkit.policies.budget import Budget
from splitkit.search.recompute import plan_pool as pool
from splitkit.search.recompute.memory_limits import MemoryFloors, MomentLimits
from splitkit.search.recompute.recompute_search import RecomputeSearch
from splitkit.training.choices import savings
from splitkit.training.peaks import Peaks


@cache
def small(make, width):
    """A graph so small that every plan can be tried; nobody may change it."""
    torch.manual_seed(0)
    joint = capture_joint(make(width), torch.randn(256, 8))
    costs = roofline(joint.graph_module)
    problem = savings(joint.flow, costs)
    return joint, costs, problem, Peaks(joint.flow)


@cache
def every(make, width):
    """Return (seconds, saved bytes, peak, choice) of every possible choice."""
    _, _, problem, peaks = small(make, width)
    found = {}
    free = sorted(set(problem.maker[problem.savable].tolist()) - set(np.flatnonzero(problem.fixed).tolist()))
    assert len(free) <= 12
    for bits in product((False, True), repeat=len(free)):
        runs = np.ones(len(problem.ops), bool)
        runs[free] = bits
        choice = problem.choose(runs)
        found[choice.runs.tobytes()] = choice
    return [(c.seconds, c.nbytes, peaks.trace(c.plan()).peak, c) for c in found.values()]


def seconds_of(problem, plan):
    return problem.choose(np.array(["backward" in plan[n] for n in problem.ops])).seconds


def profile_of(joint, plan):
    pair = joint.split(plan)
    return simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)


GRAPHS = these_first([(Chain, 16), (Branches, 16), (Deep, 8), (Normed, 8)], [(Chain, 4), (Branches, 4), (Deep, 32)])


@pytest.mark.parametrize(("make", "width"), GRAPHS)
def test_no_plan_that_saves_as_little_is_quicker(make, width):
    joint, costs, problem, _ = small(make, width)
    plans = every(make, width)
    for limit in sorted({saved for _, saved, *_ in plans})[::2]:
        plan = Budget(limit, of="saved").assign(joint.flow, costs)
        best = min(seconds for seconds, saved, *_ in plans if saved <= limit)
        assert seconds_of(problem, plan) == pytest.approx(best, rel=1e-4)
        assert profile_of(joint, plan).saved <= limit


def test_the_fewest_bytes_that_can_be_saved():
    """Random masks are saved, whatever the budget: the error says how many bytes that takes."""
    joint, _ = wide("gpt2")
    fewest = profile_of(joint, RecomputeAll()).saved
    assert profile_of(joint, Budget(fewest, of="saved")).saved == fewest > 0
    with pytest.raises(NoPlanError) as raised:
        joint.split(Budget(fewest - 1, of="saved"))
    assert f"Budget({fewest}, of='saved')" in raised.value.remedy


@pytest.mark.parametrize(("make", "width"), GRAPHS)
def test_peaks_against_every_plan(make, width):
    """The plan is always within the budget and nearly always the best; the bound holds for every plan."""
    joint, costs, problem, peaks = small(make, width)
    plans = every(make, width)
    limits = sorted({peak for *_, peak, _ in plans})
    equal = 0
    for limit in limits:
        best = min(seconds for seconds, _, peak, _ in plans if peak <= limit)
        bound = RecomputeSearch(pool.Pool(problem, peaks)).peak(limit)
        assert bound <= best * (1 + 1e-9)
        plan = Budget(limit).assign(joint.flow, costs)
        assert profile_of(joint, plan).peak <= limit
        assert seconds_of(problem, plan) >= best * (1 - 1e-9)
        equal += seconds_of(problem, plan) <= best * (1 + 1e-3)
    assert equal >= 0.9 * len(limits)


@pytest.mark.parametrize(("make", "width"), GRAPHS)
def test_floors_are_below_every_plan(make, width):
    _, _, problem, peaks = small(make, width)
    floors = MemoryFloors(MomentLimits(problem, peaks))
    for *_, peak, choice in every(make, width):
        saved = np.zeros(len(problem.nbytes))
        saved[problem.storage[choice.saved]] = 1.0
        assert not list(floors.over(saved, peak))


def test_what_is_over_the_budget_is_over_the_limit():
    _, _, problem, peaks = small(Chain, 16)
    moments, budget = MomentLimits(problem, peaks), min(peak for *_, peak, _ in every(Chain, 16))
    for *_, peak, choice in every(Chain, 16):
        limits = list(moments.limits(choice, peaks.trace(choice.plan()), budget))
        saved = np.zeros(len(problem.nbytes), bool)
        saved[problem.storage[choice.saved]] = True
        assert bool(limits) == (peak > budget)
        assert not any(limit.holds(choice.runs, saved) for limit in limits)


@pytest.mark.parametrize(
    ("name", "of"), these_first([("gpt2", "peak"), ("gpt2", "saved")], [("bert", "peak"), ("bert", "saved")])
)
def test_a_larger_budget_never_costs_more(name, of):
    joint, _ = wide(name)
    costs = roofline(joint.graph_module)
    problem = savings(joint.flow, costs)
    whole = profile_of(joint, SaveAll())
    spent, known = [], PlanPool()
    for share in (0.7, 0.8, 0.9, 0.95, 1.0):
        limit = int(share * getattr(whole, of))
        try:
            plan = Budget(limit, of=of, pool=known).assign(joint.flow, costs)
        except NoPlanError:
            continue
        assert getattr(profile_of(joint, plan), of) <= limit
        spent.append(seconds_of(problem, plan))
    assert len(spent) >= 1 and spent == sorted(spent, reverse=True) and spent[-1] == 0


@few_of_many(12, 60, steps(), st.lists(st.floats(0.3, 1.0), min_size=2, max_size=4))
def test_budgets_that_rise_cost_less_and_less(made, shares):
    """With one pool and the smallest budget first, each search finds the plans of those before it."""
    flow, costs = made
    known = PlanPool()
    problem, peaks = savings(flow, costs), Peaks(flow)
    whole = peaks.trace(SaveAll().assign(flow, costs)).peak
    spent = []
    for share in sorted(shares):
        try:
            spent.append(seconds_of(problem, Budget(int(share * whole), pool=known).assign(flow, costs)))
        except NoPlanError:
            assert not spent
    assert spent == sorted(spent, reverse=True)


def test_the_error_names_a_plan_that_can_be_had():
    joint, _ = wide("gpt2")
    with pytest.raises(NoPlanError) as raised:
        joint.split(Budget(1000))
    assert raised.value.code == "SK303" and "1000 bytes" in raised.value.reason
    lowest = int(re.search(r"Budget\((\d+), of='peak'\)", raised.value.remedy)[1])
    assert re.search(r"no plan is below [\d.]+ .?i?B", raised.value.reason)
    assert profile_of(joint, Budget(lowest)).peak == lowest
    assert lowest <= min(profile_of(joint, policy).peak for policy in (SaveAll(), RecomputeAll()))


def test_candidates_are_never_beaten_by_the_result():
    joint, _ = wide("gpt2")
    costs = roofline(joint.graph_module)
    problem, own = savings(joint.flow, costs), Remat(["aten.mm", "aten.addmm", "aten.bmm"])
    theirs = own.assign(joint.flow, costs)
    limit = profile_of(joint, theirs).peak
    plan = Budget(limit, candidates=(own, theirs)).assign(joint.flow, costs)
    assert profile_of(joint, plan).peak <= limit
    assert seconds_of(problem, plan) <= seconds_of(problem, theirs)


@pytest.mark.parametrize("name", these_first(["gpt2"], ["llama", "t5"]))
def test_predicted_is_measured_and_gradients_are_eager(name):
    joint, made = wide(name)
    costs = roofline(joint.graph_module)
    whole = joint.split(SaveAll())
    primals, tangents = joint.primals(*made.args, **made.kwargs), joint.tangents()
    torch.manual_seed(0)
    expected = whole.run(list(primals), tangents)
    limit = int(0.6 * simulate_memory(whole.forward, whole.backward, user_outputs=whole.outputs).saved)
    pair = joint.split(Budget(limit, of="saved"), costs)
    predicted = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    assert predicted.saved <= limit
    held = list(primals)
    assert predicted.peak == sk.measure_memory(pair.run, list(primals), tangents).peak
    torch.manual_seed(0)
    for mine, theirs in zip(pair.run(held, tangents), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None)


def test_the_note_says_what_is_claimed():
    joint, costs, _, _ = small(Chain, 16)
    plan = Budget(0.5, of="saved").assign(joint.flow, costs)
    saves = r"The peak is .*iB\. Forward saves .*iB \(within .*iB\), and backward recomputes for .*s\. "
    assert re.fullmatch(saves + "No plan recomputes less", plan.note)
    assert Budget(1.0).assign(joint.flow, costs).note.endswith("and backward recomputes nothing")


@pytest.mark.parametrize("share", these_first([0.8, 0.0], [0.3]))
def test_a_share_is_of_what_can_be_saved_and_never_refused(share):
    """A share lies between the lowest peak found and the peak of SaveAll, however much of it is parameters."""
    layers = (nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    joint = capture_joint(nn.Sequential(*layers), torch.randn(64, 8), loss=torch.sum)
    costs = roofline(joint.graph_module)
    least, whole = (profile_of(joint, policy.assign(joint.flow, costs)).peak for policy in (Budget(0.0), SaveAll()))
    assert share * whole < least < whole
    assert profile_of(joint, Budget(share).assign(joint.flow, costs)).peak <= least + share * (whole - least)


def test_a_refusal_has_the_plan_that_is_nearest():
    joint, costs, _, _ = small(Chain, 16)
    with pytest.raises(NoPlanError) as refused:
        Budget(1000).assign(joint.flow, costs)
    assert profile_of(joint, refused.value.nearest).peak == 1000 + refused.value.excess


@pytest.mark.parametrize("budget", [0.5, "0.5KiB", 512, "512", "0.512 kB"])
def test_budgets_as_people_write_them(budget):
    assert Budget(budget)._bytes(1024) == 512


@pytest.mark.parametrize("budget", [-1, 1.5, "much", "2 XiB", True, None, float("nan"), ""])
def test_a_bad_budget_is_refused(budget):
    with pytest.raises(PolicyError, match="SK302"):
        Budget(budget)


def test_other_bad_parameters_are_refused():
    with pytest.raises(PolicyError, match="SK302"):
        Budget(0.5, of="flops")
    with pytest.raises(PolicyError, match="SK302"):
        sk.split(sk.capture(nn.Linear(2, 2), torch.randn(1, 2)), Budget(0.5))


def test_the_least_of_either_kind_says_what_is_proven():
    joint = capture_joint(Chain(8), torch.randn(2, 8))
    notes = {of: joint.split(Budget("least", of=of, pool=PlanPool())).plan.note for of in ("saved", "peak")}
    assert "the fewest found" in notes["saved"] and "No plan saves less" in notes["saved"]
    assert notes["peak"].startswith("The peak is ") and "No plan's peak is below" in notes["peak"]
