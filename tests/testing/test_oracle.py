"""The laws as assertions hold for every split, and each fails where a split is damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from splitlaws import assert_emitted_as_planned, assert_inlines
from torch import fx, nn

import splitkit as sk
from splitkit.errors import CheckError, CycleError
from splitkit.plans.parts import Part
from splitkit.testing.compare import assert_legal


class Layers(nn.Module):
    """sin in part 0, cos and tan in part 1, exp and the layer in part 2; part 2 has its own copy of sin."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        y = torch.sin(x)
        return self.layer(torch.exp(y)) + torch.tan(torch.cos(y))


PLACES = {"sin": (0, 2), "cos": (1,), "tan": (1,), "exp": (2,), "layer": (2,), "add": (2,)}


@pytest.fixture
def split():
    gm = fx.symbolic_trace(Layers())
    return sk.split(gm, sk.Plan({n: PLACES[n.name] for n in sk.analyze(gm).nodes}))


def copy_of(split, name, key):
    return next(copy for node, copy in split.copies[key].items() if node.name == name)


def test_a_split_is_emitted_as_planned_and_inlines(split):
    assert_emitted_as_planned(split)
    assert_inlines(split)
    parts = {key: replace(part, call="checkpoint") for key, part in split.plan.parts.items()}
    assert_emitted_as_planned(sk.split(split.flow.root, replace(split.plan, parts=parts)))


def test_a_copy_that_is_not_there_is_found(split):
    del split.copies[2][next(node for node in split.plan if node.name == "sin")]
    with pytest.raises(CheckError, match=r"SK701: part 2 computes nodes that are not in the plan: \[sin"):
        assert_emitted_as_planned(split)


def test_a_node_that_the_plan_places_elsewhere_is_found(split):
    node = next(node for node in split.plan if node.name == "cos")
    moved = replace(split, plan=split.plan.place({node: (0,)}))
    with pytest.raises(CheckError, match=r"SK701: not emitted as planned: \['\(cos, 0\)', '\(cos, 1\)'\]"):
        assert_emitted_as_planned(moved)


def test_what_runs_too_early_is_found_in_a_part_and_among_parts(split):
    copy_of(split, "cos", 1).prepend(copy_of(split, "tan", 1))
    with pytest.raises(CheckError, match=r"SK701: tan in part 1 runs before \['\(cos, 1\)'\]"):
        assert_emitted_as_planned(split)
    copy_of(split, "tan", 1).prepend(copy_of(split, "cos", 1))
    assert_emitted_as_planned(split)
    first, *_ = calls = [n for n in split.module.graph.nodes if n.op == "call_module"]
    first.prepend(calls[1])
    with pytest.raises(CheckError, match=r"SK701: cos in part 1 runs before \['\(sin, 0\)'\]"):
        assert_emitted_as_planned(split)


def test_what_runs_before_an_effect_that_it_waits_for_is_found():
    def forward(x):
        y = torch.sin(x)
        y.add_(1)
        return torch.cos(y)

    split = sk.split(fx.symbolic_trace(forward), lambda node: 0)
    assert_emitted_as_planned(split)
    copy_of(split, "add_", 0).prepend(copy_of(split, "cos", 0))
    with pytest.raises(CheckError, match=r"SK701: cos in part 0 runs before \['\(add_, 0\)'\]"):
        assert_emitted_as_planned(split)


def test_what_inlines_to_something_else_is_found(split):
    copy_of(split, "exp", 2).target = torch.log
    with pytest.raises(CheckError, match="SK701: inline gives .*log.* instead of .*exp"):
        assert_inlines(split)


@pytest.mark.parametrize("damage", [lambda gm: gm.register_buffer("more", torch.ones(1)), nn.Module.eval])
def test_other_weights_and_another_mode_are_found(split, damage, monkeypatch):
    def inlined(split):
        gm = sk.inline(split)
        damage(gm)
        return gm

    monkeypatch.setattr("splitlaws.inline", inlined)
    with pytest.raises(CheckError, match="SK701: inline gives the tensors"):
        assert_inlines(split)


def test_a_plan_in_a_cycle_is_not_legal(split):
    flow = split.flow
    assert_legal(flow, split.plan)
    places = {node: (0,) if node.name in ("sin", "tan") else (1,) for node in flow.nodes}
    with pytest.raises(CycleError):
        assert_legal(flow, sk.Plan(places, {0: Part(0), 1: Part(1)}))
