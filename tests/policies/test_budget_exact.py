"""Peak budgets compared with exact models of small blocks: every plan, and any order of backward."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest
from campaigns import these_first

from splitkit.search.recompute.plan_pool import Pool

PATH = Path(__file__).parents[2] / "benchmarks" / "checkmate.py"
BLOCKS = these_first(["mlp", "attention", "resnet block"], ["unet block"])


@cache
def checkmate():
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("checkmate", PATH)
    sys.modules["checkmate"] = module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(PATH.parent))  # as for a script: it imports its blocks from beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(PATH.parent))
    return module


@cache
def solved(name):
    """Return a block, the lowest plan that was found, budgets, and every plan."""
    block = checkmate().Block.of(name)
    low, budgets = checkmate().budgets_of(block)
    masks = checkmate().every_plan(block.problem, 5000)
    pool = Pool(block.problem, block.peaks)
    return block, low, budgets, [pool.see(runs) for runs in masks]


def test_every_plan_is_every_plan():
    block, *_, plans = solved("mlp")
    free, problem = block.free.nonzero()[0], block.problem
    runs = {p.choice.runs.tobytes() for p in plans}
    assert len(runs) == len(plans)
    for bits in range(2 ** len(free)):
        mask = ~block.free
        mask[[op for i, op in enumerate(free) if bits >> i & 1]] = True
        assert problem.choose(mask).runs.tobytes() in runs


@pytest.mark.parametrize("name", BLOCKS)
def test_the_lowest_peak_of_all_plans_is_found(name):
    _, low, _, plans = solved(name)
    assert low.peak == min(plan.peak for plan in plans)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_quickest_of_all_plans_is_found(name):
    block, _, budgets, plans = solved(name)
    ratios = []
    for budget in budgets:
        best = min(plan.seconds for plan in plans if plan.peak <= budget)
        ratios.append(checkmate().ratio(checkmate().found(block, budget).seconds, best))
    assert max(ratios) == 1.0


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_no_plan_beats_any_schedule(name):
    """The program may order backward as no plan can, and is hardly better for it."""
    block, low, budgets, plans = solved(name)
    schedule = checkmate().Schedule(block.problem, block.peaks, times=1)
    found, proven = schedule.solve(None, 20.0)
    assert proven <= low.peak * (1 + 1e-6) and found == pytest.approx(low.peak, rel=1e-3)
    for budget in budgets[::2]:
        best = min(plan.seconds for plan in plans if plan.peak <= budget)
        assert schedule.solve(budget, 20.0)[1] <= best * (1 + 1e-6)
