"""Remedies of commands that run ranks: ``splitkit train``, ``generate`` and ``profile --ranks``.

The ranks of a command are one process: this one.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from carried import refusal
from decoders import tokenizer
from safetensors.torch import save_file
from test_command_remedies import FACTORY, PLAN, command, printed
from torch import nn

from splitkit import cli
from splitkit.cli.commands.train import require_trace_file
from splitkit.cli.common import require_compiler
from splitkit.cli.outcome import STDOUT
from splitkit.errors import UsageError
from splitkit.testing import models

SIZES = {"layers": 1, "width": 16, "heads": 2, "vocab": 64}
LLAMA = f"llama --size {','.join(f'{name}={value}' for name, value in SIZES.items())} --seed 3"
ON_ONE = "--nproc 1 --schedule interleaved-1f1b --microbatches 2"  # any number of stages on a rank
TRAIN = f"train plan.json {ON_ONE} --steps 2 --model my.py:net"
ASKED = "--prompt-ids 5,6,7 --max-new-tokens 3"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("splitkit.cli.launcher.ranks", in_this_process)
    Path("my.py").write_text(FACTORY)


def in_this_process(words, count, wait):
    """As `splitkit.cli.launcher.ranks`, for one rank."""
    assert count == 1
    out = io.StringIO()
    with socket.socket() as found, pytest.MonkeyPatch.context() as patch:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            patch.setenv(name, str(value))
        with redirect_stdout(out):
            code = cli.main(list(words))
    if dist.is_initialized():
        dist.destroy_process_group()
    return code, out.getvalue()


def launched(words):
    """Run a command that starts ranks, and return what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["splitkit", *words.split()])
        return printed(words)


def losses(words=""):
    return launched(f"{TRAIN} {words}")["losses"]


def same(found, expected):
    return len(found) == len(expected) and torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5)


def generated(words, prompt=(5, 6, 7)):
    """Whether a command generates what the unsplit model does."""
    (result,) = launched(f"generate {words}")["results"]
    return result["tokens"] == expected(prompt)


@cache
def expected(prompt):
    model = models.build("llama", seed=3, **SIZES).model.eval()
    return model.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)[:, len(prompt) :].tolist()


def test_a_folder_of_stages():
    command(f"{PLAN} --stages 2 -o plan.json")
    command("split plan.json -o stages")
    train = f"train stages {ON_ONE} --steps 2"
    usual = launched(train)["losses"]
    assert same(usual, losses())
    shown = {  # in a plan, the second --stages is the one that counts
        "--stages 3": lambda found: len(found["ranks"][0]["stages"]) == 3 and same(found["losses"], usual),
        "--size layers=6": lambda found: found["model"]["sizes"] == {"layers": 6},
        "--eval": lambda found: found["model"]["mode"] == "eval",
        "--recompute": lambda found: same(found["losses"], usual),
    }
    for option, holds in shown.items():
        with refusal("SK601", "Plan and split again with it."):
            launched(f"{train} {option}")
        command(f"{PLAN} --stages 2 {option} -o again.json")
        command("split again.json -o again --force")
        assert holds(launched(f"train again {ON_ONE} --steps 2"))


def test_a_folder_of_stages_in_place_of_a_plan():
    command(f"{PLAN} --stages 2 -o plan.json")
    command("split plan.json -o stages")
    for name in ("run", "plan", "explain"):
        told = "It holds the stages of a split: train them with `{...}`, or, for a step of generation, `{...}`."
        with refusal("SK602", told) as caught:
            command(f"{name} stages")
    train, generate = caught.value.remedy.split("`")[1::2]
    assert (train, generate) == (
        "splitkit train stages --nproc 2",
        "splitkit generate stages --prompt-ids 1,2,3",
    )
    assert same(launched(f"{train[9:]} {ON_ONE} --steps 2")["losses"], losses())
    printed(f"plan {LLAMA} --how decoder --stages 1 -o step.json")
    printed("split step.json -o stages --force")
    (result,) = launched(f"{generate[9:]} --max-new-tokens 3")["results"]
    assert result["tokens"] == expected((1, 2, 3))


def test_weights_are_read_for_a_folder_of_stages():
    command(f"{PLAN} --stages 2 -o plan.json")
    command("split plan.json -o stages")
    model = models.load("my.py:net").model
    save_file({name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}, "zeros.safetensors")
    with refusal("SK601", "Write one: splitkit split PLAN -o FOLDER."):
        losses("--weights zeros.safetensors")
    first, *_ = launched(f"train stages --weights zeros.safetensors {ON_ONE} --steps 2")["losses"]
    assert first == 0 < losses()[0]


