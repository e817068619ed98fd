"""The benchmarks of pipelines: what they call right and wrong, one model through the one and one row of the other."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NAMES = ("pipeline_models", "pipeline_compare", "pipeline")


@pytest.fixture(scope="module")
def benchmarks():
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield {name: importlib.import_module(name) for name in NAMES}
    torch.set_num_threads(threads)
    for name in [name for name in sys.modules if name in NAMES or name.startswith("zoo_")]:
        sys.modules.pop(name)


def test_what_differs_is_wrong(benchmarks):
    models, compare = benchmarks["pipeline_models"], benchmarks["pipeline_compare"]
    assert compare.apart(torch.ones(2), torch.ones(2)) == 0
    assert compare.apart(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 0.5
    assert compare.apart(torch.tensor([0.5]), torch.tensor([1.0]), least=5.0) == 0.1
    assert compare.apart(torch.ones(2), torch.ones(3)) == float("inf")
    near, far = {"first": {"gradient": (1e-7, "a")}}, {"first": {"gradient": (1e-3, "b")}}
    assert models.judged([near | {"borders": [1]}])["verdict"] == "right"
    found = models.judged([near | {"borders": [1]}, far | {"borders": [1]}])
    assert found["verdict"] == "wrong" and found["gradient first"] == 1e-3 and "b" in found["why"]
    broken = {"first": {"gradient": (float("nan"), "c")}, "borders": [1]}
    assert models.judged([broken])["verdict"] == "wrong"
    refused = {"verdict": "refused", "why": "SK801"}
    assert models.judged([{"verdict": "fails", "why": "another rank"}, refused]) == refused


def test_the_eleven_are_there(benchmarks):
    models = benchmarks["pipeline_models"]
    args = type("Args", (), {"zoo": False, "only": []})
    assert len(models.chosen(args)) == 11 and len({case.schedule for case in models.EVERY}) == 7


def printed(name, *words):
    """What a benchmark prints in a process of its own: it forks its ranks, which torch forbids after a backward."""
    script = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    done = subprocess.run([sys.executable, script, *words, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.campaign
def test_a_model_of_the_zoo_in_two_and_four_stages():
    found = printed("pipeline_models", "--zoo", "--only", "WordLM")
    (row,) = found["rows"]
    assert [case["stages"] for case in row["cases"]] == [2, 4, 4]
    assert found["summary"]["right in every case"] == 1, row


def test_a_row_beside_stages_by_hand():
    (row,) = printed("pipeline", "--only", "overhead, next", "--rounds", "2", "--microbatches", "2")["rows"]
    assert row["ratios"]["by hand"]["busy"]["ratio"] == 1 and row["ratios"]["chain"]["busy"]["seconds"] > 0
