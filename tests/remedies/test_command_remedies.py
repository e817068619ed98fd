"""Remedies of the command line (SK60x): the words that a refusal tells to add, to leave out or to write work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from carried import refusal
from commandlines import printed

from splitkit.cli.selftest.check_runs import SECONDS
from splitkit.pipeline import schedules

FACTORY = '''"""A model of a user."""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def net(layers=4):
    return Net(layers), torch.ones(4, 16)
'''


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(FACTORY)


OWN = ("export", "view", "run", "split", "explain")
"""Commands on a plan, which run the code of a user's model only if the model is named."""


def command(words):
    """Run a command, with the name of the model that a plan was made for."""
    made_for = words.split()[0] in OWN and ".json" in words.split()[1]
    return printed(f"{words} --model my.py:net" if made_for else words)


PLAN = "plan my.py:net"
CACHED = "plan gpt2 --size layers=2,width=32,heads=2"


def test_options_that_a_plan_needs():
    with refusal("SK601", "Add --devices 4xh200, --stages N or --policy EXPR."):
        command(PLAN)
    for added in ("--devices 4xh200", "--stages 2", '--policy "Stages(2)"'):
        command(f"{PLAN} {added}")
    with refusal("SK601", "Add --devices 4xh200 or --stages 4."):
        command(f"{PLAN} --links nvlink4")
    with refusal("SK601", "{...} With --what fwd-bwd, --memory limits the peak of a training step."):
        command(f"{PLAN} --memory 1GiB")
    for added in ("--devices 4xh200", "--stages 4"):
        command(f"{PLAN} --links nvlink4 {added}")
        command(f"{PLAN} --memory 1GiB {added}")
    command(f"{PLAN} --memory 1GiB --what fwd-bwd")
    with refusal("SK601", "Add --schedule 1f1b."):
        command(f"{PLAN} --stages 2 --microbatches 4")
    command(f"{PLAN} --stages 2 --microbatches 4 --schedule 1f1b")
    with refusal("SK601", "Add --devices 4xh200 in place of --stages."):
        command(f"{PLAN} --stages 4 --objective latency")
    command(f"{PLAN} --devices 4xh200 --objective latency")


def test_options_that_a_plan_does_not_take_together():
    with refusal(
        "SK601", "Leave --stages out; or give --stages with --costs roofline:h200 --links nvlink4 in place of"
    ):
        command(f"{PLAN} --devices 4xh200 --stages 4")
    command(f"{PLAN} --devices 4xh200")
    command(f"{PLAN} --stages 4 --costs roofline:h200 --links nvlink4")
    with refusal("SK601", "Leave out --schedule or --objective latency."):
        command(f"{PLAN} --devices 4xh200 --objective latency --schedule 1f1b")
    command(f"{PLAN} --devices 4xh200 --objective latency")
    command(f"{PLAN} --devices 4xh200 --schedule 1f1b")
    for one, other in (
        ("--schedule 1f1b", "--optimizer none"),
        ("--training", "--optimizer none"),
        ("--what fwd-bwd", "--optimizer none"),
    ):
        with refusal("SK601", "Leave one of them out."):
            command(f"{PLAN} --stages 2 {one} {other}")
        command(f"{PLAN} --stages 2 {one}")
        command(f"{PLAN} --stages 2 {other}")
    with refusal("SK601", "Give it to the policy: --policy \"Stages(4, schedule='1f1b')\"; or leave --policy out."):
        command(f'{PLAN} --policy "Stages(4)" --schedule 1f1b')
    command(f"{PLAN} --policy \"Stages(4, schedule='1f1b')\"")
    command(f"{PLAN} --stages 4 --schedule 1f1b")
    with refusal("SK601", "Leave one of the two out; --schedule, --microbatches and --links go with --stages."):
        command(f"{PLAN} --what fwd-bwd --memory 50% --schedule 1f1b")
    command(f"{PLAN} --what fwd-bwd --memory 50%")
    command(f"{PLAN} --stages 2 --schedule 1f1b")
    command(f"{PLAN} --what fwd-bwd --stages 2 --schedule 1f1b --microbatches 4 --links nvlink4")


