"""``splitkit train`` on two real processes: the same as the unsplit model, and the same after a checkpoint."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from campaigns import these_first
from launch import launch

from splitkit import cli
from splitkit.cli.commands.train import planned_together, wrote_trace
from splitkit.cli.parser import make_parser
from splitkit.pipeline.synthesize import load_order
from splitkit.pipeline.trace import MeasuredStep

TINY = ["--size", "layers=1,width=16,heads=2", "--size", "vocab=32,seq=4", "--seed", "3"]


def splitkit(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "splitkit", *words], cwd=cwd, text=True, capture_output=True, timeout=200
    )


def test_what_to_do_with_a_trace_is_said():
    assert wrote_trace("t.json", comparable=False) == "wrote t.json (for https://ui.perfetto.dev or chrome://tracing)"
    assert "splitkit view PLAN.json --measured t.json" in wrote_trace("t.json")


@pytest.mark.parametrize("model", these_first(["tinynet"], ["gpt2"]))
def test_a_plan_trains_as_the_unsplit_model_and_goes_on_from_a_checkpoint(tmp_path, call, model):
    """Runs of the command, whose ranks are forked from one process; `--nproc` starts them below.

    The last one fails, after which there is nothing to wait for.
    """
    spec = model if model == "gpt2" else f"{Path(__file__).parent / 'tinynet.py'}:net"
    name = [] if model == "gpt2" else ["--model", spec]
    plan, order, kept, stages = (str(tmp_path / name) for name in ("plan.json", "mine.csv", "kept", "stages"))
    assert call("plan", spec, *TINY, "--stages", "2", "-o", plan)[0] == 0
    assert call("split", plan, *name, "-o", stages)[0] == 0
    Path(order).write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    words = ["train", plan, *name, "--schedule", order, "--microbatches", "2", "--check"]
    keep = ["--checkpoint", kept, "--every", "2", "--steps"]
    trace = ["--trace", str(tmp_path / "trace.json")]
    runs = [*words, "--steps", "3", *trace, "--", *words, *keep, "2", "--", *words, *keep, "3", "--resume"]
    runs += ["--async-save", "--keep", "1"]
    runs += ["--", "train", stages, "--steps", "3", "--microbatches", "2"]  # no rank makes the model or captures it
    runs += ["--", "train", plan, *name, "--microbatches", "2", "--optimizer", "sgd", "--lr", "1e38"]
    lines = launch("cli/commanded.py", 2, *runs, seconds=200)
    whole, first, again, apart, failed = (line["data"] for line in lines if "data" in line)
    for found in (whole, first, again):
        assert found["check"]["same"] and found["check"]["loss"] < 1e-6 > found["check"]["gradient"]
        assert [r["stages"] for r in found["ranks"]] == [[0], [1]] and found["schedule"] == "mine.csv"
    assert len(set(whole["losses"])) == 3 and first["losses"] == whole["losses"][:2]
    assert whole["trace"] == trace[1] and first["trace"] is None and "measured" not in whole
    ran = MeasuredStep.load(trace[1])
    assert ran.order.ranks == load_order(order).ranks and ran.schedule == "mine.csv"
    assert 0 < ran.busy[0] < ran.seconds and ran.busy[1] < ran.seconds
    assert again["first_step"] == 2 and again["losses"] == whole["losses"][2:]
    assert sorted(p.name for p in Path(kept).iterdir()) == ["run.json", "step-3"]
    assert apart["losses"] == whole["losses"] and [r["stages"] for r in apart["ranks"]] == [[0], [1]]
    assert failed["error"]["code"] == "SK805"
    assert failed["error"]["reason"] == "the loss of microbatch 0 in step 1 is nan"


LOUD = """
import os, sys, tinynet
from torch import nn

class Net(tinynet.Net):
    # On rank 0 the bias of the head has twice its gradient; the rank that trains it is the other one.
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.times, self.bias = 1 + (os.environ.get("RANK") == "0"), nn.Parameter(self.table.weight[:, 0].clone())

    def forward(self, input_ids, labels):
        bias = self.times * self.bias - (self.times - 1) * self.bias.detach()
        logits = super().forward(input_ids, labels)["logits"] + bias
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

def net():
    print("made by rank", os.environ.get("RANK"), file=sys.stderr)
    return Net(2, 16, 32), {**tinynet.net(vocab=32)[1]}
