"""When capture fails, what was reached is kept and drawn, with the line and node where it stopped."""

from __future__ import annotations

import pickle

import pytest
import torch
from browser import NEEDS_CHROMIUM
from steeredpages import assert_quiet, side
from torch import nn

import splitkit as sk
from splitkit.cli import main
from splitkit.errors import CaptureError
from splitkit.graph.dataflow import module_path
from splitkit.view.renderers import capture_failure_html

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        if x.sum() > 0:
            x = x * 2
        return self.head(x)

def make():
    return Net(), (torch.randn(2, 4),)
"""
AT = "if x.sum() > 0:"


@pytest.fixture
def net(tmp_path, monkeypatch):
    (tmp_path / "branching.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "branching", raising=False)
    return __import__("branching").Net()


def refused(model, *inputs, **options):
    with pytest.raises(CaptureError) as found:
        sk.capture(model, *inputs, **options)
    return found.value


def test_the_graph_up_to_the_failure_is_kept(net):
    error = refused(net, torch.randn(2, 4))
    assert error.code == "SK401" and error.stopped_at.endswith(AT) and "branching.py:" in error.stopped_at
    paths = [module_path(node) for node in error.reached.graph.nodes if node.op == "call_function"]
    assert paths[0] == "embed" and set(paths) == {"embed", "", *(f"layers.{i}{m}" for i in range(3) for m in MODULES)}
    shapes = [tuple(n.meta["val"].shape) for n in error.reached.graph.nodes if n.op == "call_function"]
    assert shapes[:2] == [(2, 8), (2, 32)] and shapes[-1] == ()  # x.sum() > 0, but not its value as a bool
    again = pickle.loads(pickle.dumps(error))
    assert again.reached is None and str(again) == str(error)


MODULES = ("", ".up", ".down")


def test_symbolic_trace_tells_it_too(net):
    error = refused(net, torch.randn(2, 4), how="symbolic_trace")
    assert [n.name for n in error.reached.graph.nodes][-3:] == ["sum_1", "gt", "output"]
    text = capture_failure_html(error, "<b>")
    assert (
        "reached, in order" in text
        and "layers_2_down" in text
        and "SK401" in text
        and "<b>" not in text
        and "<script" not in text
    )


def test_what_fails_before_any_node_has_nothing_to_show():
    class Raises(nn.Module):
        def forward(self, x):
            raise KeyError("x")

    assert refused(Raises(), torch.randn(2)).reached is None and refused(3).reached is None


def test_a_capture_that_succeeds_holds_nothing():
    class Caught(nn.Module):
        def forward(self, x):
            return x + 1

    assert CaptureError("SK401", "x").reached is None
    assert len(sk.capture(Caught(), torch.randn(2)).graph.nodes) == 3


@NEEDS_CHROMIUM
def test_the_command_writes_the_page_and_fails(net, browser, tmp_path, capsys):
    spec, page = f"{tmp_path / 'branching.py'}:make", tmp_path / "page.html"
    assert main(["view", spec, "--stages", "2", "-o", str(page)]) == 1
    assert f"{page} shows what was reached" in capsys.readouterr().err
    browser.open(page)
    assert_quiet(browser)
    rows = browser.value("splitkit.data.rows.map(row => row.name)")
    assert rows == ["embed", "layers.0", "layers.1", "layers.2", "(top level)"]
    assert AT in side(browser) and "torch.cond" in side(browser)
    text = browser.value("svgOf(splitkit)")
    assert "✕ capture stopped after" in text and "branching.py:" in text
    assert_quiet(browser)
