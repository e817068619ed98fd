"""A rank that is killed in the middle of a step: all ranks start again, and end as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from campaigns import these_first
from launch import launch
from test_train import with_ranks

from splitkit.cli import launcher
from splitkit.errors import PipelineError
from splitkit.runtime.folder.checkpoint_reader import read_stored, stored_looks

DYING = """
import os, signal
from pathlib import Path
from tinynet import net
from splitkit.runtime.ranks.stage import ChainStage

backward, died, calls = ChainStage.backward, Path(__file__).with_name("died"), []

def dying(self, chunk, run):
    # on rank 1, before the second microbatch's backward in the fourth step
    calls.append(chunk)
    if len(calls) == 8 and os.environ["RANK"] == "1" and os.environ.get("DIES") and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    backward(self, chunk, run)

ChainStage.backward = dying
"""
WORDS = ["--size", "width=16,vocab=32,seq=4", "--stages", "2", "--microbatches", "2", "--steps", "5", "--every", "2"]


def kept(folder):
    """The weights and the optimizer's state in the last checkpoint.

    It also has the state of the generators of Python, numpy and torch, which the command seeds in no process.
    """
    looks = stored_looks(folder / "step-5").items()
    held = {name: torch.zeros(s, dtype=dtype) for name, (s, dtype) in looks if not name.startswith("random.")}
    read_stored(folder / "step-5", held)
    return held


@pytest.mark.parametrize("starter", these_first(["forks"], ["nproc", "torchrun"]))
def test_a_rank_that_is_killed_changes_no_loss_and_no_weight(tmp_path, monkeypatch, capsys, starter):
    """The command had no such option, and under torchrun all attempts ended in gloo's connect.

    Always with ranks that are forked, and forked again; `--max-restarts` and torchrun start processes anew.
    """
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "dying.py").write_text(DYING)
    words = ["train", str(tmp_path / "dying.py") + ":net", *WORDS, "--checkpoint"]
    (line,) = [x for x in launch("cli/commanded.py", 2, *words, str(tmp_path / "whole")) if "ended" in x]
    whole = line["data"]
    monkeypatch.setenv("DIES", "1")
    if starter == "forks":
        lines = launch("cli/commanded.py", 2, *words, str(tmp_path / "again"), check=False)
        assert [line["code"] for line in lines if line.get("rank") == 1 and "code" in line] == [-signal.SIGKILL]
        (line,) = [x for x in lines if "ended" in x]
        assert (line["ended"], line["data"]["error"]["code"]) == (1, "SK805")
        assert "rank 1 is gone" in line["data"]["error"]["reason"]
        lines = launch("cli/commanded.py", 2, *words, str(tmp_path / "again"), "--resume")
        (code, again), *_ = [(x["ended"], x["data"]) for x in lines if "ended" in x]
    elif starter == "nproc":
        more = ["--nproc", "2", "--max-restarts", "1", "--json"]
        code, out, _ = with_ranks(tmp_path, monkeypatch, *words, str(tmp_path / "again"), *more)
        assert "rank 1 was ended by SIGKILL; restart 1 of 1" in capsys.readouterr().err
        again = json.loads(out)
    else:
        code, out = torchrun(*words, str(tmp_path / "again"), "--resume", "--json")
        again = json.loads(out)
    assert code == 0 and (tmp_path / "died").exists()
    # the third step was done but not saved
    assert again["first_step"] == 2 and again["losses"] == whole["losses"][2:]
    held, expected = kept(tmp_path / "again"), kept(tmp_path / "whole")
    assert held.keys() == expected.keys() and len(held) > 20
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())


def torchrun(*words):
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, *start, "-m", "splitkit", *words]
    run = subprocess.run(command, text=True, stdout=subprocess.PIPE, timeout=200)
    return run.returncode, run.stdout


def test_only_ranks_that_failed_or_were_lost_are_restarted_and_so_often(monkeypatch, capsys):
    lost = json.dumps({"error": {"code": "SK805", "reason": "rank 1 hangs", "remedy": "", "nodes": []}})
    wrong = json.dumps({"error": {"code": "SK804", "reason": "other batches", "remedy": "", "nodes": []}})
    given = []

    def ranks(words, count, wait):
        given.append(words)
        return told.pop(0)

    monkeypatch.setattr(launcher, "ranks", ranks)
    for told, restarts, code, attempts in (
        ([(1, lost), (1, lost), (1, lost)], 2, "SK805", 3),
        ([(1, wrong)], 2, "SK804", 1),
        ([(1, lost)], 0, "SK805", 1),
    ):
        given.clear()
        with pytest.raises(PipelineError, match=code):
            launcher.answer(["train"], 2, 1.0, restarts)
        assert len(given) == attempts and not told
        assert ["--resume" in words for words in given] == [False, True, True][:attempts]
    assert capsys.readouterr().err.splitlines() == [f"rank 1 hangs; restart {n} of 2" for n in (1, 2)]
    told = [(1, lost), (4, '{"same": false}')]
    assert launcher.answer(["train", "--resume"], 2, 1.0, 3) == (4, {"same": False})
    assert [words.count("--resume") for words in given[-2:]] == [1, 1]


def test_restarts_need_checkpoints_and_ranks_of_the_command(call, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    code, _, err = call("train", "gpt2", "--stages", "2", "--nproc", "2", "--max-restarts", "2")
    assert code == 2 and "SK601: --max-restarts needs a folder" in err
    code, _, err = call("train", "gpt2", "--stages", "2", "--checkpoint", "kept", "--max-restarts", "2")
    assert code == 2 and "SK601: --max-restarts restarts" in err and "torchrun --max-restarts N" in err