def test_sizes_of_memory():
    with refusal("SK601", "Write bytes, 80GiB, or 80% with --devices."):
        command(f"{PLAN} --stages 2 --memory much")
    with refusal("SK601", "Write a share above 0%, such as 80%."):
        command(f"{PLAN} --devices 2xh200 --memory 0%")
    with refusal("SK601", "Name the devices whose memory it is a share of, such as --devices 4xh200; or write bytes"):
        command(f"{PLAN} --stages 2 --memory 80%")
    for words in ("--stages 2 --memory 800000B", "--stages 2 --memory 80GiB", "--devices 4xh200 --memory 80%"):
        command(f"{PLAN} {words}")
    with refusal("SK601", "Write bytes, 2GiB, a share of what can be saved (50%), or least."):
        command(f"{PLAN} --what fwd-bwd --memory much")
    for memory in ("2000000", "200000B", "2GiB", "50%", "least"):
        command(f"{PLAN} --what fwd-bwd --memory {memory}")
    with refusal("SK601", "With --optimizer, --memory is the memory of the whole card: write bytes, or 24GiB."):
        command(f"{PLAN} --what fwd-bwd --memory 50% --optimizer adam")
    command(f"{PLAN} --what fwd-bwd --memory 200000B --optimizer adam")
    command(f"{PLAN} --what fwd-bwd --memory 24GiB --optimizer adam")


def test_devices_of_several_kinds():
    several = "--devices h200,a100"
    with refusal(
        "SK601", "Leave --schedule out: unequal devices are planned for throughput or latency. Or name one kind"
    ):
        command(f"{PLAN} {several} --schedule 1f1b")
    command(f"{PLAN} {several}")
    command(f"{PLAN} {several} --objective latency")
    command(f"{PLAN} --devices 4xh200 --schedule 1f1b")
    with refusal(
        "SK601", "Leave --{...} out: each device has the prices of its roofline; --optimizer adam adds backward."
    ):
        command(f"{PLAN} {several} --training")
    command(f"{PLAN} {several} --optimizer adam")
    with refusal("SK601", "Name one kind of device, 4xh200, or give --stages 4; leave --objective latency out."):
        command(f"{PLAN} {several} --memory least")
    with refusal("SK601", "Name one kind of device, 8xh200, or give --stages 8; leave --objective latency out."):
        command(f"{PLAN} {several} --replicas 1,2")
    command(f"{PLAN} --devices 4xh200 --memory least")
    command(f"{PLAN} --stages 4 --memory least")
    command(f"{PLAN} --devices 8xh200 --replicas 1,2")
    command(f"{PLAN} --stages 8 --replicas 1,2")
    with refusal("SK601", "{...}; or use --tokens N."):
        command(f"{PLAN} {several} --objective tokens")
    with refusal("SK601", "{...}; or leave --chunk out."):
        command(f"{PLAN} {several} --tokens 8 --chunk 4")
    command(f"{CACHED} --devices 2xrtx-3090 --tokens 8 --chunk 4")
    command(f"{CACHED} --stages 2 --memory 24GiB,16GiB --tokens 8 --chunk 4")


def test_options_of_inference():
    with refusal("SK601", "Add --objective tokens, or --tokens N."):
        command(f"{PLAN} --stages 2 --memory 1GiB --chunk 4")
    command(f"{CACHED} --stages 2 --memory 1GiB --chunk 4 --objective tokens")
    command(f"{CACHED} --stages 2 --memory 1GiB --chunk 4 --tokens 8")
    with refusal("SK601", "Leave --schedule, --optimizer, --training and --replicas out."):
        command(f"{PLAN} --stages 2 --memory 1GiB --objective tokens --schedule 1f1b")
    with refusal("SK601", "Give a size: --memory 24GiB."):
        command(f"{PLAN} --stages 2 --memory least --objective tokens")
    with refusal(
        "SK601", "Leave --tokens out, or --objective: --tokens asks for the fastest stages with room for so many."
    ):
        command(f"{PLAN} --stages 2 --memory 1GiB --objective tokens --tokens 8")


