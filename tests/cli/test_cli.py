"""Every command, every exit code, the JSON of each, and what a plan file may not do."""

import json
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import splitkit
from splitkit import cli
from splitkit.cli.common import _example
from splitkit.cli.outcome import jsonable
from splitkit.cli.parser import make_parser
from splitkit.cli.syntax import policy_spec
from splitkit.errors import UsageError

ROOT = Path(splitkit.__file__).parent.parent
TINY = ["--size", "layers=2,width=32,heads=2", "--size", "vocab=64,seq=8"]

FACTORY = """
import itertools
import signal
import torch
from torch import nn

CALLS = itertools.count()
print("the factory's file runs")

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, 2)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))

class Fickle(Net):
    def forward(self, x):
        return super().forward(x) + float(next(CALLS))

def make(width=4, rows=3):
    return Net(width), torch.randn(rows, width)

def fickle():
    return Fickle(4), torch.randn(3, 4)

def leaves():
    raise SystemExit(0)

def stops():
    raise KeyboardInterrupt


def swallows():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass
    raise AttributeError("module 'numpy' has no attribute 'nonzero'")
"""


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(FACTORY)
    return str(path)


@pytest.fixture(scope="module")
def gpt2_plan(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("plans") / "p.json")
    assert cli.main(["plan", "gpt2", *TINY, "--stages", "2", "-o", path]) == 0
    return path


def python(*words, **more):
    env = os.environ | {"PYTHONPATH": str(ROOT)} | more.pop("env", {})
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, **more)


# ---- starting


def test_torch_is_not_imported_to_help_or_to_complain():
    code = """if True:
        import sys
        from splitkit.cli import main
        assert main(["--help"]) == main(["policies", "--help"]) == main(["--version"]) == main(["policies"]) == 0
        assert main(["plan"]) == main(["plan", "gpt2", "--policy", "Stagse(2)"]) == 2
        assert main(["plan", "gpt2", "--size", "layer=2", "--stages", "2"]) == 2
        assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
    """
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_module_runs():
    done = python("-m", "splitkit", "--version")
    assert (done.returncode, done.stdout) == (0, f"splitkit {splitkit.__version__}\n")


