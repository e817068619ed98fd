"""``splitkit profile``, and the prices that ``--costs`` names."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from splitkit.cli import main

TINY = ["--size", "layers=1,width=32,heads=2", "--size", "vocab=64,seq=8"]
NET = [f"{Path(__file__).parent / 'tinynet.py'}:net", "--size", "layers=1,width=8,vocab=32"]


def test_predicted_is_measured(call):
    code, out, _ = call("profile", "gpt2", *TINY, "--stages", "2", "--json")
    data = json.loads(out)
    assert code == 0 and data["command"] == "profile"
    assert [row["what"] for row in data["rows"]] == [
        "forward", "  submod_0 alone", "  submod_1 alone", "forward + backward",
    ]  # fmt: skip
    for row in data["rows"]:
        assert row["predicted"] == row["measured"] > 0 and row["error"] == 0
        assert row["allocator"] >= row["measured"]
    assert len(data["forward"]["live_at_peak"]) == 10 and set(data["forward"]["parts"]) == {"0", "1"}
    assert data["rows"][-1]["saved"] > 0 and data["training"]["peaks"].keys() == {"forward", "backward"}
    names = [b["name"] for b in data["training"]["live_at_peak"]]
    assert "transformer.wpe.weight" in names, "parameters have their names, not those of the graph's inputs"


def test_as_a_table(call):
    code, out, _ = call("profile", "gpt2", *TINY)
    assert code == 0 and out.count("exact") == 2
    assert "forward + backward" in out and "alive at the peak of" in out and "transformer.wte.weight" in out


def test_without_a_run(call):
    code, out, _ = call("profile", "gpt2", *TINY, "--predict", "--forward-only")
    assert code == 0 and "measured" not in out and "forward + backward" not in out


def test_a_model_without_gradients_says_so(call, tmp_path):
    path = tmp_path / "m.py"
    path.write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x.round().long()\n"
        "def make():\n    return Net(), torch.randn(3)\n"
    )
    code, out, _ = call("profile", f"{path}:make")
    assert code == 0 and "no forward + backward: SK401" in out


@pytest.mark.campaign  # test_predicted_is_measured has the parts, test_placement profiles a plan file
def test_profile_of_a_plan(call, tmp_path):
    path = tmp_path / "p.json"
    assert call("plan", "gpt2", *TINY, "--stages", "2", "-o", path)[0] == 0
    code, out, _ = call("profile", path, "--forward-only")
    assert code == 0 and "submod_1 alone" in out


@pytest.mark.parametrize(
    "costs, says",
    [
        ("roofline:h100", "roofline of h100"), ("roofline", "roofline of cpu"), ("measured", "measured on cpu"),
        ("flops", ""), ("unit", ""),
    ],
)  # fmt: skip
def test_costs(call, costs, says, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = call("plan", *NET, "--stages", "2", "--costs", costs)
    assert code == 0, err
    assert says in out


def test_costs_of_training_say_so(call):
    code, out, _ = call("plan", *NET, "--stages", "2", "--costs", "roofline:l4", "--training")
    assert code == 0 and "roofline of l4, backward op by op" in out


def test_costs_of_training_are_measured(call, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, _ = call("plan", *NET, "--stages", "2", "--costs", "measured", "--training")
    assert code == 0 and "measured on cpu, forward and backward" in " ".join(out.split())  # wherever the line ends


def test_costs_of_a_device_of_ones_own(call, tmp_path):
    path = tmp_path / "devices.toml"
    path.write_text(
        '[mine]\nbandwidth = 1e12\nmemory = 1_000_000_000\nsource = "a guess"\n[mine.peak]\nfloat32 = 1e13\n'
    )
    code, out, err = call("plan", *NET, "--stages", "2", "--costs", f"roofline:{path}:mine")
    assert code == 0 and "roofline of mine" in out, err
    code, _, err = call("plan", *NET, "--stages", "2", "--costs", f"roofline:{path}:yours")
    assert code == 2 and "describes no device 'yours'" in err


@pytest.mark.parametrize("costs", ["guess", "flops:h100", "roofline:nothing"])
def test_costs_that_are_not_known(call, costs):
    code, _, err = call("plan", *NET, "--stages", "2", "--costs", costs)
    assert code in (1, 2) and "SK" in err


class _Nothing(nn.Module):
    def forward(self, x, *, allocator=None):
        return x if allocator is None else x + allocator


def no_bytes():
    return _Nothing(), (torch.zeros(0),)


def an_input_called_allocator():
    return _Nothing(), (torch.zeros(3),), {"allocator": torch.zeros(3)}


@pytest.mark.parametrize("factory", [no_bytes, an_input_called_allocator])
def test_a_peak_of_0_and_an_input_called_like_an_option_are_profiled(factory, capsys):
    assert main(["profile", f"{__file__}:{factory.__name__}", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["predicted"] == row["measured"]
    assert row["error"] == 0


class _Views(nn.Module):
    """Of what the second part takes, two values are views of one memory, and one repeats a number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        y = self.first(x)
        return self.second(y.view(-1).view(8, 64)) + self.second(y) + self.second(y[:1, :1].expand(8, 64))


def views_between_parts():
    return _Views(), (torch.randn(8, 16),)


def test_parts_are_measured_on_views_that_share_memory_as_in_the_whole(capsys, tmp_path):
    policy = "ByName({'first': 0, 'second': 1, '*': 0})"
    net, plan = f"{__file__}:views_between_parts", str(tmp_path / "plan.json")
    assert main(["plan", net, "--policy", policy, "--on-cycle", "refine", "-o", plan]) == 0
    capsys.readouterr()
    assert main(["profile", plan, "--model", net, "--json", "--forward-only"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) > 2
    assert [row["error"] for row in rows] == [0] * len(rows)
