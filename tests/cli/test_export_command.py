"""``splitkit export`` and ``splitkit plan --from``: what the library makes, as files and as text."""

from __future__ import annotations

import json

import pytest

import splitkit as sk
from splitkit.exports.format_list import WRITES
from splitkit.pipeline.schedules import pipeline_order
from splitkit.pipeline.synthesize import load_order

FACTORY = """
import torch
from torch import nn

class Decoder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        wide = [8 * (i + 1) for i in range(layers)]
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8)) for n in wide])
        self.head = nn.Linear(8, 12)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def make(layers=4):
    return Decoder(layers), (torch.arange(10).reshape(2, 5),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model and its plan."""
    from splitkit import cli

    found = tmp_path_factory.mktemp("exports")
    (found / "net.py").write_text(FACTORY)
    spec = f"{found / 'net.py'}:make"
    assert cli.main(["plan", spec, "--stages", "3", "--costs", "roofline:h100", "-o", str(found / "plan.json")]) == 0
    return found


def graph_of(spec):
    from splitkit.testing import models

    example = models.load(spec)
    return sk.capture(example.model, *example.args).graph


@pytest.fixture
def own(folder):
    """The words that name the plan and its model."""
    return [folder / "plan.json", "--model", f"{folder / 'net.py'}:make"]


def test_the_formats_are_listed(call, data):
    code, out, _ = call("export", "--to", "list")
    assert code == 0 and all(name in out for name in WRITES)
    assert [row["name"] for row in data("export", "--to", "list")[1]["formats"]] == list(WRITES)


def test_an_export_is_printed_or_written_with_its_price(call, data, own, folder):
    code, out, _ = call("export", *own, "--to", "galvatron", "--recompute")
    assert code == 0 and '"checkpoint": "1,1,1,1"' in out and "slowest stage" in out
    file, order = folder / "stages.py", folder / "order.csv"
    code, found = data(
        "export", *own, "--to", "torch", "-o", file, "--schedule", "1f1b", "--microbatches", "4", "--order", order
    )
    assert code == 0 and file.read_text() == found["text"] and "SplitPoint" in found["text"]
    assert found["rounding"]["before"]["step"] > 0 and len(load_order(order).ranks) == 3


@pytest.mark.campaign
def test_the_schedule_is_the_plans_own(call, own, folder):
    file, order, model = folder / "gpipe.json", folder / "gpipe.csv", own[1:]
    words = ["--stages", "2", "--schedule", "gpipe", "--costs", "roofline:h100", "-o", file]
    assert call("plan", own[2], *words)[0] == 0
    code, _, error = call("export", file, *model, "--to", "nnscaler")
    assert code == 1 and "policy runs 1F1B, but not GPipe" in error
    assert call("export", file, *model, "--to", "torch", "--microbatches", "3", "--order", order)[0] == 0
    assert load_order(order).ranks == pipeline_order("gpipe", 2, 3).ranks


def test_stages_of_another_tool_are_compared_with_a_plan(call, data, folder):
    (folder / "layout.txt").write_text("E|tt|ttL")
    spec, file = f"{folder / 'net.py'}:make", folder / "theirs.json"
    words = ["plan", spec, "--from", folder / "layout.txt", "--costs", "roofline:h100"]
    code, found = data(*words, "-o", file, "--schedule", "1f1b", "--microbatches", "4")
    assert code == 0 and found["theirs"]["load"] == pytest.approx(found["ratio"] * found["ours"]["load"])
    assert found["theirs"]["step"] > 0 and found["ratio"] > 0.98  # the policy gives up 1 % for even stages
    assert sk.Plan.from_dict(graph_of(spec), json.loads(file.read_text())).note.startswith("as Megatron-LM runs it")


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["export", "PLAN", "--to", "megatorn"], 1, "SK521"),
        (["export", "--to", "vllm"], 2, "nothing to export"),
        (["export", "PLAN"], 2, "--to"),
        (["export", "PLAN", "--to", "vllm", "--schedule", "1f1b"], 1, "SK523"),
        (["export", "PLAN", "--to", "torch", "--order", "x.csv"], 2, "--order needs --schedule"),
        (["export", "PLAN", "--to", "megatron", "--schedule", "1f1b", "--order", "x.csv"], 2, "reads no schedule CSV"),
        (["export", "PLAN", "--to", "torch", "--memory", "80%"], 2, "--memory is a share"),
        (["plan", "MODEL", "--from", "nowhere.txt"], 1, "cannot read 'nowhere.txt'"),
        (["plan", "MODEL", "--form", "vllm"], 2, "--form needs --from"),
        (["plan", "MODEL", "--from", "net.py", "--what", "fwd-bwd"], 2, "--from cannot be combined with --what"),
        (["plan", "MODEL", "--from", "net.py", "--devices", "2xh100"], 2, "--devices cannot be combined with --from"),
        (["plan", "MODEL", "--from", "FACTORY"], 1, "SK521"),
    ],
)
def test_mistakes_are_told(call, own, folder, words, code, reason):
    known = {"PLAN": own, "MODEL": [own[2]], "FACTORY": [folder / "net.py"]}
    ended, _, error = call(*(word for given in words for word in known.get(given, [given])))
    assert ended == code and reason in error
