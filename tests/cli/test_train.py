"""``splitkit train`` on two real processes: the same as the unsplit model, and the same after a checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

TINY = ["--size", "layers=1,width=16,heads=2", "--size", "vocab=32,seq=4", "--seed", "3"]


def splitkit(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "splitkit", *words], cwd=cwd, text=True, capture_output=True, timeout=200
    )


def train(*words, cwd):
    run = splitkit("train", *words, "--nproc", "2", "--microbatches", "2", "--json", cwd=cwd)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_plan_trains_as_the_unsplit_model_and_goes_on_from_a_checkpoint(tmp_path, call):
    code, _, _ = call("plan", "gpt2", *TINY, "--stages", "2", "-o", str(tmp_path / "plan.json"))
    assert code == 0
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    words = ("--steps", "3", "--checkpoint", "kept", "--every", "2", "--schedule", "mine.csv")
    whole = train("plan.json", "--check", *words, cwd=tmp_path)
    assert whole["check"]["same"] and whole["check"]["loss"] < 1e-6 > whole["check"]["gradient"]
    assert [r["stages"] for r in whole["ranks"]] == [[0], [1]] and whole["schedule"] == "mine.csv"
    assert len(set(whole["losses"])) == 3
    shutil.rmtree(tmp_path / "kept" / "step-3")
    again = train("plan.json", "--steps", "3", "--checkpoint", "kept", "--resume", cwd=tmp_path)
    assert again["first_step"] == 2 and again["losses"] == whole["losses"][2:]
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["step-2", "step-3"]


def test_one_process_is_too_few(call, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    code, _, err = call("train", "gpt2", *TINY, "--stages", "2")
    assert code == 2 and "SK601" in err and "torchrun --nproc-per-node" in err
    code, _, err = call("train", "gpt2", *TINY, "--stages", "2", "--resume", "--nproc", "2")
    assert code == 2 and "--checkpoint FOLDER" in err


@pytest.mark.campaign
def test_a_schedule_that_does_not_go_with_the_stages_is_refused_by_all_ranks(tmp_path):
    run = splitkit("train", "gpt2", *TINY, "--stages", "3", "--nproc", "2", cwd=tmp_path)
    assert run.returncode == 2 and run.stderr.count("SK330") == 2


def test_what_the_command_writes_is_for_people_too():
    from splitkit.cli.commands.train import _text

    rank = {"rank": 0, "stages": [0, 3], "parameters": 2048, "peak": 4096}
    data = {
        "schedule": "1F1B", "microbatches": 4, "ranks": [rank], "losses": [3.0, 2.0, 1.0, 0.5, 0.25], "first_step": 0,
        "steps": 5, "step_seconds": 0.5, "check": {"loss": 0.0, "gradient": 1e-7, "weight": 2e-7, "same": True},
    }  # fmt: skip
    facts, _, table = _text(data)
    assert table.row_count == 1 and facts is not None
