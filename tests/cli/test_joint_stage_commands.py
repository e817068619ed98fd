"""Plans of training steps in stages on the command line: planned, run in one process, and trained on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import command

import splitkit as sk
from splitkit.cli import main
from splitkit.cli.syntax import policy_spec
from splitkit.errors import UsageError
from splitkit.policies import MinCut, Pipeline, SplitBackward

NET = f"{Path(__file__).parent / 'tinynet.py'}:net"
POLICY = "SplitBackward(policy=Pipeline(4, 'zbv', microbatches=4))"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan of four stages, and what the command said."""
    file = str(tmp_path_factory.mktemp("plans") / "plan.json")
    words = ["plan", NET, "--size", "layers=2,width=16", "--what", "fwd-bwd", "--policy", POLICY, "-o", file, "--json"]
    done = command(*words)
    assert done.returncode == 0
    return file, json.loads(done.stdout)


def test_a_plan_of_stages_says_what_each_stage_does(planned):
    file, data = planned
    assert [row["stage"] for row in data["stages"]] == [0, 1, 2, 3]
    assert "are deferred" in data["note"] and "4 microbatches under ZBVZeroBubble" in data["note"]
    assert all(row["saved"] >= 0 and row["waiting"] is not None for row in data["stages"])
    assert sum(row["sent"] for row in data["stages"][:3]) > 0 == data["stages"][3]["sent"]
    held = json.loads(Path(file).read_text())
    assert held["what"] == "fwd-bwd" and ["weight", 0] in [part["key"] for part in held["parts"]]


def test_options_of_stages_make_the_same_plan(planned, tmp_path):
    file = tmp_path / "plan.json"
    words = ["--what", "fwd-bwd", "--stages", "4", "--schedule", "zbv", "--microbatches", "4", "-o", str(file)]
    assert main(["plan", NET, "--size", "layers=2,width=16", *words]) == 0
    made, other = json.loads(file.read_text()), json.loads(Path(planned[0]).read_text())
    assert made["parts"] == other["parts"] and made["places"] == other["places"]


def test_a_folder_of_its_stages_trains_like_the_plan(planned, tmp_path):
    folder = tmp_path / "stages"
    assert main(["split", planned[0], "--model", NET, "-o", str(folder)]) == 0
    words = ["--nproc", "2", "--schedule", "zbv", "--microbatches", "4", "--steps", "2", "--check", "--json"]
    data = json.loads(command("train", str(folder), "--model", NET, *words).stdout)
    assert data["check"]["same"] and sum(rank["parameters"] for rank in data["ranks"]) < 2 * max(
        rank["parameters"] for rank in data["ranks"]
    )


def test_what_can_be_done_next_is_said_as_commands_that_work(planned, tmp_path, capsys):
    file, data = planned
    assert data["next"] == (f"splitkit train {file} --model {NET} --nproc 2 --schedule zbv --microbatches 4 --check")
    assert data["view"] == f"splitkit view {file} --model {NET} -o page.html"
    page = tmp_path / "page.html"
    assert main(["view", file, "--model", NET, "-o", str(page), "--memory", "1MiB"]) == 0
    assert '"name":"ZBVZeroBubble","microbatches":4' in page.read_text()
    words = ["--schedule", "interleavedzerobubble", "--microbatches", "8", "--optimizer", "none"]
    assert main(["view", file, "--model", NET, "-o", str(page), *words]) == 0
    assert '"name":"InterleavedZeroBubble","microbatches":8' in page.read_text()
    assert capsys.readouterr().out.count("wrote") == 2


def test_it_runs_in_one_process_like_the_unsplit_model(planned, capsys):
    assert main(["run", planned[0], "--model", NET, "--check", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["check"]["same"] and data["stages"] == 4


def test_it_trains_on_two_processes_like_the_unsplit_model(planned):
    words = ["--nproc", "2", "--schedule", "zbv", "--microbatches", "4", "--steps", "2", "--check"]
    done = command("train", planned[0], "--model", NET, *words, "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 0 and data["check"]["same"] and data["check"]["gradient"] < 1e-6
    assert [rank["stages"] for rank in data["ranks"]] == [[0, 3], [1, 2]] and len(data["losses"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--nproc", "2", "--schedule", "zbv", "--recompute"], "--recompute cannot be combined with"),
        (["train", "--nproc", "3", "--schedule", "zbv"], "SK330"),
        (["view", "-o", "page.html", "--beside", "other.json"], "--beside cannot be combined with"),
        (["profile"], "has the stages of a training step"),
    ],
)
def test_what_such_plans_do_not_have_is_refused(planned, words, message, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert main([words[0], planned[0], "--model", NET, *words[1:]]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_python_wrote_is_known_by_its_parts(tmp_path, planned, capsys):
    data = {name: value for name, value in json.loads(Path(planned[0]).read_text()).items() if name != "what"}
    file = tmp_path / "own.json"
    file.write_text(json.dumps(data))
    assert main(["run", str(file), "--model", NET, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == 4


def test_a_policy_may_be_a_parameter_of_another():
    made = policy_spec.parse(POLICY).build().policy
    assert made == SplitBackward(policy=Pipeline(4, "zbv", microbatches=4))
    assert policy_spec.parse("SplitBackward(policy=MinCut())").build().policy == SplitBackward(policy=MinCut())
    with pytest.raises(UsageError, match="there is no policy 'MinCute'"):
        policy_spec.parse("SplitBackward(policy=MinCute())")
    with pytest.raises(UsageError, match="not a literal"):
        policy_spec.parse("SplitBackward(policy=open.x('a'))")
    with pytest.raises(sk.errors.PolicyError, match="SK302"):
        policy_spec.parse("SplitBackward(policy=MinCut(nothing=1))").build()


def test_a_stage_without_weights_has_no_work_that_waits(capsys):
    """Its backward is not divided, as the backward of the others is."""
    from rich.console import Console

    from splitkit.cli.commands.plan_training import stage_table

    given = {"forward": 0.001, "backward": 0.002, "recomputed": 0, "recompute": 0.0}
    given |= {"saved": 2048, "host": 0, "sent": 1024, "gradients_sent": 0}
    rows = [
        {"stage": 0, "weight": 0.003, "waiting": 4096, **given},
        {"stage": 1, "weight": None, "waiting": None, **given, "recomputed": 2, "recompute": 0.004},
    ]
    Console(width=160).print(stage_table(rows, "s"))
    shown = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "0 1 ms 2 ms 3 ms - 2.00 KiB 4.00 KiB 1.00 KiB 0 B" in shown
    assert "1 1 ms 2 ms 0 us 2 ops, 4 ms 2.00 KiB 0 B 1.00 KiB 0 B" in shown
