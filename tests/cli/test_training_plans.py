"""``splitkit plan --what fwd-bwd``, ``run`` of such a plan, and ``splitkit sweep``."""

import json
import re

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example

import splitkit as sk
from splitkit.cli import main
from splitkit.testing import models
from splitkit.units import bounded, size

TINY = ["--size", "layers=1,width=32,heads=2", "--size", "vocab=64,seq=8"]
STEP = ["--what", "fwd-bwd", "--policy"]

FACTORY = """
import torch
from torch import nn
from torch.compiler import is_compiling

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)

    def forward(self, x, y):
        x.add_(1.0)
        return {"z": (y * self.drop(self.second(torch.relu(self.norm(self.first(x)))))).square().mean()}

class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        x.mul_(2)
        self.mean.lerp_(x.mean(0), 0.5)
        return (self.linear(x).sin() * self.mean).sum()

class Other(nn.Module):  # what is captured is not what runs
    def __init__(self, value=1.0, gradient=1.0, state=0.0):
        super().__init__()
        self.value, self.gradient, self.state = value, gradient, state
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        value, gradient, state = (self.value, self.gradient, self.state) if is_compiling() else (1.0, 1.0, 0.0)
        self.seen += state
        w = self.w * gradient - (self.w * (gradient - 1)).detach()
        return (x * w).sum() * value

def net():
    return Net(), (torch.randn(5, 6), torch.randn(5, 6, requires_grad=True))

def writing():
    return Writing(), (torch.randn(4, 3),)

def value():
    return Other(value=2.0), torch.ones(3)

def gradient():
    return Other(gradient=2.0), torch.ones(3)

def state():
    return Other(state=1.0), torch.ones(3)

def rounding():
    return Other(value=1.0000002), torch.ones(3)
"""


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(FACTORY)
    return str(path)


@pytest.fixture(scope="module")
def planned():
    """The text of each plan of a known model, by the words that asked for it."""
    return {}


@pytest.fixture
def step(call, tmp_path, planned):
    """Plan forward and backward of a model; the path of the plan."""

    def plan(model, policy, *words):
        path = tmp_path / "step.json"
        if (model, policy, *words) in planned:
            path.write_text(planned[model, policy, *words])
            return path
        code, _, err = call("plan", model, *words, *STEP, policy, "-o", path)
        assert code == 0, err
        if ":" not in model:
            planned[model, policy, *words] = path.read_text()
        return path

    return plan


def test_a_plan_of_forward_and_backward(call, tmp_path):
    path = tmp_path / "plan.json"
    code, out, _ = call("plan", "gpt2", *TINY, "--what", "fwd-bwd", "--policy", "MinCut()", "-o", path, "--json")
    data = json.loads(out)
    assert code == 0 and data["what"] == "fwd-bwd" and data["prices"] == "roofline of a100"
    assert data["peak"] == max(data["forward"]["peak"], data["backward"]["peak"])
    assert sum(v["nbytes"] for v in data["saved"]["values"]) == data["saved"]["nbytes"] > 0
    written = json.loads(path.read_text())
    assert written["what"] == "fwd-bwd" and {p["key"] for p in written["parts"]} == {"forward", "backward"}


@pytest.mark.campaign
def test_what_waits_on_the_host_is_saved_too_and_sweeps_of_the_plan_have_its_prices(call, tmp_path):
    path, policy = tmp_path / "plan.json", "Budget(0.5, offload=1e12)"
    sizes = ["--size", "layers=1,width=16,heads=2,vocab=16,seq=64"]
    words = ("plan", "gpt2", *sizes, "--what", "fwd-bwd", "--policy", policy, "--costs", "roofline:l4", "-o", path)
    code, out, err = call(*words, "--json")
    assert code == 0, err
    data = json.loads(out)
    saved, host = data["saved"]["nbytes"], data["saved"]["host"]
    assert f"Forward saves {size(saved)}, {size(host)} of it on the host" in data["note"]
    assert sum(v["nbytes"] for v in data["saved"]["values"]) == saved > host > 0
    assert f"The peak is {bounded(data['peak'], data['bounds'], data['unseen'])} (within " in data["note"]
    for words in ((), ("--stages", "2", "--microbatches", "2", "--schedules", "gpipe")):
        code, out, err = call("sweep", path, *words, "--json")
        swept = json.loads(out)
        assert code == 0 and swept.get("prices", swept.get("note")) == "roofline of l4", err
        assert words == () or "--costs roofline:l4 --what fwd-bwd" in swept["next"]