def test_traces_and_steps():
    command(f"{PLAN} --stages 2 -o plan.json")
    with refusal("SK603", "Name a file: --trace trace.json."):
        require_trace_file(Namespace(trace=STDOUT))
    losses("--trace trace.json")
    assert json.loads(Path("trace.json").read_text())
    losses("--checkpoint saved")
    with refusal("SK601", "Give --steps {...} or more.") as caught:
        launched(f"{TRAIN.replace('--steps 2', '--steps 3')} --checkpoint saved --resume --trace again.json")
    words = caught.value.remedy.removeprefix("Give ").removesuffix(" or more.")
    found = launched(f"{TRAIN.replace('--steps 2', words)} --checkpoint saved --resume --trace again.json")
    assert json.loads(Path("again.json").read_text())
    assert same(found["losses"], launched(TRAIN.replace("--steps 2", words))["losses"][2:])


def test_sizes_of_a_factory():
    Path("my.py").write_text(FACTORY.replace("layers=4", "name=4").replace("Net(layers)", "Net(name)"))
    with refusal("SK601", "Give the factory another parameter."):
        command(f"{PLAN} --stages 2 --size name=3")
    Path("my.py").write_text(FACTORY)
    assert command(f"{PLAN} --stages 2 --size layers=3")["model"]["sizes"] == {"layers": 3}


def test_a_compiler(monkeypatch):
    """One that is installed by the test would be the third way."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    command(f"{PLAN} --stages 2 -o plan.json")
    with refusal("SK601", "Install it, set CXX, or use --compile=aot_eager."):
        losses("--compile")
    require_compiler(Namespace(compile="aot_eager"))
    monkeypatch.setenv("CXX", "c++")
    require_compiler(Namespace(compile="inductor"))


@pytest.mark.campaign
def test_a_compiler_carried_out():
    """In processes of their own: torch reads CXX when it is imported."""
    command(f"{PLAN} --stages 2 -o plan.json")
    usual = losses()
    for compiler, option in (("no-such-compiler", "--compile=aot_eager"), ("c++", "--compile")):
        words = [sys.executable, "-m", "splitkit", *TRAIN.split(), option, "--json"]
        done = subprocess.run(words, env=os.environ | {"CXX": compiler}, capture_output=True, text=True, check=True)
        assert same(json.loads(done.stdout)["losses"], usual)


DIES = """
def ends(event, arguments):
    if event == "open" and "step-2" in str(arguments[0]):
        os._exit(1)


if os.environ.get("RANK") == "1" and "DIES" in os.environ:
    sys.addaudithook(ends)