def test_real_process_off_utf8_and_with_a_closed_pipe(factory):
    words = ["-m", "splitkit", "plan", f"{factory}:make", "--stages", "2", "--how", "symbolic_trace"]
    done = python(*words, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and "2 stages" in done.stdout and "…" not in done.stdout
    read, write = os.pipe()
    os.close(read)
    closed = subprocess.run(
        [sys.executable, *words[:2], "policies"], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, text=True
    )
    os.close(write)
    assert (closed.returncode, closed.stderr) == (141, "")


@pytest.mark.parametrize(
    "command",
    [
        "capture",
        "plan",
        "split",
        "run",
        "profile",
        "sweep",
        "explain",
        "compare",
        "synthesize",
        "devices",
        "policies",
        "doctor",
    ],
)
def test_each_help_has_an_example(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert f"splitkit {command}" in out.split("example:")[1]


# ---- commands


def test_capture(call, data, factory):
    code, out, err = call("capture", f"{factory}:make", "--size", "width=8")
    assert (code, err) == (0, "")
    for word in ("placeholder 1", "parameters", "FLOPs", "it writes memory: ", "captured in"):
        assert word in out

    code, found = data("capture", f"{factory}:make", "--dynamic", "--eval", "--seed", "3")
    assert code == 0 and found["command"] == "capture"
    assert found["model"] == {
        "spec": f"{factory}:make", "sizes": {}, "how": "export", "dynamic": True, "seed": 3, "mode": "eval",
    }  # fmt: skip
    assert found["parameters"] == 4 * 4 + 4 + 4 * 2 + 2 + 8 and found["flops"] > 0
    assert found["dynamic"].keys() == {"x.shape[0]"} and found["once"] == {}
    code, found = data("capture", f"{factory}:make", "--how", "symbolic_trace")
    assert code == 0 and found["ops"] and sum(found["ops"].values()) < 6


def test_plan_and_check_round_trip(call, data, gpt2_plan):
    saved = json.loads(Path(gpt2_plan).read_text())
    assert saved["kind"] == "splitkit plan" and saved["splitkit"] == splitkit.__version__ and saved["torch"]
    assert saved["model"]["spec"] == "gpt2" and saved["model"]["sizes"]["vocab"] == 64
    code, out, err = call("run", gpt2_plan, "--check")
    assert (code, err) == (0, "")
    assert out.endswith("same: yes\n") and "2 of 2 bitwise equal" in out and "submod_1" in out
    code, found = data("run", gpt2_plan, "--check", "--repeat", "2", "--size", "batch=3")
    assert code == 0 and found["check"]["same"] is True and found["check"]["failures"] == []
    assert [p["module"] for p in found["parts"]] == ["submod_0", "submod_1"]
    assert found["forward"] >= sum(p["forward"] for p in found["parts"]) > 0 < found["backward"]
    assert found["outputs"][1] == {"name": "output['logits']", "value": "float32[3, 8, 64]"}
    for which in ("outputs", "gradients", "state"):
        assert found["check"][which]["count"] > 0


def test_plan_output(call, data, factory):
    code, out, _ = call("plan", f"{factory}:make", "--policy", "RoundRobin(n=2)", "--costs", "unit")
    assert code == 0 and "round robin over 2 labels" in out and "bytes in" in out and "captured in" in out
    code, found = data("plan", f"{factory}:make", "--stages", "2")
    assert code == 0 and found["note"].startswith("2 stages") and found["file"] is None
    assert [p["part"] for p in found["report"]["parts"]] == ["0", "1"]
    assert found["seconds"].keys() == {"load", "capture", "plan"}


def test_parts_in_a_cycle(call, data, tmp_path, factory):
    model, plan = f"{factory}:make", tmp_path / "p.json"
    cycle = ["--policy", "ByName({'first': 0, 'norm': 1, 'second': 0})"]
    code, found = data("plan", model, *cycle)
    assert code == 1 and failing(found)["code"] == "SK203"
    assert call("plan", model, *cycle, "--on-cycle", "refine", "-o", plan)[0] == 0
    code, found = data("run", plan, "--model", model, "--check")
    assert code == 0 and found["check"]["same"]
    assert [p["module"] for p in found["parts"]] == ["submod_0_0", "submod_1_1", "submod_0_2"]
    code, found = data("plan", model, *cycle, "--on-cycle", "merge")
    assert code == 0 and [p["part"] for p in found["report"]["parts"]] == ["0"]


def test_split(call, data, tmp_path, gpt2_plan, factory):
    folder = tmp_path / "parts"
    code, out, _ = call("split", gpt2_plan, "-o", folder)
    assert code == 0 and "self.submod_1(" in out
    stages = {"digests.json", "manifest.json", "example.safetensors", "model.safetensors.index.json"}
    stages |= {f"stage-{i}.{kind}" for i in range(2) for kind in ("json", "safetensors")}
    assert {f.name for f in folder.iterdir()} == {"parent.py", "submod_0.py", "submod_1.py", "split.json"} | stages
    for file in folder.glob("*.py"):
        compile(file.read_text(), file.name, "exec")
    told = json.loads((folder / "split.json").read_text())
    assert [p["module"] for p in told["parts"]] == ["submod_0", "submod_1"]
    assert {"name": "input_ids", "shape": [2, 8], "dtype": "int64"} in told["parts"][0]["inputs"]
    assert told["qualified_names"]["submod_1.lm_head.weight"] == "transformer.wte.weight" or told["shared"]

    assert call("split", gpt2_plan, "-o", folder)[0] == 1  # not empty
    (folder / "mine.txt").write_text("stays")
    code, found = data("split", f"{factory}:make", "--policy", "Stages(1)", "-o", folder, "--force")
    assert code == 0 and len(found["parts"]) == 1 and "submod_0" in found["code"]
    left = {"parent.py", "submod_0.py", "split.json", "mine.txt"}
    assert {f.name for f in folder.iterdir()} == left | {name for name in stages if "stage-1" not in name}
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []
    assert call("split", f"{factory}:make", "--stages", "2")[0] == 0


def test_policies(call, data):
    code, out, _ = call("policies")
    assert code == 0 and "Stages(n: int, schedule: str | None = None" in out and "(Python only)" in out
    code, found = data("policies")
    assert {p["name"] for p in found["policies"]} >= set(splitkit.policies.__all__)
    assert not next(p for p in found["policies"] if p["name"] == "ByDevice")["command_line"]


def test_doctor(call, data, monkeypatch):
    code, out, _ = call("doctor")
    assert code == 0 and "self-test" in out and "everything that splitkit needs is here" in out
    from splitkit.cli.commands import doctor

    monkeypatch.setitem(doctor.NEEDED, "torch", (99, 0))
    monkeypatch.setitem(doctor.NEEDED, "surely-not-installed", ())
    code, found = data("doctor")
    bad = {c["name"]: c["remedy"] for c in found["checks"] if not c["ok"]}
    assert code == 1 and not found["ok"] and bad["torch"] == "pip install 'torch>=99.0'" and len(bad) == 2


def test_doctor_and_errors_name_another_package_called_splitkit(data, call, factory, monkeypatch, tmp_path):
    folder = tmp_path / "site" / "splitkit-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: splitkit\nVersion: 0.1.0\nSummary: splits data sets\n"
    )
    broken = f"{factory}:broken"
    Path(factory).write_text("def broken():\n    import torch\n    return torch.no_such_name\n")
    assert "uninstall" not in call("plan", broken, "--stages", "2")[2]
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    code, found = data("doctor")
    clash = next(check for check in found["checks"] if check["name"] == "name clash")
    assert code == 1 and clash["found"] == "splitkit 0.1.0: splits data sets"
    assert clash["remedy"] == "pip uninstall splitkit splitkit-torch, then install splitkit-torch again"
    assert clash["remedy"] in call("plan", broken, "--stages", "2")[2]


@pytest.mark.parametrize(("module", "ok"), [("splitkit.__main__", True), ("splitkit.cli", False), ("splits", False)])
def test_doctor_names_the_file_of_the_command_and_what_it_starts(data, monkeypatch, tmp_path, module, ok):
    file = tmp_path / "splitkit"
    file.write_text(f"#!/usr/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    code, found = data("doctor")
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["command"]["found"] == f"{file} starts {module}" and (checks["command"]["ok"], code == 0) == (ok, ok)
    assert "python -m splitkit" in checks["command"]["remedy"]
    assert checks["splitkit"]["found"].endswith(f"in {Path(splitkit.__file__).parent}")


def test_devices(call, data):
    code, out, _ = call("devices")
    assert code == 0 and all(word in out for word in ("rtx-5090", "mi300x", "infinity-fabric", "31.51 GB/s"))
    code, found = data("devices")
    t4 = next(device for device in found["devices"] if device["name"] == "t4")
    assert code == 0 and (t4["memory"], t4["links"], t4["peak"]["float16"]) == (16_000_000_000, "pcie3", 65e12)


@pytest.mark.parametrize("columns", [40, 80])
def test_devices_are_named_on_a_narrow_terminal_without_torch(columns):
    """What a user sees first: a column of names, whatever else must be left out."""
    code = """if True:
        import os, sys
        from splitkit.cli import main
        os.environ["COLUMNS"] = sys.argv[1]
        sys.stdout.isatty = lambda: True
        main(["devices"])
        assert not {"torch", "numpy"} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code, str(columns)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    shown = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert all(name in shown for name in ("rtx-5090", "mi300x", "nvlink4", "pcie4", "59.60 GiB"))
    assert "(too narrow for: tf32, float16" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= columns


@pytest.mark.parametrize("command", [["fit"], ["plan", "--stages", "2"]], ids=["fit", "plan"])
def test_a_name_of_the_hub_is_told_from_an_example(call, command):
    code, _, said = call(command[0], "meta-llama/Llama-3-8B", *command[1:])
    assert code == 2 and "splitkit downloads no model" in said
    assert "hf download meta-llama/Llama-3-8B config.json --local-dir Llama-3-8B" in said


def test_help_of_plan_is_in_groups(call):
    code, out, _ = call("plan", "--help")
    groups = ("parts:", "devices (with", "training step (with", "prices:", "model:", "output:")
    places = [out.index(group) for group in groups]
    assert code == 0 and places == sorted(places) and out.startswith("usage: splitkit plan [options] MODEL\n")


@pytest.mark.parametrize("command", ["view", "sweep"])
def test_what_takes_a_plan_or_a_model_says_so(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0 and "PLAN.json|MODEL" in out


# ---- policies as text


@pytest.mark.parametrize(
    "text, args, kwargs",
    [
        ("Stages(4)", (4,), {}),
        (" Random(seed=2) ", (), {"seed": 2}),
        ("Random", (), {}),
        ("ByName({'transformer.h.[0-5]': 0, 'a': ('b', -1)})", ({"transformer.h.[0-5]": 0, "a": ("b", -1)},), {}),
    ],
)
def test_policy_expressions(text, args, kwargs):
    spec = policy_spec.parse(text)
    assert (spec.args, spec.kwargs) == (args, kwargs)
    assert spec.build()


@pytest.mark.parametrize(
    "text, says",
    [
        ("Stagse(2)", "Did you mean Stages"),
        ("Nothing(2)", "Choose one of AroundOps"),
        ("Stages(__import__('os').getpid())", "is not a literal"),
        ("Stages(open)", "is not a literal"),
        ("__import__('os').system('true')", "not the name of a policy"),
        ("(lambda: 1)()", "not the name of a policy"),
        ("Stages(**{'n': 2})", "** is not allowed"),
        ("Stages(*[2])", "is not a literal"),
        ("Stages(2", "cannot be read"),
        ("", "cannot be read"),
        ("ByName({[]: 1})", "is not a literal"),
        ("Stages(" + "(" * 500 + "1" + ")" * 500 + ")", "cannot be read"),
        ("ByDevice('cpu')", "takes a function"),
    ],
)
def test_bad_expressions(text, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        policy_spec.parse(text)


@pytest.mark.parametrize(
    "text", ["Stages(0)", "Stages('2')", "Stages()", "Stages(1, 2, 3, 4, 5, 6, 7, 8, 9)", "Stages(m=2)", "ByName(5)"]
)
def test_bad_parameters(data, factory, text):
    code, found = data("plan", f"{factory}:make", "--policy", text)
    assert code == 2 and found["error"]["code"] == "SK302" and found["error"]["remedy"]


def test_installed_policies(data, factory, monkeypatch):
    entries = [
        EntryPoint("Mine", "splitkit.policies.stages:Stages", policy_spec.GROUP),
        EntryPoint("Broken", "no_such_package:Policy", policy_spec.GROUP),
        EntryPoint("NoPolicy", "json:dumps", policy_spec.GROUP),
    ]
    monkeypatch.setattr(policy_spec, "entry_points", lambda group: entries)
    code, found = data("policies")
    assert code == 0 and {"Mine", "Broken"} <= {p["name"] for p in found["policies"]}
    assert data("plan", f"{factory}:make", "--policy", "Mine(2)")[0] == 0
    code, found = data("plan", f"{factory}:make", "--policy", "Broken(2)")
    assert code == 2 and found["error"]["code"] == "SK301" and "no_such_package" in found["error"]["reason"]
    assert data("plan", f"{factory}:make", "--policy", "NoPolicy(2)")[1]["error"]["code"] == "SK301"


# ---- errors and exit codes


def failing(found):
    error = found.pop("error")
    assert not found and error.keys() == {"code", "reason", "remedy", "nodes"}
    return error


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["plan", "gpt2"],
        ["plan", "gpt2", "--stages", "0"],
        ["plan", "gpt2", "--stages", "2", "--policy", "Stages(2)"],
        ["plan", "gpt2", "--stages", "2", "--size", "layers"],
        ["plan", "gpt2", "--stages", "2", "--size", "layers=-1"],
        ["plan", "gpt2", "--stages", "2", "--size", "layers=" + "9" * 5000],
        ["plan", "gpt2", "--stages", "2", "--size", "depth=3"],
        ["plan", "gpt2", "--stages", "2", "--size", "seed=3"],
        ["plan", "gpt2", "--stages", "2", "--dynamic", "--how", "symbolic_trace"],
        ["run", "gpt2"],
        ["run", "gpt2", "--stages", "2", "--model", "bert"],
        ["run", "plan.json", "--stages", "2"],
        ["plan", "gpt2", "--stages", "2", "--on-cycle", "ignore"],
        ["split", "gpt2", "--stages", "2", "--force"],
        ["capture", "gpt2", "--js"],
    ],
)
def test_usage_errors_exit_2(call, data, words):
    code, out, err = call(*words)
    assert (code, out) == (2, "") and err.startswith("error: SK601: ") and err.count("\n") == 2
    code, found = data(*words)
    assert code == 2 and failing(found)["code"] == "SK601"


def test_errors_exit_1(data, call, tmp_path, factory):
    assert failing(data("capture", "gpt5")[1])["code"] == "SK402"
    assert failing(data("capture", f"{tmp_path}/none.py:make")[1])["code"] == "SK403"
    assert failing(data("capture", f"{factory}:leaves")[1])["code"] == "SK403"
    code, found = data("plan", f"{factory}:make", "--stages", "2", "-o", tmp_path / "no" / "p.json")
    assert code == 1 and failing(found)["code"] == "SK504"
    code, found = data("plan", f"{factory}:make", "--policy", "ByName({'nowhere': 0})")
    assert code == 1 and failing(found)["code"] == "SK304"
    bad = tmp_path / "bad.py"
    bad.write_text("def make():\n    raise RuntimeError('out of ideas')\n")
    code, out, err = call("capture", f"{bad}:make")
    assert (code, out) == (1, "") and "error: RuntimeError: out of ideas" in err and "--debug" in err
    assert failing(data("capture", f"{bad}:make")[1])["code"] is None
    with pytest.raises(RuntimeError, match="out of ideas"):
        cli.main(["capture", f"{bad}:make", "--debug"])


def test_no_plan_exits_3(data, factory):
    code, found = data("plan", f"{factory}:make", "--stages", "999")
    assert code == 3 and failing(found)["code"] == "SK303"


def test_failing_check_exits_4(call, data, factory):
    code, out, _ = call("run", f"{factory}:fickle", "--stages", "2", "--check")
    assert code == 4 and "same: no" in out and "differs: output" in out
    code, found = data("run", f"{factory}:fickle", "--stages", "2", "--check")
    assert code == 4 and found["check"]["same"] is False and found["check"]["failures"][0]["largest"] >= 1


def test_interrupted_exits_130(call, factory):
    """Also where the import of a module has swallowed the interrupt, and fails later."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    try:
        for name in ("stops", "swallows"):
            code, _, err = call("capture", f"{factory}:{name}")
            assert code == 130 and err == "interrupted\n"
    finally:
        signal.signal(signal.SIGINT, before)


# ---- plan files


def edited(path, target, **changes):
    target.write_text(json.dumps(json.loads(Path(path).read_text()) | changes))
    return target


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"kind": "something"}, "SK501"),
        ({"schema": 99}, "SK503"),
        ({"graph": "0" * 32, "nodes": []}, "SK502"),
        ({"places": 5}, "SK501"),
        ({"parts": [{"key": 0}]}, "SK501"),
        ({"note": "\x1b[2J"}, "SK501"),
        ({"model": {"spec": "gpt2", "sizes": {"layers": "2"}}}, "SK501"),
        ({"model": {"spec": "gpt2", "sizes": {"layers": True}}}, "SK501"),
        ({"model": {"spec": "gpt2", "sizes": [1]}}, "SK501"),
        ({"model": {"spec": "gpt2", "how": "eval"}}, "SK501"),
        ({"model": {"spec": "gpt2", "how": []}}, "SK501"),
        ({"model": {"spec": ["gpt2"]}}, "SK501"),
        ({"model": {"spec": "gpt2", "seed": -1}}, "SK501"),
        ({"model": "gpt2"}, "SK501"),
    ],
)
def test_damaged_plans(data, gpt2_plan, tmp_path, changes, code):
    exit_code, found = data("run", edited(gpt2_plan, tmp_path / "p.json", **changes))
    assert exit_code == 1 and failing(found)["code"] == code