def test_the_plan_is_read_again_in_python(step):
    path = step("gpt2", "MinCut()", *TINY)
    joint = captured_example("gpt2", "joint", layers=1, width=32, heads=2, vocab=64, seq=8).graph
    read = sk.Plan.load(path, joint.graph_module.graph)
    costs = sk.costs.roofline(joint.graph_module, device="a100")
    assert joint.split(read, costs).saved == joint.split(sk.policies.MinCut(), costs).saved


POLICIES = ["SaveAll()", "RecomputeAll()", "Remat(modules='*.attn')", "Budget(0.5, of='saved')"]


@pytest.mark.parametrize("policy", these_first(POLICIES[2:3], POLICIES[:2] + POLICIES[3:]))
def test_a_plan_runs_like_eager(call, data, step, policy):
    path = step("gpt2", policy, *TINY)
    code, found = data("run", path, "--check", "--repeat", "2")
    check, peak = found["check"], found["peak"]
    assert code == 0 and found["what"] == "fwd-bwd" and check["same"] and not check["failures"]
    assert check["loss"][0] == check["loss"][1] == found["loss"]
    assert check["outputs"] == {"count": 1, "bitwise": 1, "worst": None}
    model = models.build("gpt2", layers=1, width=32, heads=2, vocab=64, seq=8).model
    assert check["gradients"]["count"] == len(list(model.parameters()))
    assert peak["predicted"] == peak["measured"] == max(half["peak"] for half in found["halves"]) and peak["error"] == 0
    assert found["forward"] > 0 < found["backward"] and found["saved"] > 0
    assert [half["half"] for half in found["halves"]] == ["forward", "backward"]
    code, out, err = call("run", path, "--check")
    assert (code, err) == (0, "") and out.endswith("same: yes\n")
    assert "measured (exact)" in out and "16 of 16 bitwise equal" in out and "peak predicted" in out


def test_without_a_check_the_peak_is_the_one_that_the_plan_says(call, data, tmp_path):
    path = tmp_path / "plan.json"
    _, out, _ = call("plan", "gpt2", *TINY, "--what", "fwd-bwd", "--memory", "1.0", "-o", path, "--json")
    code, found = data("run", path)
    assert code == 0 and found["check"] is None and found["peak"]["measured"] is None
    assert found["peak"]["predicted"] == json.loads(out)["peak"]
    code, out, _ = call("run", path)
    assert code == 0 and "predicted" in out and "measured" not in out and "same" not in out


def test_buffers_random_numbers_ties_and_inputs_that_are_written_or_have_gradients(data, step, factory):
    path = step(f"{factory}:net", "RecomputeAll()")
    code, found = data("run", path, "--model", f"{factory}:net", "--check", "--seed", "7")
    check = found["check"]
    assert code == 0 and check["same"], check
    assert check["gradients"]["count"] == 5 + 1, "a tied weight, two biases, the norm's two, and an input's"
    assert check["state"]["count"] >= 3 + 5 + 2 and found["model"]["seed"] == 7, "buffers, parameters, inputs"


