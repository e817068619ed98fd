"""``splitkit explain`` and ``splitkit compare``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitkit.cli import main

TINY = [f"{Path(__file__).parent / 'tinynet.py'}:net", "--size", "layers=2,width=8,vocab=32"]
MODEL = ["--model", TINY[0]]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    found = {name: str(folder / f"{name}.json") for name in ("two", "three", "step")}
    assert main(["plan", *TINY, "--stages", "2", "--schedule", "1f1b", "--memory", "1GiB", "-o", found["two"]]) == 0
    assert main(["plan", *TINY, "--stages", "3", "-o", found["three"]]) == 0
    assert main(["plan", *TINY, "--what", "fwd-bwd", "--policy", "SaveAll()", "-o", found["step"]]) == 0
    return found


def said(capsys, *words):
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_is_explained_with_the_limits_that_it_was_made_for(files, capsys):
    found = said(capsys, "explain", files["two"], *MODEL)
    told = found["explanation"]
    assert "memory=1073741824" in told["policy"] and told["figures"]["step"] > 0
    assert {change["change"] for change in told["changes"]} >= {"one more device", "10 % more memory"}
    assert [row["limit"] for row in told["memory"]] == [2**30, 2**30]
    fast = said(capsys, "explain", files["three"], *MODEL, "--fast", "--policy", "Stages(3, memory='2GiB')")
    assert not fast["explanation"]["changes"] and fast["explanation"]["memory"][0]["limit"] == 2**31


@pytest.mark.parametrize("where, kind", [("layer_norm", "node")])
def test_a_node_is_explained(files, capsys, where, kind):
    assert said(capsys, "explain", files["three"], where, *MODEL)["explanation"]["kind"] == kind


def test_a_training_step_is_explained(files, capsys):
    assert main(["explain", files["step"], *MODEL, "--fast"]) == 0
    text = capsys.readouterr().out
    assert "Forward saves" in text and "The peak is" in text and "blocks.0-1" in text


def test_two_plans_are_compared(files, capsys):
    found = said(capsys, "compare", files["two"], files["three"], *MODEL)["comparison"]
    assert not found["equal"] and found["figures"][0]["name"] == "slowest stage"
    assert main(["compare", files["two"], files["three"], *MODEL]) == 0
    assert "in two.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, code",
    [
        (["explain", "gpt2"], "SK601"),
        (["explain", "two", "nowhere"], "SK314"),
        (["explain", "step", "forward"], "SK314"),
        (["explain", "two", "--policy", "Nothing(3)"], "SK601"),
        (["compare", "two", "gpt2"], "SK601"),
        (["compare", "two", "step"], "SK502"),
        (["explain", "missing.json"], "SK504"),
    ],
)
def test_what_cannot_be_explained_is_refused(files, capsys, words, code):
    given = [files.get(word, word) for word in words]
    assert main([*given, *MODEL]) in (1, 2)
    assert code in capsys.readouterr().err
