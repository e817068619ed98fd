"""Real ranks over gloo run what the simulation foresees: the same order, and as many microbatches in flight."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from launch import launch

PATH = Path(__file__).parents[2] / "benchmarks" / "schedules.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("schedules", PATH)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "schedules", module)
        spec.loader.exec_module(module)
        patch.setattr(module.mp, "start_processes", _forked)  # else each rank would import torch anew
        yield module


def _forked(run, given, nprocs, start_method):
    assert run.__name__ == "run_rank" and start_method == "spawn"
    cases, repeat, folder = given
    launch("pipeline/sleeping.py", nprocs, json.dumps([asdict(case) for case in cases]), str(repeat), folder)


def test_ranks_run_in_the_order_that_was_simulated_and_hold_as_much(benchmark):
    cases = benchmark.cases_of(benchmark.RUNNABLE, ranks=2, microbatches=4, seconds=0.001, heavy=1)
    rows = benchmark.rows_of(cases, repeat=1)
    assert len(rows) == len(benchmark.RUNNABLE) >= 5
    for row in rows:
        assert row["same_order"], row["schedule"]
        assert row["in_flight"] == row["in_flight_simulated"], row["schedule"]


def test_another_order_would_be_seen(benchmark):
    case = benchmark.Case("1F1B", 2, 2, (1.0, 1.0))
    parts = benchmark.expected_log(case, 0, case.simulate())
    log = [(0, "F", 0), (0, "F", 1), (0, "W", 0), (0, "I", 0), (0, "I", 1), (0, "W", 1)]
    assert benchmark.same_order(log, parts) and benchmark.most_in_flight(log) == 2
    assert not benchmark.same_order(log[1:], parts) and not benchmark.same_order(log + log[:1], parts)
    assert not benchmark.same_order([log[1], log[0], *log[2:]], parts)