@pytest.mark.parametrize(
    "which, differs", [("value", "loss"), ("gradient", "gradient of w"), ("state", "value of seen")]
)
def test_a_step_that_differs_exits_4(call, data, step, factory, which, differs):
    spec = f"{factory}:{which}"
    path = step(spec, "SaveAll()")
    code, out, _ = call("run", path, "--model", spec, "--check")
    assert code == 4 and "same: no" in out and f"differs: {differs} by" in out
    code, found = data("run", path, "--model", spec, "--check")
    assert code == 4 and differs in [bad["name"] for bad in found["check"]["failures"]]
    assert call("run", path, "--model", spec)[0] == 0


def test_a_loss_may_differ_by_rounding(data, step, factory):
    path = step(f"{factory}:rounding", "SaveAll()")
    code, found = data("run", path, "--model", f"{factory}:rounding", "--check")
    loss = found["check"]["outputs"]
    assert code == 0 and found["check"]["same"] and loss["bitwise"] == 0 and 0 < loss["worst"]["relative"] < 1e-6


def test_a_stale_plan_is_refused(data, step):
    path = step("gpt2", "MinCut()", *TINY, "--size", "layers=2")
    code, found = data("run", path, "--size", "layers=1")
    assert code == 1 and found["error"]["code"] == "SK502" and found["error"]["nodes"]
    read = json.loads(path.read_text())
    path.write_text(json.dumps(read | {"graph": "0" * 32, "nodes": []}))
    assert data("run", path)[1]["error"]["code"] == "SK502"
    path.write_text(json.dumps(read | {"places": 5}))
    assert data("run", path)[1]["error"]["code"] == "SK501"
    renamed = [{**part, "key": part["key"].upper()} for part in read["parts"]]
    path.write_text(json.dumps(read | {"parts": renamed}))
    code, found = data("run", path)
    assert code == 1 and found["error"]["code"] == "SK206"


def test_other_sizes_of_the_inputs_fit(data, step):
    code, found = data("run", step("gpt2", "MinCut()", *TINY), "--size", "batch=3", "--check")
    assert code == 0 and found["check"]["same"] and found["model"]["sizes"]["batch"] == 3


@pytest.mark.parametrize("words", [["--how", "symbolic_trace"], ["--dynamic"], ["--policy", "SaveAll()"]])
def test_options_that_do_not_fit_a_plan_of_a_step(call, step, words):
    code, _, err = call("run", step("gpt2", "SaveAll()", *TINY), *words)
    assert code == 2 and "SK601" in err


def test_a_factory_that_only_the_plan_names_is_not_run(call, step, factory):
    code, _, err = call("run", step(f"{factory}:net", "SaveAll()"))
    assert code == 2 and "SK601" in err and "--model" in err


@pytest.mark.parametrize("command", ["split", "profile"])
def test_commands_that_cut_a_forward_refuse_it_and_say_what_runs_it(call, step, command):
    path = step("gpt2", "MinCut()", *TINY)
    code, _, err = call(command, path)
    assert code == 2 and "SK601" in err and "forward and backward" in err and f"splitkit run {path}" in err


@pytest.mark.parametrize("memory", these_first(["64MiB"], ["1.0"]))
def test_a_budget_of_the_peak(call, memory):
    code, out, err = call("plan", "gpt2", *TINY, "--what", "fwd-bwd", "--memory", memory)
    assert code == 0, err
    assert "recomputed" in out and "saved for backward" in out


def test_a_budget_that_cannot_be_kept(call):
    code, _, err = call("plan", "gpt2", *TINY, "--what", "fwd-bwd", "--memory", "1KiB")
    assert code == 3 and "SK303" in err and "the smallest is" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--what", "fwd-bwd"],
        ["--what", "fwd-bwd", "--stages", "2", "--objective", "latency"],
        ["--what", "fwd-bwd", "--memory", "1GiB", "--policy", "SaveAll()"],
        ["--what", "fwd-bwd", "--policy", "SaveAll()", "--dynamic"],
        ["--memory", "1GiB"],
        [],
    ],
)
def test_options_that_do_not_go_together(call, words):
    code, _, err = call("plan", "gpt2", *TINY, *words)
    assert code == 2 and "SK601" in err