def test_options_of_a_training_step():
    step = f"{PLAN} --what fwd-bwd"
    with refusal("SK601", "Add --memory 2GiB, --stages N, or --policy EXPR."):
        command(step)
    command(f"{step} --memory 2GiB")
    command(f"{step} --stages 2")
    command(f'{step} --policy "Budget(0.5)"')
    with refusal("SK601", "With --stages, --memory is the memory of each device: write bytes, or 24GiB."):
        command(f"{step} --stages 2 --memory 50%")
    command(f"{step} --stages 2 --memory 24GiB")
    with refusal("SK601", "Give it to the policy: --policy \"Budget(card='24GiB', optimizer='adamw')\"."):
        command(f'{step} --policy "Budget(0.5)" --optimizer adamw')
    command(f"{step} --policy \"Budget(card='24GiB', optimizer='adamw')\"")
    with refusal("SK601", "Leave out --how and --dynamic."):
        command(f"{step} --memory 2GiB --dynamic")


def test_policies_as_text():
    with refusal("SK601", "Did you mean {...}?") as error:
        command(f'{PLAN} --policy "Stage(4)"')
    assert "Stages" in error.value.remedy
    with refusal("SK601", "Choose one of {...}.") as error:
        command(f'{PLAN} --policy "Qqqqqq(4)"')
    assert "Stages" in error.value.remedy.removeprefix("Choose one of ").rstrip(".").split(", ")
    with refusal("SK601", 'Write a policy and literals, such as "Stages(4)" or "ByName({\'transformer.h.*\': 1})".'):
        command(f'{PLAN} --policy "Stages(2+"')
    command(f'{PLAN} --policy "Stages(4)"')
    command(f"{PLAN} --policy \"ByName({{'layers.*': 1}})\"")
    with refusal("SK302", "It is {...}."):
        command(f'{PLAN} --policy "Stages(m=4)"')


def test_stages_of_other_tools():
    with refusal("SK601", "Name the file: --from layout.txt."):
        command(f"{PLAN} --form torch")
    command(f"{PLAN} --stages 2 -o plan.json")
    exported = command("export plan.json --to accelerate -o layout.txt")
    assert exported and Path("layout.txt").exists()
    command(f"{PLAN} --from layout.txt --form accelerate")
    with refusal("SK601", "Stages of other tools cut the forward."):
        command(f"{PLAN} --from layout.txt --what fwd-bwd")
    command(f"{PLAN} --from layout.txt")
    with refusal("SK601", "Leave --stages out to compare plans with the same number of stages."):
        command(f"{PLAN} --from layout.txt --stages 3")
    with refusal("SK601", "Name a schedule: --schedule 1f1b."):
        command(f"{PLAN} --from layout.txt --microbatches 4")
    command(f"{PLAN} --from layout.txt --microbatches 4 --schedule 1f1b")


def test_exports():
    command(f"{PLAN} --stages 2 -o plan.json")
    with refusal("SK601", "Name a plan file, or a model with --stages N."):
        command("export --to torch")
    command("export plan.json --to torch -o a.txt")
    command("export my.py:net --stages 2 --to torch -o b.txt")
    with refusal("SK601", "Write bytes: --memory 80GiB."):
        command("export plan.json --to torch --memory 80%")
    command("export plan.json --to torch --memory 80GiB -o c.txt")
    with refusal("SK601", "Name a schedule: --schedule 1f1b."):
        command("export plan.json --to torch --microbatches 4")
    command("export plan.json --to torch --microbatches 4 --schedule 1f1b -o d.txt")
    with refusal("SK601", "Leave --order{...} out; it works with {...}.") as error:
        command("export plan.json --to accelerate --schedule 1f1b --order o.csv")
    first = error.value.remedy.split("works with ")[1].rstrip(".").split(", ")[0]
    command("export plan.json --to accelerate -o e.txt")
    command(f"export plan.json --to {first} --schedule 1f1b --order o.csv -o f.txt")
    with refusal("SK521", "Did you mean {...}?") as error:
        command("export plan.json --to accelerat")
    assert error.value.remedy.startswith("Did you mean accelerate?")