def test_files_that_are_no_plans(data, tmp_path):
    assert failing(data("run", tmp_path / "none.json")[1])["code"] == "SK504"
    for text in ("{", "[]", "{}", "\x00"):
        (tmp_path / "p.json").write_text(text)
        assert failing(data("split", tmp_path / "p.json")[1])["code"] == "SK501"


def test_a_plan_for_another_graph(data, gpt2_plan):
    code, found = data("run", gpt2_plan, "--size", "layers=1")
    error = failing(found)
    assert code == 1 and error["code"] == "SK502" and error["nodes"]


def test_a_plan_runs_no_code_that_only_it_names(call, data, tmp_path, factory):
    spec, plan = f"{factory}:make", tmp_path / "p.json"
    assert call("plan", spec, "--stages", "2", "-o", plan)[0] == 0
    code, out, err = call("run", plan)
    assert (code, out) == (2, "") and "the factory's file runs" not in err
    assert f"this plan was made for '{spec}'" in err and f"Pass --model {spec} to run that code." in err
    code, found = data("run", plan, "--model", spec, "--check")  # the file prints: not to standard output
    assert code == 0 and found["check"]["same"]
    for name in ("os:getcwd", "gpt5"):
        other = edited(plan, tmp_path / "q.json", model={"spec": name, "sizes": {}})
        assert failing(data("run", other)[1])["code"] == "SK601"
    unrecorded = edited(plan, tmp_path / "r.json", model=None)
    assert data("run", unrecorded)[0] == 2
    assert data("run", unrecorded, "--model", spec)[0] == 0