"""
"""Rank 1 ends while it saves step 2."""


@pytest.mark.campaign
def test_a_rank_that_is_gone_while_a_checkpoint_is_saved():
    Path("my.py").write_text(f"{FACTORY}\nimport os, sys\n{DIES}")
    command(f"{PLAN} --stages 2 -o plan.json")
    train = f"{TRAIN.replace('--nproc 1', '--nproc 2').replace('--steps 2', '--steps 3')} --checkpoint saved --every 1"

    def ran(more="", **environment):
        words = [sys.executable, "-m", "splitkit", *train.split(), *more.split(), "--json"]
        done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)
        found = json.loads(done.stdout)
        if "error" in found:
            raise UsageError(found["error"]["code"], found["error"]["reason"], found["error"]["remedy"])
        return found

    with refusal(
        "SK805", "Look at the messages of the other ranks. {...}; continue with resume=True (--resume). Here: {...}"
    ) as caught:
        ran(DIES="1")
    assert "step-1 is complete" in caught.value.remedy
    found = ran("--resume")
    assert found["first_step"] == 1 and same(found["losses"], losses("--steps 3")[1:])


def test_options_of_staged_steps():
    command(f'{PLAN} --what fwd-bwd --policy "Pipeline(2)" -o plan.json')
    usual = losses()
    with refusal("SK601", "Leave it out; for less memory, plan with a limit: --policy \"Pipeline(2, memory='1GiB')\"."):
        losses("--recompute")
    command(f"{PLAN} --what fwd-bwd --policy \"Pipeline(2, memory='1GiB')\" -o plan.json")
    assert same(losses(), usual) and same(losses("--dp 1 --checkpoint saved"), usual)


def test_stages_of_another_tool():
    command(f"{PLAN} --stages 2 -o plan.json")
    command("export plan.json --to accelerate -o layout.txt")
    for option in ("--devices 2xh200", "--objective throughput --stages 2", "--schedule 1f1b --order o.csv --stages 2"):
        with refusal("SK601", "Leave one of the two out."):
            command(f"{PLAN} --from layout.txt {option}")
        command(f"{PLAN} {option}")
    assert command(f"{PLAN} --from layout.txt")


def test_a_program_that_was_exported():
    torch.export.save(torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),)), "net.pt2")
    for option in ("--eval", "--how decoder"):
        with refusal("SK601", "Leave out --eval and --how decoder."):
            printed(f"plan net.pt2 --stages 1 {option}")
    printed("plan net.pt2 --stages 1 -o plan.json")
    assert printed("run plan.json --model net.pt2 --check")["check"]["same"]


@pytest.mark.campaign
def test_what_generates(tmp_path):
    command(f"{PLAN} --stages 1 -o forward.json")
    with refusal("SK601", "Plan with: splitkit plan MODEL --how decoder --stages N -o FILE."):
        launched(f"generate forward.json --model my.py:net {ASKED}")
    printed(f"plan {LLAMA} --how decoder --stages 1 -o plan.json")
    assert generated(f"plan.json {ASKED}")
    command("split forward.json -o forward --model my.py:net")
    with refusal("SK801", "Plan with --how decoder, and split again."):
        launched(f"generate forward {ASKED}")
    with refusal("SK601", "Write one: splitkit split PLAN -o FOLDER."):
        launched(f"generate plan.json --weights checkpoint {ASKED}")
    printed("split plan.json -o stages")
    models.build("llama", seed=3, **SIZES).model.save_pretrained("checkpoint")
    assert generated(f"stages {ASKED}") and generated(f"stages --weights checkpoint {ASKED}")
    with refusal("SK601", "Plan and split again with it."):
        launched(f"generate stages --size layers=2 {ASKED}")
    with refusal("SK601", "Add --nproc N."):
        launched(f"generate {LLAMA} --policy Stages(1) {ASKED}")
    assert generated(f"{LLAMA} --policy Stages(1) --nproc 1 {ASKED}")
    with refusal("SK601", "Run it with: splitkit generate; or plan without --how decoder."):
        printed("run plan.json")
    printed(f"plan {LLAMA} --stages 1 -o whole.json")
    assert printed("run whole.json --check")["check"]["same"]
    with refusal("SK601", "Give --prompt, --prompt-ids or --requests."):
        launched("generate stages")
    with refusal("SK601", "Add --tokenizer PATH, the folder of a checkpoint; or give token ids: --prompt-ids 5,6,7."):
        launched("generate stages --prompt w5 --max-new-tokens 3")
    Path("asked.jsonl").write_text('{"input_ids": [5], "max_new_tokens": 3}\n')
    assert generated("stages --requests asked.jsonl", (5,))
    assert generated("stages --prompt-ids 5 --max-new-tokens 3", (5,))
    assert generated(f"stages --prompt w5 --tokenizer {tokenizer(tmp_path, SIZES['vocab'])} --max-new-tokens 3", (5,))
    shutil.copytree(tmp_path / "words", "checkpoint", dirs_exist_ok=True)
    words = "generate stages --weights checkpoint --prompt w5 --max-new-tokens 3"
    with refusal("SK601", "Add --tokenizer {...}.") as error:
        launched(words)
    assert error.value.remedy == "Add --tokenizer checkpoint."
    assert generated(f"{words.removeprefix('generate ')} --tokenizer checkpoint", (5,))
    printed("plan checkpoint/config.json --how decoder --stages 1 -o beside.json")
    with refusal("SK601", "{...}Add --weights {...}.") as error:
        launched(f"generate beside.json {ASKED}")
    write, add = error.value.remedy.rstrip(".").split(" Add ")
    assert write == "Write one: splitkit split PLAN -o stages, and name it instead."
    printed("split beside.json -o beside")
    assert generated(f"beside {add} {ASKED}")


def test_parts_with_replicas():
    command(f"{PLAN} --stages 1 -o plan.json")
    data = json.loads(Path("plan.json").read_text())
    Path("two.json").write_text(json.dumps({**data, "parts": [{**part, "replicas": 2} for part in data["parts"]]}))
    profile = "--model my.py:net --ranks 1 --microbatches 2 --repeat 1 --schedules gpipe"
    with refusal("SK801", "Plan without --replicas; in Python, without replicas=."):
        launched(f"profile two.json {profile}")
    assert launched(f"profile plan.json {profile}")["schedules"]


def test_a_loss_that_is_nan():
    Path("my.py").write_text(FACTORY.replace("Tanh", "Identity"))
    command(f"{PLAN} --stages 2 -o plan.json")
    with refusal("SK805", "Lower --lr."):
        launched(f"{TRAIN} --optimizer sgd --lr 1e30 --steps 6")
    first, *_, last = launched(f"{TRAIN} --optimizer sgd --lr 1e-2 --steps 6")["losses"]
    assert last < first
    Path("my.py").write_text(FACTORY.replace("x.square()", "(-1 - x.square()).log()"))
    command(f"{PLAN} --stages 2 -o plan.json")
    with refusal("SK805", "Correct the model or its inputs: no optimizer step has been made yet."):
        losses()
    Path("my.py").write_text(FACTORY.replace("x.square()", "(1 + x.square()).log()"))
    command(f"{PLAN} --stages 2 -o plan.json")
    assert all(loss == loss for loss in losses())


@pytest.mark.campaign
def test_a_folder_of_stages_on_replicas():
    """`--dp` is no option that a folder has decided: each replica takes its share of the microbatches."""
    command(f"{PLAN} --stages 1 -o plan.json")
    command("split plan.json -o stages")
    usual = losses()
    words = "train stages --model my.py:net --nproc 2 --dp 2 --microbatches 2 --steps 2 --check --json"
    done = subprocess.run([sys.executable, "-m", "splitkit", *words.split()], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["check"]["same"] and found["replicas"] == [2] and same(found["losses"], usual)
