"""``splitkit sweep --stages``."""

import io
import re
import sys
from pathlib import Path

import pytest

import splitkit as sk
from splitkit import cli
from splitkit.testing import models

SIZE = ["--size", "layers=1,width=32,heads=2", "--size", "vocab=64,seq=8"]
SWEEP = ["sweep", "gpt2", *SIZE]
NET = f"{Path(__file__).parent / 'tinynet.py'}:net"
SMALL = ["--stages", "2,4", "--microbatches", "2,4", "--schedules", "gpipe,1f1b,zbv"]


def failing(found):
    error = found.pop("error")
    assert not found
    return error


def test_the_rows_are_those_of_the_library(data):
    code, found = data("sweep", NET, *SMALL, "--devices", "h200")
    assert code == 0 and found["command"] == "sweep" and found["device"] == "h200"
    assert (found["links"], found["memory"], found["optimizer"]) == ("nvlink4", 141_000_000_000, "adam")
    assert found["prices"] == "roofline of h200"
    example = models.load(NET)
    gm = sk.capture(example.model, *example.args, **example.kwargs)
    from splitkit.studies.sweep import sweep

    same = sweep(
        gm,
        sk.costs.roofline(gm, "h200"),
        stages=(2, 4),
        microbatches=(2, 4),
        schedules=("gpipe", "1f1b", "zbv"),
        memory=141_000_000_000,
        links="nvlink4",
    )
    assert found["rows"] == same.to_dict()["rows"] and len(found["rows"]) == 12


def test_what_people_read(call):
    code, out, err = call(*SWEEP, *SMALL, "--memory", "80GiB", "--optimizer", "momentum")
    assert (code, err) == (0, "") and "…" not in out
    for word in (
        "roofline of a100",
        "80.00 GiB per rank",
        "fastest: ",
        "smallest: ",
        "GPipe takes fewer",
        "best",
        "yes",
    ):
        assert word in out
    code, out, _ = call(*SWEEP, "--stages", "2", "--schedules", "1f1b", "--memory", "1KiB")
    assert code == 0 and "nothing fits: the lowest peak is" in out and re.search(r" no$", out, re.M)
    code, out, _ = call(*SWEEP, "--stages", "3", "--schedules", "zbv")
    assert code == 0 and "no schedule allows any of these" in out


def test_a_plan_file_names_the_model_and_the_number_of_stages(data, call, tmp_path):
    path = tmp_path / "plan.json"
    assert call("plan", "gpt2", *SIZE, "--stages", "3", "-o", path)[0] == 0
    few = ("--microbatches", "2", "--schedules", "gpipe")
    code, found = data("sweep", path, *few)
    assert code == 0 and found["model"]["sizes"]["width"] == 32 and [row["stages"] for row in found["rows"]] == [3]
    code, found = data("sweep", path, *few, "--stages", "2")
    assert code == 0 and [row["stages"] for row in found["rows"]] == [2]
    made = ("--costs", "roofline:l4", "--links", "pcie4", "--memory", "1GiB", "--optimizer", "sgd")
    code, planned = data("plan", "gpt2", *SIZE, "--stages", "2", *few[:2], "--schedule", "gpipe", *made, "-o", path)
    assert code == 0
    code, found = data("sweep", path, *few)
    (row,) = found["rows"]
    assert (row["seconds"], row["peak"]) == (planned["step"]["seconds"], planned["step"]["peak"])
    step = tmp_path / "step.json"
    assert call("plan", "gpt2", *SIZE, "--what", "fwd-bwd", "--policy", "SaveAll()", "-o", step)[0] == 0
    code, found = data("sweep", step, "--points", "3")
    assert code == 0 and found["model"]["sizes"]["width"] == 32 and len(found["points"]) <= 3
    code, _, error = call("sweep", tmp_path / "none.json")
    assert code == 1 and "SK504" in error


def test_without_stages_it_is_the_frontier(data):
    code, found = data(*SWEEP, "--points", "3")
    assert code == 0 and found["corners"] > 0 and len(found["points"]) <= 3


@pytest.mark.parametrize(
    "words, exit_code, code, says",
    [
        (["--memory", "1GiB"], 2, "SK601", "--memory needs --stages"),
        (["--schedules", "1f1b"], 2, "SK601", "--schedules needs --stages"),
        (["--stages", "2", "--points", "3"], 2, "SK601", "--points cannot be combined with --stages"),
        (["--stages", "2,zwei"], 2, "SK601", "not a whole number"),
        (["--stages", "0"], 2, "SK601", "not a whole number"),
        (["--stages", "2", "--memory", "much"], 2, "SK601", "not a size"),
        (["--stages", "2", "--devices", "2xh200"], 2, "SK601", "--stages says how many"),
        (["--stages", "2", "--devices", "h200,a100"], 2, "SK601", "--stages says how many"),
        (["--stages", "2", "--devices", "h300"], 1, "SK321", "no device"),
        (["--stages", "2", "--schedules", "1f1b,nothing"], 2, "SK330", "no schedule is called 'nothing'"),
    ],
)
def test_what_is_found_before_the_model_is_made(data, monkeypatch, words, exit_code, code, says):
    monkeypatch.setattr(models, "build", lambda *a, **k: pytest.fail("the model was made"))
    returned, found = data(*SWEEP, *words)
    error = failing(found)
    assert (returned, error["code"]) == (exit_code, code) and says in error["reason"] and error["remedy"]


def test_an_unknown_link_exits_1(data):
    code, found = data(*SWEEP, *SMALL, "--links", "nvlink9")
    assert code == 1 and failing(found)["code"] == "SK322"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_and_no_colour_if_none_is_wanted(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main([*SWEEP, "--stages", "2", "--microbatches", "2,4", "--schedules", "gpipe"]) == 0
    assert "planning and simulating" in terminal.getvalue() and "100%" in terminal.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*[39][0-9]m", terminal.getvalue())
    assert "fastest: gpipe" in capsys.readouterr().out