@pytest.mark.parametrize(
    "memory", ["lots", "-1", "nan", "inf", "", "1e-3", "120%", "1.5", "80 parsecs", "\u00b2", "9" * 500]
)
def test_what_is_no_size_is_wrong_usage(call, memory):
    code, _, err = call("plan", "gpt2", "--what", "fwd-bwd", f"--memory={memory}")
    assert code == 2 and "SK601" in err and "--memory" in err and "2GiB" in err


def test_a_policy_for_parts_is_refused(call):
    code, _, err = call("plan", "gpt2", *TINY, "--what", "fwd-bwd", "--policy", "RoundRobin(2)")
    assert code == 1 and "SK206" in err


def test_sweep(call):
    code, out, _ = call("sweep", "gpt2", *TINY, "--points", "4", "--json", "--costs", "fused:h100")
    points = json.loads(out)["points"]
    assert code == 0 and 1 < len(points) <= 4
    assert [p["saved"] for p in points] == sorted((p["saved"] for p in points), reverse=True)
    assert [p["seconds"] for p in points] == sorted(p["seconds"] for p in points)
    assert all(p["peak"] > p["saved"] for p in points)
    code, out, _ = call("sweep", "gpt2", *TINY, "--points", "4")
    assert code == 0 and "roofline of a100" in out and "100%" in out


@pytest.mark.parametrize("what", these_first(["step", "two parts"], ["one part"]))
def test_the_numbers_of_a_model_that_writes_do_not_depend_on_the_repeats(data, step, factory, what):
    spec = f"{factory}:writing"
    if what == "step":
        words = ["run", step(spec, "SaveAll()"), "--model", spec]
    else:
        words = ["run", spec, "--stages", "1" if what == "one part" else "2"]
    losses, checks = set(), []
    for repeat in (1, 3):
        code, found = data(*words, "--check", "--repeat", repeat)
        assert code == 0 and found["check"]["same"]
        losses |= {found["loss"], *found["check"]["loss"][: 2 if what == "step" else 0]}
        checks.append(found["check"])
    assert len(losses) == 1
    assert checks[0] == checks[1]


def test_profile_writes_nothing_that_the_next_run_reads(factory):
    from splitkit.testing import timing

    made = models.load(f"{factory}:writing")
    before = [made.args[0].clone(), made.model.mean.clone()]
    split = sk.split(sk.capture(made.model, *made.args), sk.policies.Stages(2))
    timing.measure_forward(made.model, made, 0)
    timing.measure_parts(split, made, 0)
    timing.measure_training(timing.TrainingRun.of(made), made, 0)
    after = [made.args[0], made.model.mean]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_sweep_of_the_peak_ends_at_the_least_peak(capsys):
    assert main(["sweep", "gpt2", *TINY, "--of", "peak", "--points", "3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["of"] == "peak" and [p["peak"] for p in data["points"]] == sorted(
        (p["peak"] for p in data["points"]), reverse=True
    )
    assert main(["plan", "gpt2", *TINY, "--what", "fwd-bwd", "--memory", "least", "--json"]) == 0
    least = json.loads(capsys.readouterr().out)
    assert least["peak"] == data["points"][-1]["peak"] and any(
        "transformer.h" in v["label"] for v in least["saved"]["values"]
    )
    assert main(["sweep", "gpt2", "--of", "peak", "--stages", "2"]) == 2


def test_prices_that_count_nodes_are_named_nodes(capsys):
    size = [*TINY, "--costs", "unit"]
    assert main(["sweep", "gpt2", *size, "--stages", "2", "--microbatches", "2", "--schedules", "gpipe"]) == 0
    assert re.search(r"prices +nodes", capsys.readouterr().out)
    assert main(["plan", "gpt2", *size, "--what", "fwd-bwd", "--memory", "least"]) == 0
    assert re.search(r"prices +nodes", capsys.readouterr().out)
