"""Backward never reads what a later graph or the caller has written since forward."""

from __future__ import annotations

import copy

import pytest
import torch
from campaigns import some_of_all
from torch import nn

import splitkit as sk
from splitkit.policies import MinCut, RecomputeAll, SaveAll

WHERE = ["buffer", "input", "activation", "view", "statistics"]
GREEDY = {"recompute": RecomputeAll(), "cut": MinCut(price=0.0)}
"""Policies that compute again what they may."""


@pytest.mark.parametrize(("where", "policy"), some_of_all(WHERE, GREEDY, ()))
def test_what_is_written_after_a_graph_break_is_not_read_again_in_backward(where, policy):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("b", torch.ones(4))

        def forward(self, x):
            h = {
                "input": lambda: self.first(x.exp()),
                "view": lambda: self.first(x) * self.b.view(2, 2).exp().flatten(),
            }.get(where, lambda: self.first(x) * self.b.exp())()
            z = self.second(h + 1).sin()
            torch._dynamo.graph_break()
            if where == "input":
                x.add_(1)
            elif where == "activation":
                h.mul_(2)
            elif where == "statistics":
                self.b.lerp_(h.detach().mean(0), 0.1)
            else:
                self.b[:2].add_(1)
            return (h.detach() * z).sum()

    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Model(), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="graphs"):
        applied = sk.apply(model, GREEDY[policy], x)
    torch.testing.assert_close(model.b, plain.b)
    for _ in range(2):
        loss, expected = applied(x.clone()), plain(x.clone())
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.b, plain.b)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("policy", [SaveAll(), RecomputeAll(), MinCut()], ids=str)
def test_a_buffer_that_backward_needs_and_a_later_graph_writes_is_refused(policy):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("b", torch.ones(4))

        def forward(self, x):
            h = self.linear(x) * self.b  # its gradient needs the buffer as it is now
            torch._dynamo.graph_break()
            self.b.add_(1)
            return h.sum() + self.linear(x).sum()

    torch._dynamo.reset()
    model = Model()
    with pytest.raises(sk.errors.PlanError, match="SK215.*buffers_b"):
        sk.apply(model, policy, torch.randn(3, 4))
    assert torch.equal(model.b, torch.ones(4))


@pytest.mark.parametrize("policy", [sk.policies.SaveAll(), sk.policies.RecomputeAll()])
def test_a_weight_that_is_written_in_place_between_forward_and_backward_is_refused(policy):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.a(x).sin()).sin().sum()

    model, x = Net(), torch.randn(4, 8)
    loss = sk.apply(model, policy, x)(x)
    with torch.no_grad():
        model.b.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