"""


def with_ranks(folder, monkeypatch, *words):
    """Run a command in this process, with real ranks: its exit code, its output, and what all of them complain."""
    monkeypatch.setattr(sys, "argv", ["splitkit", *words])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(folder)
    kept, said = os.dup(2), folder / "said"
    with said.open("w") as file, redirect_stdout(io.StringIO()) as out:
        os.dup2(file.fileno(), 2)
        try:
            code = cli.main(words)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    return code, out.getvalue(), said.read_text()


def test_only_the_rank_that_checks_makes_the_model_and_sees_what_differs_on_another(tmp_path, call, monkeypatch):
    """Of stages in a folder all ranks made the model, captured it and ran it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "loud.py").write_text(LOUD)
    spec, folder = f"{tmp_path / 'loud.py'}:net", str(tmp_path / "stages")
    assert call("split", spec, "--stages", "2", "--eval", "-o", folder)[0] == 0  # torch 2.11 sends no dice
    words = ["--microbatches", "2", "--steps", "1", "--check"]
    lines = launch("cli/commanded.py", 2, "train", folder, "--model", spec, *words, check=False)
    (first,) = [line for line in lines if "ended" in line]
    code, trained, said = first["ended"], first["data"], "".join(line["error"] for line in lines if "error" in line)
    check = trained["check"]
    assert [rank["stages"] for rank in trained["ranks"]] == [[0], [1]]
    assert code == 4 and not check["same"] and check["loss"] < 1e-6 and check["gradient"] > 0.4
    assert check["furthest"]["gradient"] == "gradient of bias in step 0"
    assert check["reference"] == "module" and check["wrong_step"] == "split"
    # once to capture it, once as the reference
    assert [line for line in said.splitlines() if "made by" in line] == 2 * ["made by rank 0"]


BURNT = """
import tinynet
from torch import nn

class Warming(tinynet.Net):
    # A Python counter leaves out a block from the fifth call on; the graph has the decision of its capture.
    calls = 0

    def forward(self, input_ids, labels):
        self.calls += 1
        x = self.table(input_ids)
        for block in self.blocks[: 1 if self.calls > 4 else 2]:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), "logits": x}

def net():
    return Warming(2, 16, 32), tinynet.net(vocab=32)[1]
"""


