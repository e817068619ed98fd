"""``--recompute`` of plan, view and sweep: the parts of the plan, its prices and pages; and where it is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

SIZE = ["--size", "layers=2,width=32,heads=2", "--size", "vocab=64,seq=8"]
PRICED = ["plan", "gpt2", *SIZE, "--stages", "2", "--costs", "roofline:a100"]


@pytest.fixture
def plans(data, tmp_path):
    """The files of a plan without and with recompute."""
    files = {word: str(tmp_path / f"{word}.json") for word in ("plain", "again")}
    for word, path in files.items():
        assert data(*PRICED, *["--recompute"] * (word == "again"), "-o", path)[0] == 0
    return files


def drawn(call, path, *more):
    code, _, err = call("view", path, "--schedule", "gpipe", *more, "-o", f"{path}.html")
    assert (code, err) == (0, "")
    text = Path(f"{path}.html").read_text("utf-8")
    return json.loads(re.search(r'id="splitkit-data">(.*?)</script>', text, re.S)[1])


def test_a_plan_keeps_it_and_a_page_of_either_draws_the_same(call, plans):
    plain, again = (json.loads(Path(path).read_text("utf-8")) for path in plans.values())
    assert [part["call"] for part in plain["parts"]] == ["plain", "plain"]
    assert [part["call"] for part in again["parts"]] == ["checkpoint", "checkpoint"]
    assert plain["places"] == again["places"] and plain["claim"] and again["claim"] is None
    kept, added = drawn(call, plans["again"]), drawn(call, plans["plain"], "--recompute")
    assert kept["stages"] == added["stages"] and kept["run"]["peaks"] == added["run"]["peaks"]
    choices = kept["run"]["whatIf"]
    own, recompute = choices["rows"][choices["own"]], choices["recompute"]
    assert recompute == ["yes", "no"]
    (without,) = (row for row in choices["rows"] if row[:3] == own[:3] and recompute[row[7]] == "no")
    assert own[4] > without[4] and own[6] == max(kept["run"]["peaks"]) < without[6]


def test_the_step_of_a_plan_for_devices_is_simulated_with_it(data):
    words = ["plan", "gpt2", *SIZE, "--devices", "2xh200", "--schedule", "gpipe", "--microbatches", "8"]
    (_, plain), (_, again) = data(*words), data(*words, "--recompute")
    assert again["step"]["seconds"] > plain["step"]["seconds"]
    saved = [[rank["memory"]["saved"] for rank in found["ranks"]] for found in (plain, again)]
    assert sum(saved[1]) < 0.7 * sum(saved[0])
    words = [
        "sweep",
        "gpt2",
        *SIZE,
        "--stages",
        "2",
        "--microbatches",
        "8",
        "--schedules",
        "gpipe",
        "--devices",
        "h200",
    ]
    code, found = data(*words, "--recompute")
    assert code == 0 and found["recompute"] is True
    assert found["rows"][0]["seconds"] == pytest.approx(again["step"]["seconds"])


@pytest.mark.parametrize(("words", "reason"), [
    (["profile", "gpt2", *SIZE, "--stages", "2", "--recompute"], "--recompute is for the parts of a pipeline"),
    (["plan", "gpt2", *SIZE, "--what", "fwd-bwd", "--recompute"], "--recompute cannot be combined with --what fwd-bwd"),
    (["sweep", "gpt2", *SIZE, "--recompute"], "--recompute needs --stages"),
])  # fmt: skip
def test_where_there_are_no_stages_it_is_refused(call, words, reason):
    code, _, err = call(*words)
    assert code == 2 and "SK601" in err and reason in " ".join(err.split())
