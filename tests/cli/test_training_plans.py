"""``splitkit plan --what fwd-bwd`` and ``splitkit sweep``."""

import json

import pytest

import splitkit as sk
from splitkit import cli, models

TINY = ["--size", "layers=2,width=32,heads=2", "--size", "vocab=64,seq=8"]


@pytest.fixture
def call(capsys):
    def run(*words):
        capsys.readouterr()
        code = cli.main([str(w) for w in words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_a_plan_of_forward_and_backward(call, tmp_path):
    path = tmp_path / "plan.json"
    code, out, _ = call("plan", "gpt2", *TINY, "--what", "fwd-bwd", "--policy", "MinCut()", "-o", path, "--json")
    data = json.loads(out)
    assert code == 0 and data["what"] == "fwd-bwd" and data["prices"] == "roofline of a100"
    assert data["peak"] == max(data["forward"]["peak"], data["backward"]["peak"])
    assert sum(v["nbytes"] for v in data["saved"]["values"]) == data["saved"]["nbytes"] > 0
    written = json.loads(path.read_text())
    assert written["what"] == "fwd-bwd" and {p["key"] for p in written["parts"]} == {"forward", "backward"}


def test_the_plan_is_read_again_in_python_and_refused_where_a_forward_is_cut(call, tmp_path):
    path = tmp_path / "plan.json"
    assert call("plan", "gpt2", *TINY, "--what", "fwd-bwd", "--policy", "MinCut()", "-o", path)[0] == 0
    code, _, err = call("run", path)
    assert code == 2 and "SK601" in err and "forward and backward" in err
    example = models.build("gpt2", layers=2, width=32, heads=2, vocab=64, seq=8)
    joint = sk.capture_joint(example.model, **example.kwargs)
    read = sk.Plan.load(path, joint.graph_module.graph)
    costs = sk.costs.roofline(joint.graph_module, device="a100")
    assert joint.split(read, costs).saved == joint.split(sk.policies.MinCut(), costs).saved


@pytest.mark.parametrize("memory", ["1.0", "64MiB"])
def test_a_budget_of_the_peak(call, memory):
    code, out, err = call("plan", "gpt2", *TINY, "--what", "fwd-bwd", "--memory", memory)
    assert code == 0, err
    assert "computed again" in out and "saved for backward" in out


def test_a_budget_that_cannot_be_kept(call):
    code, _, err = call("plan", "gpt2", *TINY, "--what", "fwd-bwd", "--memory", "1KiB")
    assert code == 3 and "SK303" in err and "the smallest is" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--what", "fwd-bwd"],
        ["--what", "fwd-bwd", "--stages", "2"],
        ["--what", "fwd-bwd", "--memory", "1GiB", "--policy", "SaveAll()"],
        ["--what", "fwd-bwd", "--policy", "SaveAll()", "--dynamic"],
        ["--memory", "1GiB", "--stages", "2"],
        [],
    ],
)
def test_options_that_do_not_go_together(call, words):
    code, _, err = call("plan", "gpt2", *TINY, *words)
    assert code == 2 and "SK601" in err


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
