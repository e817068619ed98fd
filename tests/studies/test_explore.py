from __future__ import annotations

import torch
from torch import nn

import splitkit as sk


def test_one_call_captures_plans_and_draws(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    page = tmp_path / "plan.html"
    made = sk.explore(model, x, policy=3, page=page)
    gm = sk.capture(model, x)
    both = sk.costs.training(sk.costs.flops(gm), gm)
    assert {*made.parts} == {0, 1, 2}
    assert {node.name: places for node, places in made.items()} == {
        node.name: places for node, places in sk.plan(gm, sk.policies.Stages(3), both).items()
    }
    assert made.prices.training, "the picture draws backward"
    assert "<html" in page.read_text() and "image/svg+xml" in made._repr_mimebundle_()


def test_a_policy_and_keyword_inputs_are_passed_on():
    class Doubles(nn.Module):
        def forward(self, value):
            return value + value

    made = sk.explore(Doubles(), value=torch.ones(2), policy=sk.policies.RoundRobin(1))
    assert len(made.parts) == 1