def test_sweeps():
    sweep = "sweep my.py:net"
    with refusal("SK601", "Add --stages 2,4,8 to sweep over pipelines."):
        command(f"{sweep} --microbatches 4")
    command(f"{sweep} --stages 2,4 --microbatches 4,8")
    with refusal("SK601", "Leave one of them out."):
        command(f"{sweep} --stages 2 --points 3")
    command(f"{sweep} --points 3")
    with refusal("SK601", "Name the link: --offload pcie5."):
        command(f"{sweep} --host 64GiB")
    with refusal("SK601", "Add --of peak."):
        command(f"{sweep} --offload pcie5")
    with refusal("SK601", "Write --host 64GiB."):
        command(f"{sweep} --offload pcie5 --of peak --host much")
    command(f"{sweep} --offload pcie5 --of peak --host 64GiB --points 2")
    with refusal("SK601", "Add --what {...}."):
        command(f"{sweep} --stages 2 --chunks 1")
    command(f"{sweep} --stages 2 --chunks 1 --what fwd-bwd")
    with refusal("SK601", "Add --memory 80GiB."):
        command(f"{sweep} --stages 2 --what fwd-bwd --offload pcie5")
    command(f"{sweep} --stages 2 --what fwd-bwd --offload pcie5 --memory 80GiB")
    with refusal("SK601", "Leave it out: stages of a training step recompute what the memory requires."):
        command(f"{sweep} --stages 2 --what fwd-bwd --recompute")
    with refusal("SK601", "Name the kind alone: --devices {...}.") as error:
        command(f"{sweep} --stages 2 --devices 2xh200")
    command(f"{sweep} --stages 2 {error.value.remedy.removeprefix('Name the kind alone: ').rstrip('.')}")
    command(f"{PLAN} --devices h100,l4 -o unequal.json")
    swept = "sweep unequal.json --model my.py:net --stages 2 --schedules 1f1b"
    with refusal("SK601", "Name the kind: --devices {...}.") as error:
        command(swept)
    command(f"{swept} {error.value.remedy.removeprefix('Name the kind: ').rstrip('.')}")


def test_pages_and_profiles():
    command(f"{PLAN} --what fwd-bwd --memory 50% -o step.json")
    with refusal("SK601", "Leave it out, or plan stages: splitkit plan MODEL --devices 4xh200 -o {...}"):
        command("view step.json --schedule 1f1b -o page.html")
    command("view step.json -o page.html")
    command(f"{PLAN} --devices 4xh200 -o stages.json")
    command("view stages.json --schedule 1f1b -o page.html")
    command(f'{PLAN} --what fwd-bwd --policy "Pipeline(2)" -o staged.json')
    with refusal("SK601", "Leave it out; such a page takes --costs, --schedule and --memory."):
        command("view staged.json --training -o page.html")
    command("view staged.json --costs roofline:h200 --schedule 1f1b --memory 1GiB -o page.html")
    with refusal("SK601", "Add --ranks N."):
        command("profile my.py:net --trace trace.json")
    with refusal("SK601", "Give 2 or more."):
        command("profile my.py:net --stages 2 --ranks 2 --microbatches 1")
    with refusal("SK601", "splitkit view PLAN.json --schedule 1f1b -o page.html draws a step as simulated."):
        command("profile my.py:net --stages 2 --ranks 2 --view page.html")


def test_a_device_that_is_not_there(monkeypatch):
    for name in [name for name in SECONDS if name != "memory: forward"]:
        monkeypatch.delitem(SECONDS, name)
    with refusal("SK602", "Try --device cpu."):
        printed("doctor --device cuda:99")
    verdicts = [finding["verdict"] for finding in printed("doctor --device cpu")["findings"]]
    assert verdicts == ["ok", "measured"]


def test_models_and_files():
    with refusal("SK602", "Write {...}."):
        command("plan my.py --stages 2")
    command("plan my.py:net --stages 2 -o plan.json")
    with refusal("SK601", "Pass --model {...} to run that code."):
        printed("run plan.json")
    with refusal("SK602", "Pass a model; to run a plan, use `splitkit run PLAN.json`."):
        command("plan plan.json --stages 2")
    command("run plan.json")
    with refusal("SK603", "Name two files."):
        command("plan my.py:net --stages 2 -o one.json --view one.json")
    with refusal("SK603", "Name another file."):
        command("plan my.py:net --stages 2 -o my.py")
    command("plan my.py:net --stages 2 -o one.json --view two.html")
    with refusal("SK601", "Name the folder to write."):
        command("split plan.json --force")
    command("split plan.json -o parts")
    with refusal("SK504", "Name another folder, or pass --force."):
        command("split plan.json -o parts")
    command("split plan.json -o parts --force")
    command("split plan.json -o other-parts")
    with refusal("SK601", "Plan first: splitkit plan {...} --stages 4 -o plan.json && splitkit {...} plan.json"):
        command("explain my.py:net")
    command("plan my.py:net --stages 4 -o plan.json")
    command("explain plan.json")


