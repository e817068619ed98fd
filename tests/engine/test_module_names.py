"""Parts and their inputs keep different names where Python or fx would confuse them."""

from __future__ import annotations

import torch
from handgraphs import graph_of
from torch import fx, nn

import splitkit as sk
from splitkit.testing import assert_same


def test_part_names_that_python_folds_together_stay_apart():
    """Python takes the ligature fi for the letters `fi` in an identifier, and the full-width digit for `1`."""

    class Three(nn.Module):
        def forward(self, x):
            return x.sin().cos().tan()

    gm = fx.symbolic_trace(Three())
    made = sk.split(gm, dict(zip(["sin", "cos", "tan"], ["\ufb01", "fi", "\uff11"], strict=True)))
    assert all(name.isascii() for name, _ in made.module.named_children())
    assert_same(gm, made, torch.ones(2))


def test_a_value_may_be_called_self():
    def write(g):
        x = g.placeholder("x")
        g.output(g.call_function(torch.cos, (g.create_node("call_function", torch.sin, (x,), name="self"),)))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, {"self": 0, "cos": 1}), torch.ones(2))


def test_inputs_of_a_part_may_differ_only_in_case():
    """`graph.placeholder("A")` names its node `a`; the code then reads `def forward(self, A, a): a = A; a_1 = a`."""

    def write(g):
        x = g.placeholder("x")
        upper = g.create_node("call_function", torch.sin, (x,), name="A")
        lower = g.create_node("call_function", torch.cos, (x,), name="a")
        g.output(g.create_node("call_function", torch.sub, (upper, lower), name="d"))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, {"A": 0, "a": 0, "d": 1}), torch.ones(2))


def test_inputs_of_a_part_may_be_called_self_and_self_underscore():
    def write(g):
        x = g.placeholder("x")
        one = g.create_node("call_function", torch.sin, (x,), name="self_")
        other = g.create_node("call_function", torch.cos, (x,), name="self")
        g.output(g.create_node("call_function", torch.sub, (one, other), name="d"))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, {"self_": 0, "self": 0, "d": 1}), torch.ones(2))
