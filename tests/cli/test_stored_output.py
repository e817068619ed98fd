"""What commands print, whole, as it is stored; times that passed and paths are left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from campaigns import these_first
from storedtexts import assert_stored

from splitkit import cli

NET = Path(__file__).with_name("tinynet.py")
MODEL = [f"{NET}:net", "--size", "layers=1", "--size", "width=8", "--size", "vocab=16", "--size", "seq=4"]
OWN = ["plan.json", "--model", f"{NET}:net"]
H100 = ["--costs", "roofline:h100"]
STEP = ["--schedule", "1f1b", "--microbatches", "4"]
COMMANDS = {
    "capture": ["capture", *MODEL],
    "capture json": ["capture", *MODEL, "--json"],
    "plan": ["plan", *MODEL, "--stages", "2", *H100, "-o", "plan.json"],
    "plan policy": ["plan", *MODEL, "--policy", "MemoryBudget('24KiB')", "--costs", "roofline:a100"],
    "plan devices": ["plan", *MODEL, "--devices", "h100,l4", "--links", "pcie4"],
    "plan memory": ["plan", *MODEL, "--devices", "2xh100", "--memory", "1KiB"],
    "plan for training": ["plan", *MODEL, "--stages", "2", "--training", *H100, *STEP],
    "plan forward and backward": [
        "plan",
        *MODEL,
        "--what",
        "fwd-bwd",
        "--policy",
        "Budget(0.5)",
        *H100,
        "-o",
        "pair.json",
    ],
    "plan stages of a step": [
        "plan",
        *MODEL,
        "--what",
        "fwd-bwd",
        "--policy",
        "Pipeline(2, microbatches=4)",
        *H100,
        "-o",
        "step.json",
    ],
    "split": ["split", *OWN],
    "split json": ["split", *OWN, "--json"],
    "explain": ["explain", *OWN],
    "explain node": ["explain", "plan.json", "linear", *OWN[1:]],
    "export": ["export", *OWN, "--to", "torch"],
    "run": ["run", *OWN, "--check"],
    "run forward and backward": ["run", "pair.json", *OWN[1:], "--check"],
    "run stages of a step": ["run", "step.json", *OWN[1:], "--check"],
    "compare": ["compare", "plan.json", *OWN],
    "sweep": ["sweep", *MODEL, "--stages", "2", "--microbatches", "2,4", *H100],
    "synthesize": ["synthesize", *OWN, "--microbatches", "3", *H100],
    "devices": ["devices"],
    "policies": ["policies"],
    "no policy": ["plan", *MODEL],
    "wrong word": ["plane", *MODEL],
    "wrong option": ["plan", *MODEL, "--stage", "2"],
    "wrong number": ["plan", *MODEL, "--stages", "none"],
    "wrong policy": ["plan", *MODEL, "--policy", "Stage(2)"],
    "wrong device": ["plan", *MODEL, "--devices", "h10"],
    "wrong costs": ["plan", *MODEL, "--stages", "2", "--costs", "roof"],
    "wrong owner": ["run", "plan.json"],
    "wrong file": ["run", "none.json"],
    "wrong size": ["capture", *MODEL, "--size", "deep=3"],
    "wrong output": ["plan", *MODEL, "--stages", "2", "-o", "none/plan.json"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with three plans."""
    made = tmp_path_factory.mktemp("printed")
    for name in ("plan", "plan forward and backward", "plan stages of a step"):
        *words, file = COMMANDS[name]
        assert cli.main([*words, str(made / file)]) == 0
    return made


LONG = ("plan devices", "plan memory", "plan policy")


@pytest.mark.parametrize("name", these_first([name for name in COMMANDS if name not in LONG], LONG))
def test_what_a_command_prints(call, folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = call(*COMMANDS[name])
    assert_stored(f"cli/{name}.txt", f"{plain(out, folder)}-- {code}\n{plain(err, folder)}")


MEASURED = re.compile(r' *((took|captured|forward|backward|submod|loss)|"(load|capture|plan|split|whole)": \d)')
"""How lines begin that say what took how long in this process, or what its kernels computed."""


PASSED = r"\d+(\.\d+)?(e-\d+)? (s|ms|us)\b|\d+\.\d{3,}(e-\d+)?|\d+(\.\d+)?e-\d+"
"""Times, and numbers of many digits."""


def plain(text, folder):
    lines = text.replace(str(folder), "FOLDER").replace(str(NET.parent), "HERE").splitlines()
    told = [re.sub(PASSED, "N", one) if MEASURED.match(one) else one for one in lines]
    return "".join(re.sub(" +", " ", re.sub("-{3,}", "---", one)) + "\n" for one in told)