def test_plans_that_a_command_cannot_use():
    with refusal("SK601", "Add --stages N or --policy EXPR, or give a plan."):
        command("run my.py:net")
    command("run my.py:net --stages 2")
    command('run my.py:net --policy "Stages(2)"')
    command(f"{PLAN} --stages 2 -o plan.json")
    command("run plan.json")
    with refusal("SK601", "Name just the model, or a plan whose name ends in .json."):
        printed("run my.py:net --stages 2 --model my.py:net")
    with refusal("SK601", "Plan again with it."):
        command("run plan.json --policy Stages(3)")
    command(f"{PLAN} --policy Stages(3) -o plan.json")
    data = json.loads(Path("plan.json").read_text())
    Path("bare.json").write_text(json.dumps({key: value for key, value in data.items() if key != "model"}))
    with refusal("SK601", "Pass --model MODEL."):
        printed("run bare.json")
    printed("run bare.json --model my.py:net")
    command(f"{PLAN} --what fwd-bwd --memory 50% -o halves.json")
    with refusal(
        "SK601",
        "`splitkit run {...}` runs it. In Python: joint.split(splitkit.Plan.load(path, joint.graph_module.graph)).",
    ):
        command("profile halves.json --model my.py:net")
    command("run halves.json")
    with refusal("SK601", "Run it with: splitkit run {...}; or plan with --stages N."):
        command("train halves.json --model my.py:net --nproc 2")
    command(f'{PLAN} --what fwd-bwd --policy "Pipeline(2)" -o staged.json')
    with refusal(
        "SK601",
        "`splitkit train {...} --nproc N --schedule S` trains with it, `splitkit run {...}` runs it in one process, "
        "and `splitkit view {...} -o page.html` draws it.",
    ):
        command("profile staged.json --model my.py:net")
    command("run staged.json")
    command("view staged.json -o page.html")


def test_options_of_training():
    command(f"{PLAN} --stages 2 -o plan.json")
    train = "train plan.json --model my.py:net"
    with refusal("SK601", "Add --checkpoint FOLDER."):
        command(f"{train} --nproc 2 --resume")
    with refusal(
        "SK601", "Add --nproc N, or give it to torchrun: torchrun --max-restarts N ... -m splitkit train ... --resume"
    ):
        command(f"{train} --checkpoint saved --max-restarts 1")
    with refusal("SK601", "Give --steps 2 or more."):
        command(f"{train} --nproc 2 --steps 1 --trace trace.json")
    with refusal("SK601", "Add --nproc N, or start it with: torchrun --nproc-per-node N -m splitkit train ..."):
        command(f"{train} --steps 2")


@pytest.mark.campaign
def test_options_of_training_carried_out():
    command(f"{PLAN} --stages 2 -o plan.json")
    train = [sys.executable, "-m", "splitkit", "train", "plan.json", "--model", "my.py:net", "--nproc", "2"]
    for words in (
        "--steps 2 --trace trace.json --checkpoint saved",
        "--steps 3 --checkpoint saved --resume --max-restarts 1",
    ):
        done = subprocess.run([*train, *words.split()], capture_output=True, text=True)
        assert not done.returncode, done.stderr
    assert Path("trace.json").exists()


def test_schedules_of_a_file(monkeypatch):
    monkeypatch.setattr(schedules, "_KNOWN", dict(schedules._KNOWN))
    Path("own.py").write_text("x = 1\n")
    with refusal("SK601", "Define one in it: splitkit.extend.Schedule(...)."):
        command(f"{PLAN} --stages 2 --schedule own.py:mine")
    Path("own.py").write_text(SCHEDULE)
    with refusal("SK601", "It has {...}.") as error:
        command(f"{PLAN} --stages 2 --schedule own.py:other")
    name = error.value.remedy.removeprefix("It has ").rstrip(".")
    command(f"{PLAN} --stages 2 --schedule own.py:{name}")


