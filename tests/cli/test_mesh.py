"""Plans of sharded models on the command line: ``--mesh tp=2``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import command

import splitkit as sk
from splitkit.cli import mesh
from splitkit.cli.mesh import Dimension, read_mesh
from splitkit.errors import CostError, UsageError
from splitkit.hardware.link_specs import PRESETS

NET = f"{Path(__file__).parent / 'shardednet.py'}"
SMALL = ["--size", "layers=2,width=16,heads=4,vocab=32,seq=8"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan of a net for two stages of two ranks, and what the command said."""
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    words = ["plan", f"{NET}:net", "--stages", "2", "--mesh", "tp=2", "--costs", "roofline:h100", "-o", str(file)]
    done = command(*words, "--json")
    assert done.returncode == 0, done.stderr
    return str(file), json.loads(done.stdout)


def test_a_mesh_in_words():
    assert read_mesh("tp=2") == (Dimension("tp", 2),)
    assert read_mesh("ep=2:ethernet400,tp=8") == (Dimension("ep", 2, "ethernet400"), Dimension("tp", 8))
    assert mesh.ranks_of_mesh("ep=2:ethernet400,tp=8") == 16 and mesh.ranks_of_mesh(None) == 1
    h100 = sk.costs.devices()["h100"]
    links = mesh.links_of_mesh("ep=2:ethernet400,tp=8", h100)
    assert links == {"ep": PRESETS["ethernet400"], "tp": PRESETS["nvlink4"]} and mesh.links_of_mesh(None, h100) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tp", "is not NAME=N"),
        ("tp=1", "is not NAME=N"),
        ("2=tp", "is not NAME=N"),
        ("tp=2,tp=2", "tp is named twice"),
        ("pp=2", "pp is the dimension of stages"),
        ("dp=2", "dp is the dimension of replicas"),
    ],
)
def test_what_is_no_mesh(text, reason):
    with pytest.raises(UsageError, match=f"SK601.*{reason}"):
        read_mesh(text)


def test_a_mesh_of_no_known_link():
    with pytest.raises(CostError, match="SK322: no link is called 'wire'"):
        read_mesh("tp=2:wire")


def test_a_plan_says_for_how_many_ranks_it_is(planned):
    file, data = planned
    assert data["next"] == f"splitkit train {file} --model {NET}:net --nproc 4 --schedule 1f1b --microbatches 4 --check"
    assert data["model"]["mesh"] == "tp=2" and [row["stage"] for row in data["stages"]] == [0, 1]
    held = json.loads(Path(file).read_text())
    assert held["model"]["mesh"] == "tp=2" and held["prices"]["mesh"]["tp"]["bandwidth"] == 450e9


def test_other_commands_read_the_plan(planned, call, tmp_path):
    file, _ = planned
    page = tmp_path / "page.html"
    code, out, _ = call("view", file, "--model", f"{NET}:net", "-o", page)
    assert code == 0 and "wrote" in out and "all_reduce.default over tp=2" in page.read_text()
    assert call("explain", file, "--model", f"{NET}:net")[0] == 0


@pytest.mark.parametrize("name", ["run", "split"])
def test_one_process_does_not_run_it(planned, call, name):
    code, _, said = call(name, planned[0], "--model", f"{NET}:net")
    assert code == 2 and "SK601" in said and "ranks that share each stage (tp=2)" in said and "--nproc N, 2 a" in said


@pytest.mark.parametrize(("ranks", "code"), [("3", "SK601"), ("2", "SK330")])
def test_a_number_of_ranks_that_does_not_go(planned, call, ranks, code):
    found, _, said = call("train", planned[0], "--model", f"{NET}:net", "--nproc", ranks, "--microbatches", "4")
    assert found and code in said


def test_a_factory_that_shards_nothing(call):
    code, _, said = call("plan", f"{NET}:plain", "--stages", "2", "--mesh", "tp=2")
    assert code == 1 and "SK401: Net cannot be sharded" in said and "def make(mesh), FILE.py:make" in said


