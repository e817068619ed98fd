"""Weights that are written while autocast keeps a cast of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import splitkit as sk
from splitkit import _torch
from splitkit.errors import PlanError
from splitkit.graph.dataflow import analyze
from splitkit.graph.kept_casts import kept_casts
from splitkit.testing import assert_same

ENTER = (_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))


class Graph:
    """A graph over one linear layer: each word appends a node."""

    def __init__(self, words: str) -> None:
        self.root, self.graph = nn.Module(), fx.Graph()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.root.layer = nn.Linear(4, 4)
        self.root.alias = self.root.layer.weight.detach()
        self.root.register_buffer("buffer", torch.eye(4))
        self.x, self.open, self.values = self.graph.placeholder("x"), [], []
        for word in words.split():
            self.values.append(getattr(self, word)())
        self.graph.output([v for v, w in zip(self.values, words.split(), strict=True) if w not in _NO_VALUES])
        self.gm = fx.GraphModule(self.root, self.graph)

    def enter(self, *given):
        self.open.append(self.graph.call_function(ENTER[0], given or ENTER[1]))

    def off(self):
        self.enter("cpu", torch.bfloat16, False, None)

    def uncached(self):
        self.enter("cpu", torch.bfloat16, True, False)

    def exit(self):
        self.graph.call_function(_torch.EXIT_AUTOCAST, (self.open.pop(),))

    def call(self):
        return self.graph.call_module("layer", (self.x,))

    def read(self, name="layer.weight"):
        return self.graph.call_function(F.linear, (self.x, self.graph.get_attr(name)))

    def read_buffer(self):
        return self.read("buffer")

    def read_view(self):
        turned = self.graph.call_method("t", (self.graph.get_attr("layer.weight"),))
        return self.graph.call_function(torch.mm, (self.x, turned))

    def double(self):
        return self.graph.call_function(torch.mul, (self.graph.get_attr("layer.weight"), 2))

    def write(self):
        self.graph.call_method("mul_", (self.graph.get_attr("alias"), 3))

    def write_buffer(self):
        self.graph.call_method("mul_", (self.graph.get_attr("buffer"), 3))

    def write_and_read(self):
        self.graph.call_function(_torch.SET_GRAD, (False,))
        written = self.graph.call_method("mul_", (self.graph.get_attr("layer.weight"), 3))
        self.graph.call_function(_torch.SET_GRAD, (True,))
        return self.graph.call_function(F.linear, (self.x, written))


_NO_VALUES = ("enter", "off", "uncached", "exit", "write", "write_buffer")


def found(words):
    flow = analyze(Graph(words).gm)
    return [([n.name for n in c.reads], c.write.name) for c in kept_casts(flow.effects, flow.graph, flow.root)]


def test_two_uses_around_a_write_are_found():
    assert found("enter call write call exit") == [(["layer", "layer_1"], "mul_")]
    assert found("enter read write call exit") == [(["linear", "layer"], "mul_")]
    assert found("enter call write_and_read exit") == [(["layer", "linear"], "mul_")]
    assert found("enter enter call exit write call exit") == [(["layer", "layer_1"], "mul_")]


@pytest.mark.parametrize(
    "words",
    [
        "call write call",
        "enter write call call exit",
        "enter call call exit write",
        "enter call exit write enter call exit",
        "uncached call write call exit",
        "enter off call exit write call exit",
        "enter call write off call exit exit",
        "enter call write read_view exit",
        "enter double write call exit",
        "enter read_buffer write_buffer read_buffer exit",
        "enter call write_buffer call read_buffer exit",
    ],
)
def test_nothing_is_kept_where_no_cast_outlives_a_write(words):
    assert not found(words)


def test_parts_that_would_cast_anew_are_refused_and_both_remedies_work():
    x = torch.randn(2, 4)
    apart = {"layer": 0, "mul_": 1, "layer_1": 2}
    gm = Graph("enter call write call exit").gm
    for attempt in (lambda: sk.split(gm, apart), lambda: sk.split_module(gm, None, lambda n: apart.get(n.name, 0))):
        with pytest.raises(PlanError, match=r"SK217: layer_1 computes with the cast.*since layer.*mul_") as refused:
            attempt()
    assert "layer, layer_1 into one part" in str(refused.value) and "cache_enabled=False" in str(refused.value)
    together = sk.split(gm, dict.fromkeys(apart, 0))
    assert_same(gm, together, x)
    assert_same(gm, sk.inline(together), x)
    uncached = Graph("uncached call write call exit").gm
    assert_same(uncached, sk.split(uncached, apart), x)
    first, second = Graph("enter call write call exit").gm(x)
    assert torch.equal(first, second), "eager autocast no longer keeps casts of weights that are written"


def test_the_parent_casts_anew_between_parts():
    gm = Graph("enter call write call exit").gm
    with pytest.raises(PlanError, match="SK217"):
        sk.split(gm, {"layer": None, "mul_": 1, "layer_1": None})
