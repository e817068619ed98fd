from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from splitkit.errors import CheckError
from splitkit.testing import assert_same
from splitkit.testing.compare import compare


class Counting(nn.Module):
    """Training state in a buffer, dropout, a parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return torch.dropout(self.linear(x), 0.5, True)


def test_the_same_is_the_same_and_nothing_is_left_behind():
    model = Counting()
    state = torch.get_rng_state()
    x = torch.ones(2, 4, requires_grad=True)
    result = compare(model, copy.deepcopy(model), x)
    result.raise_if_different()
    assert result.same and all(d.bitwise for d in (*result.outputs, *result.gradients, *result.state))
    assert model.count == 0 and model.linear.weight.grad is None and x.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert {d.name for d in result.gradients} >= {"gradient of linear.weight", "gradient of input [0][0]"}


def test_gradients_that_were_there_stay():
    model = Counting()
    model.linear.weight.grad = torch.ones(4, 4)
    compare(model, model, torch.ones(2, 4))
    assert torch.equal(model.linear.weight.grad, torch.ones(4, 4))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("output", lambda self, x: torch.dropout(self.linear(x) + 1e-7, 0.5, True)),
        ("random", lambda self, x: (torch.rand(1), torch.dropout(self.linear(x), 0.5, True))[1]),
        ("buffer", lambda self, x: torch.dropout(self.linear(x), 0.5, True)),
        ("shape", lambda self, x: torch.dropout(self.linear(x), 0.5, True)[None]),
        ("dtype", lambda self, x: torch.dropout(self.linear(x), 0.5, True).double()),
        ("gradient", lambda self, x: torch.dropout(self.linear(x), 0.5, True).detach()),
        ("grad mode", lambda self, x: (torch.dropout(self.linear(x), 0.5, True), torch.set_grad_enabled(False))[0]),
    ],
)
def test_every_kind_of_difference_is_found(name, method):
    class Other(Counting):
        def forward(self, x):
            if name != "buffer":
                self.count += 1
            return method(self, x)

    model, other = Counting(), Other()
    other.load_state_dict(model.state_dict())
    with pytest.raises(CheckError, match="SK701"):
        assert_same(model, other, torch.ones(2, 4))


def test_gradients_to_rounding():
    class Scaled(Counting):
        def __init__(self, factor):
            super().__init__()
            self.linear.weight.register_hook(lambda g: g * factor)

    state = Counting().state_dict()
    models = [Scaled(f) for f in (1.0, 1 + 1e-6, 1.01)]
    for model in models:
        model.load_state_dict(state)
    assert compare(models[0], models[1], torch.ones(2, 4)).same
    result = compare(models[0], models[2], torch.ones(2, 4))
    assert [d.name for d in result.failures] == ["gradient of linear.weight"]
    assert result.worst("gradients").relative == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(CheckError, match=r"gradient of linear.weight: differs by"):
        result.raise_if_different()


def test_inputs_that_are_written_are_compared():
    class Writes(nn.Module):
        def forward(self, x):
            return x.mul_(2).sum()

    class Reads(nn.Module):
        def forward(self, x):
            return (x * 2).sum()

    result = compare(Writes(), Reads(), torch.ones(3))
    assert [d.name for d in result.failures] == ["input [0][0]"]
    assert compare(Writes(), Writes(), torch.ones(3, requires_grad=True)).same


def test_nan_equals_nan_and_zero_is_not_minus_zero():
    class Gives(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, x):
            return x * 0 + self.value

    assert compare(Gives(float("nan")), Gives(float("nan")), torch.ones(2)).same
    assert not compare(Gives(float("nan")), Gives(1.0), torch.ones(2)).same
    assert not compare(Gives(0.0), Gives(-1e-45), torch.ones(2)).same


def test_the_loss_is_the_models_own_or_the_one_given_or_a_weighted_sum():
    @dataclass
    class Output:
        loss: torch.Tensor
        logits: torch.Tensor

    torch.utils._pytree.register_dataclass(Output)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return Output((self.w * x).sum(), self.w * 3)

    own = compare(Model(), Model(), torch.ones(2))
    assert own.loss == (2.0, 2.0) and own.loss_is_models
    given = compare(Model(), Model(), torch.ones(2), loss=lambda out: out.logits.sum())
    assert given.loss == (6.0, 6.0) and not given.loss_is_models


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match="takes modules and splits, not function"):
        compare(lambda x: x, nn.ReLU(), torch.ones(1))