def test_what_capture_burnt_in_is_named(tmp_path, monkeypatch):
    """The pipeline was compared with the captured graph, which repeats what capture burnt in."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "burnt.py").write_text(BURNT)
    monkeypatch.chdir(tmp_path)
    words = ["train", "burnt.py:net", "--stages", "2", "--microbatches", "2", "--steps", "3", "--check"]
    (first,) = [line for line in launch("cli/commanded.py", 2, *words) if "ended" in line]
    check = first["data"]["check"]
    assert first["ended"] == 4 and not check["same"] and check["wrong_step"] == "capture"
    # dropout is the same until then: two microbatches in each of the first two steps
    assert check["burnt_in"] == {"step": 2, "microbatch": 0, "output": "['loss']"}
    assert check["furthest"]["loss"] == "loss in step 2" and check["weight"] < 1e-6


@pytest.mark.parametrize(("factor", "code"), these_first([(0.9995, 4)], [(1.0, 0)]))
def test_gradients_that_are_scaled_a_little_fail(monkeypatch, factor, code):
    """They were within the tolerance, which had to be 1e-3 as differences were carried on from step to step."""
    monkeypatch.setenv("SPOIL_GRADIENTS", str(factor))
    spec = f"{Path(__file__).parent / 'tinynet.py'}:net"
    words = ["train", spec, *TINY, "--stages", "2", "--microbatches", "2", "--steps", "2", "--check"]
    (first,) = [line for line in launch("cli/commanded.py", 2, *words) if "ended" in line]
    check = first["data"]["check"]
    assert first["ended"] == code and check["same"] == (code == 0) and check["weight"] < 1e-6
    assert (check["gradient"] < 1e-6) if code == 0 else (4e-4 < check["gradient"] < 6e-4)
    assert check["wrong_step"] == (None if code == 0 else "split") and check["burnt_in"] is None


def test_what_fails_on_the_ranks_is_said(call, monkeypatch):
    """The command said KeyError: 'losses' instead. (Ranks that fail so are above.)"""
    reason = "the loss of microbatch 0 in step 1 is nan"
    error = {"code": "SK805", "reason": reason, "remedy": "Lower --lr.", "nodes": []}
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("splitkit.cli.launcher.ranks", lambda *given: (3, json.dumps({"error": error})))
    code, _, said = call("train", "gpt2", *TINY, "--stages", "2", "--nproc", "2")
    assert code and f"SK805: {reason}" in said and "Lower --lr." in said


def test_a_rank_that_does_not_plan_does_not_search(monkeypatch):
    """Every rank searched, and threw its plan away for that of rank 0."""
    spec = f"{Path(__file__).parent / 'tinynet.py'}:net"
    args = make_parser().parse_args(["train", spec, *TINY, "--stages", "2"])
    monkeypatch.setattr("splitkit.runtime.ranks.rank_agreement.planned_once", lambda gm, make: "sent by rank 0")
    monkeypatch.setattr("splitkit.plan", lambda *given, **options: pytest.fail("searched"))
    work, plan = planned_together(args)
    assert plan == "sent by rank 0" and len(work.gm.graph.nodes) > 9


def test_one_process_is_too_few(call, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    code, _, err = call("train", "gpt2", *TINY, "--stages", "2")
    assert code == 2 and "SK601" in err and "torchrun --nproc-per-node" in err
    code, _, err = call("train", "gpt2", *TINY, "--stages", "2", "--resume", "--nproc", "2")
    assert code == 2 and "--checkpoint FOLDER" in err
    code, _, err = call("train", "gpt2", *TINY, "--stages", "2", "--every", "2", "--nproc", "2")
    assert code == 2 and "SK601: --every needs a folder" in err


def test_a_folder_of_another_run_is_refused_before_there_are_ranks(call, tmp_path):
    (tmp_path / "kept" / "step-5").mkdir(parents=True)
    code, _, err = call("train", "gpt2", *TINY, "--stages", "2", "--nproc", "2", "--checkpoint", str(tmp_path / "kept"))
    assert code == 1 and "SK512" in err and "up to step 5" in err and "--resume" in err


def test_what_no_rank_could_run_is_refused_before_there_are_ranks(call, tmp_path):
    """Without a policy it said SK302: Stages(n=None), and of replicas only once the model was captured."""
    code, _, err = call("train", "gpt2", *TINY, "--nproc", "2")
    assert code == 2 and "SK601: gpt2 needs a policy" in err
    spec = f"{Path(__file__).parent / 'tinynet.py'}:net"
    plan = str(tmp_path / "plan.json")
    assert call("plan", spec, "--policy", "Stages(4, replicas=(2,))", "-o", plan)[0] == 0
    code, _, err = call("train", plan, "--model", spec, "--nproc", "3")
    assert code == 2 and "SK330: 3 ranks for 2 replicas of the pipeline" in err and "Use a multiple of 2" in err


@pytest.fixture
def no_ranks(monkeypatch, no_work):
    """Fails the test where ranks are started, or a model is made in this process."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("splitkit.cli.launcher.ranks", lambda *given: pytest.fail("ranks were started"))


def test_a_schedule_that_does_not_go_with_the_stages_is_refused_before_there_are_ranks(call, no_ranks):
    """Each rank made the model, captured it and refused it; the message came as often as there are ranks."""
    code, _, err = call("train", "gpt2", *TINY, "--stages", "3", "--nproc", "2")
    assert code == 2 and err.count("SK330") == 1


def test_a_factory_that_does_not_exist_is_refused_before_there_are_ranks(call, mine, no_ranks):
    (mine / "net.py").write_text("def nets():\n    return 1, 2\n\ntwin = nets\n")
    code, _, err = call("train", "net.py:net", "--stages", "2", "--nproc", "2")
    assert code == 1 and "SK403: the factory 'net' in net.py does not exist" in err and "net.py:nets?" in err
    code, _, err = call("train", "nat.py:net", "--stages", "2", "--nproc", "2")
    assert code == 1 and "SK403: there is no file nat.py" in err
    # a name that is only assigned may be a factory, which a rank finds out
    with pytest.raises(pytest.fail.Exception, match="ranks were started"):
        call("train", "net.py:twin", "--stages", "2", "--nproc", "2")


