"""The scripts of docs/open_issues.md show both outcomes: torch's, as reported, and splitkit's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "open_issues"


def script(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_runs_of_checkpointed_blocks_hold_several():
    found = script("shared_checkpointed_blocks").outcomes(2)
    assert found["torch's partitioner"] > found["eager"] >= found["splitkit least"]


@pytest.mark.campaign
def test_the_peak_rises_as_torchs_budget_falls():
    budgets = (0.0, 0.1, 1.0)
    found = script("budget_raises_peak").outcomes(8, budgets)
    ours = [found["splitkit"][budget] for budget in budgets]
    assert found["torch"][0.0] > found["torch"][0.1] and ours == sorted(ours)