def test_a_factory_that_needs_a_mesh(call):
    code, _, said = call("plan", f"{NET}:needy", "--stages", "2")
    assert code == 1 and "SK403" in said and "--mesh tp=2" in said
    assert call("plan", f"{NET}:needy", "--stages", "2", "--mesh", "tp=2")[0] == 0


def test_a_damaged_mesh(planned, call, tmp_path):
    data = json.loads(Path(planned[0]).read_text())
    file = tmp_path / "plan.json"
    for own in ({"model": data["model"] | {"mesh": "tp=x"}}, {"prices": data["prices"] | {"mesh": {"tp": 3}}}):
        file.write_text(json.dumps(data | own))
        code, _, said = call("view", file, "--model", f"{NET}:net", "-o", tmp_path / "page.html")
        assert code and "SK501" in said


@pytest.mark.campaign
@pytest.mark.parametrize("model", ["gpt2", "llama", "mixtral"])
def test_it_trains_like_the_whole_model(tmp_path, model):
    """On four ranks; with two pipelines side by side, and with FSDP over them, on eight."""
    file = str(tmp_path / "plan.json")
    assert command("plan", model, "--stages", "2", "--mesh", "tp=2", *SMALL, "-o", file).returncode == 0
    more = {"gpt2": [[], ["--dp", "2"], ["--dp", "2", "--fsdp"]]}.get(model, [[]])
    for own in more:
        words = ["--nproc", "8" if own else "4", "--microbatches", "4", "--steps", "2", "--check", "--json", *own]
        done = command("train", file, *words)
        data = json.loads(done.stdout)
        assert done.returncode == 0 and data["check"]["same"] and data["check"]["gradient"] < 5e-6, data
        assert [row["rank"] for row in data["ranks"]] == list(range(8 if own else 4))


@pytest.mark.campaign
def test_its_ranks_are_profiled(planned):
    """Measured bytes are no fewer: threads of gloo let go of what collectives have read, which is not seen."""
    words = ["--model", f"{NET}:net", "--ranks", "4", "--microbatches", "4", "--schedules", "gpipe,1f1b", "--json"]
    data = json.loads(command("profile", planned[0], *words).stdout)
    assert [found["schedule"] for found in data["schedules"]] == ["GPipe", "1F1B"]
    for found in data["schedules"]:
        assert [row["rank"] for row in found["ranks"]] == [0, 1]
        assert all(row["peak"]["predicted"] <= row["peak"]["measured"] * 1.05 for row in found["ranks"])


@pytest.mark.campaign
def test_its_checkpoint_goes_on_with_other_ranks(tmp_path):
    """From four ranks to two that have whole stages, and back."""
    plans = {"tp": ["--mesh", "tp=2"], "whole": ["--what", "fwd-bwd"]}
    for name, own in plans.items():
        words = ["plan", "gpt2", "--stages", "2", *own, *SMALL, "-o", str(tmp_path / f"{name}.json")]
        assert command(*words).returncode == 0
    losses = []
    for steps, (name, ranks) in enumerate([("tp", "4"), ("whole", "2"), ("tp", "4")], 1):
        own = ["--resume", "--check"] if steps > 1 else []
        words = ["--nproc", ranks, "--microbatches", "4", "--steps", str(steps), "--checkpoint", str(tmp_path / "kept")]
        done = command("train", str(tmp_path / f"{name}.json"), *words, *own, "--json")
        data = json.loads(done.stdout)
        assert done.returncode == 0 and data["first_step"] == steps - 1 and (not own or data["check"]["same"])
        losses += data["losses"]
    words = ["--nproc", "2", "--microbatches", "4", "--steps", "3", "--json"]
    through = json.loads(command("train", str(tmp_path / "whole.json"), *words).stdout)["losses"]
    assert losses == pytest.approx(through, rel=1e-5)
