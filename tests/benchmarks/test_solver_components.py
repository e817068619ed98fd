"""The benchmark of the solvers' components: each is switched off and on again, and what it is worth is seen."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

SEARCH = "contiguous: OperatorGraphs_bert_l-3_inference"


@pytest.fixture(scope="module")
def benchmark():
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("solver_components")
    for name in set(sys.modules) - before:
        if "benchmarks" in str(getattr(sys.modules[name], "__file__", "")):
            sys.modules.pop(name)


def test_each_component_is_there_and_is_switched_on_again(benchmark):
    assert len({part.name for part in benchmark.COMPONENTS}) == len(benchmark.COMPONENTS)
    for part in benchmark.COMPONENTS:
        own = part.owner.__dict__[part.attribute]
        with benchmark.without(part):
            assert part.owner.__dict__[part.attribute] is not own, part.name
        assert part.owner.__dict__[part.attribute] is own, part.name


def test_a_search_without_what_proves_its_optimum_proves_less(benchmark, monkeypatch, capfd):
    monkeypatch.setattr(
        sys, "argv", ["x", "--json", "--only", SEARCH, "--components", "stages: ideals", "stages: shares"]
    )
    benchmark.main()
    entries = {entry["component"]: entry for entry in json.loads(capfd.readouterr().out)["components"]}
    ideals = entries["stages: ideals"]
    assert ideals["searches"] == 1 and ideals["seconds"] > 0
    assert ideals["bound"]["worse"] == 1 and ideals["bound"]["worst"] > 1e-3
    assert entries["stages: shares"]["searches"] == 0, "it was not called"


def test_a_search_that_fails_without_a_component_is_worse(benchmark):
    outcome = benchmark.Outcome((2.0, 3.0), 1.0, "x")
    assert benchmark.compared(outcome, None) == {"plan": float("inf"), "bound": 0.0}
    assert benchmark.compared(outcome, benchmark.Outcome((2.0, 1.5), 1.1, "x"))["plan"] == -0.5
    assert benchmark.compared(outcome, benchmark.Outcome((2.0, 3.0), 0.9, "x")) == {
        "plan": 0.0,
        "bound": pytest.approx(0.1),
    }
