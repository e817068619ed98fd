"""Files of ``torch.export.save`` in the place of a factory."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, *, scale):
        for layer in self.layers:
            x = layer(x).relu() * scale
        return x.sum()


INPUTS = torch.randn(4, 8), {"scale": torch.ones(8)}


@pytest.fixture(scope="module")
def program():
    return torch.export.export(Net(), INPUTS[:1], INPUTS[1])


@pytest.fixture
def file(program, tmp_path):
    torch.export.save(program, tmp_path / "net.pt2")
    return str(tmp_path / "net.pt2")


def test_it_is_planned_shown_and_run(file, tmp_path, call, data):
    plan, page = tmp_path / "plan.json", tmp_path / "view.html"
    code, _ = data("plan", file, "--stages", "2", "-o", plan)
    assert code == 0 and plan.is_file()
    code, found = data("run", plan, "--model", file, "--check")
    assert code == 0 and found["check"]["same"]
    code, _, _ = call("view", file, "--stages", "2", "-o", page)
    assert code == 0 and page.is_file()
    code, found = data("fit", file, "--devices", "1x1MiB")
    assert code == 0 and found["fits"] and "--eval" not in found["next"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "FILE", "--stages", "2", "--eval"], ["SK601", "mode in which it was exported", "Leave out --eval"]),
        (["plan", "FILE", "--stages", "2", "--size", "batch=2"], ["SK403", "no size 'batch'", "Leave the sizes out"]),
        (["plan", "none.pt2", "--stages", "2"], ["SK403", "there is no file none.pt2"]),
        (["plan", "BAD", "--stages", "2"], ["SK403", "cannot be loaded", "torch.export.save"]),
    ],
)
def test_what_it_cannot_do_is_refused(file, tmp_path, call, words, says):
    bad = tmp_path / "bad.pt2"
    bad.write_text("no archive")
    code, _, err = call(*({"FILE": file, "BAD": str(bad)}.get(word, word) for word in words))
    assert code and all(text in err for text in says), err
