"""Memory inside autograd Functions is simulated as it is measured."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit import costs
from splitkit.memory.saved_storages import activations


class Smooth(torch.autograd.Function):
    """Allocates inside, and keeps tensors as attributes of its context, where no hook on saved tensors sees them."""

    @staticmethod
    def forward(ctx, x):
        ctx.curve, ctx.others = torch.exp(x), [x + 1, {"half": x / 2}]
        ctx.save_for_backward(x)
        inner = torch.tanh(x * x * x)
        return ctx.curve * (1 + inner)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.curve


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.tanh(x * x * x))

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(64, 64), function

    def forward(self, x):
        return self.function(self.layer(x)).sum()


@pytest.mark.parametrize(
    "function", [lambda x: Plain.apply(x), lambda x: Plain.apply(x.t()), lambda x: Smooth.apply(x)]
)
def test_what_a_function_allocates_inside_is_simulated(function):
    x = torch.randn(32, 64)
    gm = sk.capture(Calls(function), x)
    with torch.no_grad():
        measured = sk.measure_memory(gm, x)
    simulated = sk.simulate_memory(gm)
    assert (simulated.peak, simulated.end) == (measured.peak, measured.end)
    node = next(n for n in gm.graph.nodes if type(n.target).__name__ == "FunctionCall")
    assert costs.flops(gm).flops(node) >= 32 * 64  # and it is priced


def test_what_a_function_keeps_in_its_context_is_counted():
    x = torch.randn(32, 64)
    rows = x.nbytes
    plain, smooth = (activations(sk.capture(Calls(lambda y, f=f: f.apply(y)), x)) for f in (Plain, Smooth))
    assert plain.saved_bytes == 2 * rows  # what linear and the Function read
    assert smooth.saved_bytes == 5 * rows
    (inside,) = (found for node, found in plain.inside.items() if type(node.target).__name__ == "FunctionCall")
    assert inside.forward == 2 * rows


def test_an_item_of_a_tuple_is_no_op_of_its_own():
    class Halves(nn.Module):
        def forward(self, x):
            a, b = torch.var_mean(x * 2, dim=-1)
            return (a * b).sum()

    x = torch.randn(8, 16, requires_grad=True)
    found = activations(sk.capture(Halves(), x))
    assert not any(node.target is operator.getitem for node in found.inside)
