"""`benchmarks/budgets.py` counts pairs of budgets with rising peaks, and takes up a run that was cut off."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def budgets():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("budgets")
    for name in [name for name in sys.modules if name == "budgets" or name.startswith("zoo_")]:
        sys.modules.pop(name)


def row(name, torch, splitkit, again=False):
    peaks = {"torch": torch, "splitkit": splitkit}
    kinds = {who: {"measured": found, "predicted": found, "draws again": [again] * 3} for who, found in peaks.items()}
    return {"model": name, "budgets": [0.0, 0.5, 1.0], "held": 10, **kinds}


def test_a_rise_is_a_pair_of_budgets_whose_smaller_one_has_the_higher_peak(budgets):
    assert budgets.rises([30, 10, 20, 40]) == [(0, 1), (0, 2)]
    assert budgets.rises([10, 10, 20]) == budgets.rises([]) == []


def test_a_run_goes_on_where_it_was_cut_off(budgets, tmp_path):
    first, second, third = list(budgets.specimens())[:3]
    rows = [
        row(first, [40, 20, 30], [15, 20, 40]),
        {"model": second, "error": "no"},
        row(third, [20] * 3, [20] * 3, True),
    ]
    for found in rows:
        (tmp_path / f"{found['model']}.json").write_text(json.dumps(found))
    assert budgets.table(2, tmp_path) == rows
    total = budgets.summary(rows)
    assert (total["models"], total["pairs of budgets"]) == (2, 6)
    assert total["measured rises"] == {"torch": 2, "splitkit": 0}
    assert total["models with measured rises"] == {"torch": 1, "splitkit": 0}
    assert total["predicted is measured"] == {"torch": 6, "splitkit": 6}
    ratio = "lowest peak above what the caller holds, splitkit / torch"
    assert total[f"{ratio}, all"] == {"median": 0.75, "least": 0.5, "most": 1.0}
    assert total[f"{ratio}, no numbers drawn again"] == {"median": 0.5, "least": 0.5, "most": 0.5}
    assert total["models in which torch draws random numbers again"] == 1
    assert total["left out"] == {second: "no"}


def test_the_row_of_a_model(budgets):
    found = budgets.row_of("Siamese", (0.0, 1.0))
    for who in ("torch", "splitkit"):
        assert found[who]["predicted"] == found[who]["measured"]
    assert found["splitkit"]["measured"][0] <= found["splitkit"]["measured"][1] and found["held"] > 0