def test_plans_and_stages_that_cannot_train_are_refused_before_there_are_ranks(call, tmp_path, monkeypatch):
    spec, plan, folder = f"{Path(__file__).parent / 'tinynet.py'}:net", str(tmp_path / "p.json"), tmp_path / "stages"
    monkeypatch.setattr("splitkit.cli.launcher.ranks", lambda *given: pytest.fail("ranks were started"))
    monkeypatch.delenv("RANK", raising=False)
    assert call("plan", spec, "--stages", "2", "-o", plan)[0] == 0
    assert call("split", plan, "--model", spec, "-o", folder)[0] == 0
    code, _, err = call("train", plan, "--nproc", "2")
    assert code == 2 and "SK601: this plan was made for" in err and "--model" in err
    code, _, err = call("train", plan, "--model", spec, "--nproc", "3")
    assert code == 2 and "SK330" in err
    code, _, err = call("train", folder, "--nproc", "2", "--check")
    assert code == 2 and "SK601: this plan was made for" in err
    code, _, err = call("train", folder, "--nproc", "3")
    assert code == 2 and "SK330" in err
    (folder / "stage-1.json").unlink()
    code, _, err = call("train", folder, "--nproc", "2")
    assert code == 1 and "SK504" in err and "stage-1.json" in err
    data = json.loads(Path(plan).read_text()) | {"what": "fwd-bwd"}
    Path(plan).write_text(json.dumps(data))
    code, _, err = call("train", plan, "--model", spec, "--nproc", "2")
    assert code == 2 and "SK601" in err and "has no stages" in err


def test_what_the_command_writes_is_for_people_too():
    from splitkit.cli.commands.train import _ranks, _text, pipeline_check_rows

    rank = {"rank": 0, "stages": [0, 3], "parameters": 2048, "peak": 4096}
    data = {
        "schedule": "1F1B", "microbatches": 4, "replicas": [1], "ranks": [rank], "losses": [3.0, 2.0, 1.0, 0.5, 0.25],
        "first_step": 0, "steps": 5, "step_seconds": 0.5,
        "check": {"loss": 0.0, "gradient": 1e-7, "weight": 2e-7, "same": True, "reference": "module"},
    }  # fmt: skip
    found = [_ranks({"ranks": [0] * 3, "replicas": n}) for n in ([1] * 3, [2] * 3)]
    assert found == ["3 ranks", "3 ranks, 2 pipelines"]
    facts, _, table = _text(data)
    assert table.row_count == 1 and facts is not None
    check = {"loss": 0.0, "gradient": 2e-3, "weight": 1e-9, "tolerance": 1e-3, "same": False, "reference": "graph"}
    check["furthest"] = {"gradient": "gradient of a.b in step 1", "weight": "weight of c in step 2"}
    rows = pipeline_check_rows(check | {"burnt_in": None})
    found = rows["furthest"]
    assert found.splitlines()[0] == "gradient of a.b in step 1" and "weight of c" not in found and "float64" in found
    assert rows["same"].startswith("NO") and rows["compared with"].startswith("the captured graph, since")
    told = pipeline_check_rows(check | {"burnt_in": {"step": 3, "microbatch": 1, "output": "['loss']"}})["furthest"]
    assert "burnt in" in told and "output['loss'] of microbatch 1 in step 3" in told and "float64" not in told


def test_a_loss_that_is_no_number_is_said_with_its_microbatch():
    import torch

    from splitkit.cli.commands.train import _require_numbers
    from splitkit.errors import PipelineError

    assert _require_numbers(torch.tensor([1.0, 2.0, 6.0]), 4).tolist() == [1.0, 2.0, 6.0]
    with pytest.raises(PipelineError, match="SK805: the loss of microbatch 1 in step 4 is nan"):
        _require_numbers(torch.tensor([1.0, float("nan"), 6.0]), 4)


def test_progress_is_shown_on_the_terminal_of_rank_0_alone(monkeypatch, capsys):
    from splitkit.costs.measuring_run import progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for rank, shows in ((0, True), (1, False)):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        with progress(2, "training", hidden=rank > 0) as advance:
            advance(description="loss 0.1250")
        assert ("loss 0.1250" in terminal.getvalue()) is shows
    assert capsys.readouterr().out == "", "what the command prints can be read by a program"
