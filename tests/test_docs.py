"""What docs/split_module.md shows runs as shown, and the tests that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import fx, nn

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "split_module.md").read_text()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.a(x)
        with torch.no_grad():
            y = x.sin()
        return self.b(x) + y


def test_the_python_blocks_run_one_after_another():
    model, x = Model(), torch.ones(1, 2)
    gm = fx.symbolic_trace(model)
    scope = {"torch": torch, "gm": gm, "model": model, "inputs": (x,), "callback": lambda node: int(node.name != "a")}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, scope)
    assert torch.equal(scope["split"](x), gm(x))
    assert scope["names"] == {"submod_0.a": "a", "submod_1.b": "b"}
    assert torch.equal(scope["program"].module()(x), model(x))


def test_the_files_that_it_names_are_there():
    names = re.findall(r"`((?:splitkit|docs|notebooks|tests|benchmarks)/[\w./-]*)`", PAGE)
    assert len(names) > 10
    for name in names:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("file", ["torch_wrong", "torch_raises", "torch_loses", "torch_lacks"])
def test_the_tables_name_each_test_of_a_file_once(file):
    (section,) = re.findall(rf"\(`tests/against_torch/{file}\.py`\).*?\n\n(\|.*?)\n\n", PAGE, re.S)
    named = re.findall(r"`(\w+)`", "".join(row.rsplit("|", 2)[1] for row in section.splitlines()))
    source = (ROOT / "tests" / "against_torch" / f"{file}.py").read_text()
    cases = re.search(r"^CASES = \[(.*?)\]", source, re.M | re.S)  # parameters of one test
    tests = [*re.findall(r"^def (test_\w+)", source, re.M), *re.findall(r"\w+", cases[1] if cases else "")]
    assert sorted(named) == sorted(set(tests) - {"test_the_result_is_another"})
