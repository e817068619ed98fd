"""The benchmark of many architectures: its rows, its verdicts, and architectures through all of it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from campaigns import these_first
from torch import nn

import splitkit as sk


@pytest.fixture(scope="module")
def zoo():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("zoo")
    for name in [name for name in sys.modules if name == "zoo" or name.startswith("zoo_")]:
        sys.modules.pop(name)


@pytest.fixture
def models(zoo):
    return sys.modules["zoo_models"]


def run(zoo, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["zoo.py", *arguments])
    zoo.main()
    return capsys.readouterr().out


def steps_of(zoo, models, make, mode="eval"):
    heard = []
    steps = zoo.Steps(models.Row("net", "test", "torch", lambda training: make()), mode, lambda found: heard.append(1))
    steps.run()
    assert len(heard) == 2 * len(steps.found["verdicts"])
    return steps.found


def test_rows_have_names_of_their_own_and_none_is_of_the_suite(models):
    names = [row.name for row in models.rows()]
    assert len(names) == len(set(names)) >= 100
    suite = {
        "GPT2LMHeadModel",
        "LlamaForCausalLM",
        "BertForMaskedLM",
        "T5ForConditionalGeneration",
        "MixtralForCausalLM",
    }
    assert not suite.intersection(names) and "ViTForImageClassification" not in names
    assert len({row.family for row in models.rows()}) >= 10


@pytest.mark.parametrize("names", these_first([["VAE"]], [["VAE", "Siamese"]]), ids=len)
def test_architectures_go_through_all_of_it(zoo, monkeypatch, capsys, names):
    data = json.loads(
        run(zoo, monkeypatch, capsys, "--only", *names, "--family", "plain torch", "--jobs", "2", "--json")
    )
    assert [row["name"] for row in data["rows"]] == names
    for row in data["rows"]:
        assert [mode["mode"] for mode in row["modes"]] == ["eval", "train"]
        for mode in row["modes"]:
            assert set(mode["verdicts"].values()) == {"passes"}, mode
            assert mode["memory error"] == 0
        assert {"joint", "SaveAll", "training memory", "budget"} <= row["modes"][1]["verdicts"].keys()
        assert row["modes"][1]["training memory error"] == 0
    summary = data["summary"]
    calls = 2 * len(names)
    assert summary["calls"] == calls and summary["captured of those that export takes"] == f"{calls} of {calls}"
    assert all(summary["aims"].values())
    assert summary["memory"]["exact"] == summary["memory"]["predicted"] == 3 * len(names)
    monkeypatch.setattr(zoo, "examined", lambda row, context: data["rows"][0])  # what was learnt just now
    printed = run(zoo, monkeypatch, capsys, "--only", "VAE", "--family", "plain torch")
    assert "VAE" in printed and "exact / exact" in printed


def test_what_is_wrong_refused_or_fails_is_said_so(zoo, models, monkeypatch):
    def net():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()), {"input": torch.ones(2, 4)}

    steps = ["eager", "export", "capture", "split", "memory"]
    assert steps_of(zoo, models, net)["verdicts"] == dict.fromkeys(steps, "passes")
    split = sk.split

    def another(gm, policy):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.neg.default
        gm.recompile()
        return split(gm, policy)

    monkeypatch.setattr(sk, "split", another)
    found = steps_of(zoo, models, net)
    assert found["verdicts"]["split"] == "wrong"
    assert "differ: output by" in found["why"]["split"] and found["why"]["split"].endswith(
        "; so does what was captured"
    )
    monkeypatch.setattr(sk, "split", lambda gm, policy: split(gm, sk.policies.AroundOps(["no such op"])))
    found = steps_of(zoo, models, net)
    assert found["verdicts"]["split"] == "refused" and found["why"]["split"].startswith("SK3")
    monkeypatch.setattr(sk, "split", lambda gm, policy: 1 / 0)
    found = steps_of(zoo, models, net)
    assert found["verdicts"]["split"] == "fails" and found["why"]["split"] == "ZeroDivisionError: division by zero"


class Fickle(nn.Module):
    """Another answer at each call, whichever of them is called."""

    calls = 0

    def forward(self, x):
        Fickle.calls += 1
        return x * Fickle.calls


def test_a_model_that_is_not_itself_twice_is_a_fault_of_the_row(zoo, models):
    found = steps_of(zoo, models, lambda: (Fickle(), {"x": torch.ones(2)}))
    assert found["verdicts"] == {"eager": "wrong"}
    summary = zoo.summary_of([{"name": "net", "family": "test", "modes": [found], "seconds": 1.0}], [])
    assert summary["calls"] == 0 and summary["rows at fault"] == 1


class Crash(nn.Module):
    """Ends its process when it is called."""

    def forward(self, x):
        os._exit(3)


def test_a_process_that_dies_is_a_row(zoo, models):
    # a fork takes the row along: `inside` finds it by name
    nets = sys.modules.get("zoo_nets") or importlib.import_module("zoo_nets")
    row = models.Row("Crash", "plain torch", "torch", lambda training: (Crash(), {"x": torch.ones(2)}))
    nets.ROWS.append(row)
    try:
        found = zoo.examined(row, zoo.multiprocessing.get_context("fork"))
    finally:
        nets.ROWS.remove(row)
    assert [mode["verdicts"] for mode in found["modes"]] == [{"eager": "died"}] * 2
    zoo.show([found])