def test_a_factory_is_found_next_to_the_plan(call, data, tmp_path, monkeypatch):
    (tmp_path / "plans").mkdir()
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    assert call("plan", "net.py:make", "--stages", "2", "-o", "plans/p.json")[0] == 0
    monkeypatch.chdir(tmp_path / "plans")
    code, _, err = call("run", "p.json")
    assert code == 2 and "Pass --model ../net.py:make to run that code." in err
    code, found = data("run", "p.json", "--model", "net.py:make", "--check")
    assert code == 0 and found["check"]["same"]
    (tmp_path / "net.py").rename(tmp_path / "plans" / "net.py")  # both were moved
    monkeypatch.chdir(tmp_path)
    assert "Pass --model plans/net.py:make" in call("run", "plans/p.json")[2]
    assert data("run", "plans/p.json", "--model", "net.py:make")[0] == 0
    (tmp_path / "net.py").write_text(NET.replace("def make", "def other"))  # what is in the current folder comes first
    assert failing(data("run", "plans/p.json", "--model", "net.py:make")[1])["code"] == "SK403"


NET = """
def make(width=4):
    import torch
    net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    return net, (torch.ones(2, width),)
"""


def test_a_plan_at_other_sizes_says_so(call, data, tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    assert call("plan", "net.py:make", "--stages", "2", "-o", "p.json")[0] == 0
    code, _, err = call("run", "p.json", "--model", "net.py:make")
    assert code == 0 and "SK509" not in err
    code, _, err = call("run", "p.json", "--model", "net.py:make", "--size", "width=8", "--check")
    assert code == 0 and "warning: SK509: the plan was made for other sizes: input was float32[2, 4]" in err
    found = data("run", "p.json", "--model", "net.py:make", "--size", "width=8")[1]
    assert "(for other sizes: input was float32[2, 4] and is float32[2, 8]" in found["note"]


def test_only_finite_numbers_in_json():
    assert jsonable({"a": [float("inf"), float("nan"), 1.5], 2: (True, None)}) == {
        "a": [None, None, 1.5],
        "2": [True, None],
    }


def test_parser_knows_the_examples():
    args = make_parser().parse_args(["run", "p.json", "--size", "a=1,b=2", "--size", "c=3"])
    assert args.size == [{"a": 1, "b": 2}, {"c": 3}] and args.how is None and args.eval is None


def test_a_built_in_model_has_the_weights_of_its_seed():
    sizes = {"layers": 1, "width": 8, "heads": 2, "vocab": 16, "seq": 4}
    made = [_example(Namespace(spec="gpt2", seed=seed, sizes=sizes)).model.state_dict() for seed in (0, 3, 3)]
    same = [all(torch.equal(made[i][name], made[j][name]) for name in made[0]) for i, j in ((0, 1), (1, 2))]
    assert same == [False, True]