SCHEDULE = """
from splitkit.extend import Action, Schedule

def order(stages, microbatches, ranks):
    return [[Action(s, kind, m) for m in range(microbatches) for kind in "FB"] for s in range(stages)]

mine = Schedule("One by one", order)
"""


def test_losses_on_the_command_line():
    with refusal("SK601", "Use {...}, or a function of the output: --loss my_model.py:loss.") as error:
        command(f"{PLAN} --what fwd-bwd --stages 2 --loss qqqqqq")
    with refusal("SK601", "Did you mean {...}?"):
        command(f"{PLAN} --what fwd-bwd --stages 2 --loss crossentropy")
    assert "cross_entropy" in error.value.remedy.removeprefix("Use ").partition(", or")[0].split(", ")


def test_words_on_the_command_line():
    with refusal("SK601", "Use --how export."):
        command("capture my.py:net --dynamic --how symbolic_trace")
    command("capture my.py:net --dynamic --how export")
    with refusal("SK601", "Did you mean {...}?") as error:
        command("capture my.py:net --dynamc")
    assert "--dynamic" in error.value.remedy
    with refusal("SK601", "Did you mean {...}?") as error:
        command(f"{PLAN} --stages 2 --costs rofline:h100")
    assert "roofline" in error.value.remedy
    with refusal("SK601", "Use flops, unit, measured, roofline:DEVICE or fused:DEVICE."):
        command(f"{PLAN} --stages 2 --costs qqqqqq")
    for prices in ("flops", "unit", "measured", "roofline:h100", "fused:h100"):
        command(f"{PLAN} --stages 2 --costs {prices}")
    with refusal("SK601", "Write {...} {...}{...}."):
        command(f"{PLAN} --stages 2 --memory 80 GB")
    command(f"{PLAN} --stages 2 --memory 80GB")
    with refusal("SK601", "Write {...} {...}. {...}"):
        command(f"{PLAN} --stages two")
    with refusal("SK601", "{...}") as error:
        command("capture my.py:net --how exprt")
    assert error.value.remedy.startswith("Did you mean export?")
    command("capture my.py:net --how export")
    with refusal("SK601", "Write {...}={...}. {...}"):
        command(f"{PLAN} --stages")
    with refusal("SK601", "See `{...} --help`."):
        command(f"{PLAN} --stages 2 another")
    with refusal("SK601", "Name at most {...}.") as error:
        command(f"{PLAN} --devices 99999xh200")
    assert "999" not in error.value.remedy
    command(f"{PLAN} --devices 4xh200")
    with refusal("SK601", "Use ByName({...}), or Python: splitkit.plan(gm, policies.{...}(...)).save('plan.json')."):
        command(f'{PLAN} --policy "ByDevice(3)"')
    command(f"{PLAN} --policy \"ByName({{'layers.*': 1}})\" -o plan.json")
    with refusal("SK603", "Give {...} a file."):
        command(f"{PLAN} --stages 2 -o -")
    command(f"{PLAN} --stages 2 -o plan.json")


def test_files_of_devices():
    Path("mine.toml").write_text("[mine]\npeak = { float32 = 1e12 }\nbandwidth = 1e12\nmemory = 1000000000\n")
    with refusal("SK601", "It describes {...}.") as error:
        command(f"{PLAN} --stages 2 --costs roofline:mine.toml:other")
    name = error.value.remedy.removeprefix("It describes ").rstrip(".")
    command(f"{PLAN} --stages 2 --costs roofline:mine.toml:{name}")
    Path("two.toml").write_text(Path("mine.toml").read_text().replace("[mine]", "[mine]\ncount = 0"))
    with refusal("SK320", "Give a whole number >= 1."):
        command(f"{PLAN} --devices two.toml")
    Path("two.toml").write_text(Path("mine.toml").read_text().replace("[mine]", "[mine]\ncount = 2"))
    command(f"{PLAN} --devices two.toml")
