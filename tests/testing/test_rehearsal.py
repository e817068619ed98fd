"""Runs that leave no trace."""

from __future__ import annotations

import torch
from torch import nn

from splitkit.testing.models import Example
from splitkit.testing.timing import copied_inputs, measure_forward, state_restored


def test_inputs_are_copies_that_share_memory_with_each_other_as_before():
    x = torch.arange(6.0)
    needed = (x * 2).requires_grad_()
    kept = object()
    args, kwargs = copied_inputs(Example(nn.Identity(), (x, [x[2:], 5]), {"y": needed, "z": kept}))
    assert args[1][1] == 5 and kwargs["z"] is kept
    assert not args[0].requires_grad and kwargs["y"].requires_grad and kwargs["y"].is_leaf
    args[0][2] = -1.0
    assert args[1][0][0] == -1.0
    kwargs["y"].sum().backward()
    assert needed.grad is None
    assert torch.equal(x, torch.arange(6.0))


def test_state_gradients_and_random_numbers_are_put_back():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[0].weight.grad = torch.ones(3, 3)
    before, random = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    drawn, x = [], torch.arange(12.0).view(4, 3)  # rows of ones would be normed to zeros, of which dropout leaves zeros
    for _ in range(2):
        with state_restored(model, 7):
            assert model[0].weight.grad is None
            output = model(x)
            output.sum().backward()
            drawn.append(output.detach())
    with state_restored(model, 8):
        other = model(x).detach()
    torch.manual_seed(0)
    with state_restored(model, 7):
        again = model(x).detach()
    torch.set_rng_state(random)
    assert torch.equal(*drawn) and torch.equal(again, drawn[0]) and not torch.equal(other, drawn[0])
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(3, 3)) and model[0].bias.grad is None


def test_an_input_named_like_an_option_of_the_measurement_reaches_the_model():
    class Named(nn.Module):
        def forward(self, x, allocator):
            return x + allocator * 2

    x = torch.ones(1000)
    found = measure_forward(Named(), Example(Named(), (x,), {"allocator": x}), 0)
    assert 4000 <= found.peak - found.baseline <= 8000 + 512
