"""Where torch divides backward rightly, and that it is wrong without a word elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import _backward

from splitkit.runtime.ranks.stage import divisible, passed_on

Forward = Callable[[nn.ModuleList, torch.Tensor], tuple[torch.Tensor, ...]]

RIGHT: dict[str, Forward] = {
    "a block": lambda m, x: (x + m[1](m[0](x).relu()),),
    "a norm": lambda m, x: (m[2](x).tanh(), m[0](x)),
    "two outputs": lambda m, x: (m[0](x), m[1](x).tanh() + x),
    "frozen": lambda m, x: (x * m[0](torch.ones(2, 4)).detach(),),
}
WRONG: dict[str, Forward] = {
    "an output that no input leads to": lambda m, x: (m[0](x), m[1](torch.ones(2, 4))),
    "a layer before the input comes in, and after": lambda m, x: (m[0](torch.ones(2, 4)) + x, m[0](torch.zeros(2, 4))),
    "a layer twice": lambda m, x: (m[0](m[0](x).relu()),),
}


def net() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)])


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_stages_that_torch_divides_rightly(name):
    forward = (RIGHT | WRONG)[name]
    modules, x = net(), torch.randn(2, 4, requires_grad=True)
    found = divisible([x], forward(modules, x), list(modules.parameters()))
    assert found == (name in RIGHT)


def test_a_parameter_that_torch_does_not_know_is_left_out():
    modules, x = net(), torch.randn(2, 4, requires_grad=True)
    assert not divisible([x], (modules[0](x),), list(modules[1].parameters()))


@pytest.mark.parametrize("name", ["a block", "an output that no input leads to"])
def test_what_torch_does_of_it(name):
    """If the second one passes one day, torch has learnt it."""
    modules, x = net(), torch.randn(2, 4, requires_grad=True)
    outputs = list((RIGHT | WRONG)[name](modules, x))
    whole = torch.autograd.grad(sum(t.sum() for t in outputs), modules[1].weight, retain_graph=True)[0]
    trained = [*modules[0].parameters(), *modules[1].parameters()]
    _, groups = _backward.stage_backward_input(outputs, [torch.ones_like(t) for t in outputs], [x], iter(trained))
    _backward.stage_backward_weight(iter(trained), groups)
    found = modules[1].weight.grad
    assert torch.equal(found, whole) if name == "a block" else found is None


@pytest.mark.parametrize("second", ["sum of two", "as large as the output"])
def test_what_torch_gives_two_owners_is_named(second):
    """If the gradients have memory of their own one day, torch has learnt it, and `PartStage.passed_on` may go."""
    modules, x = net(), torch.randn(2, 4, requires_grad=True)
    a, b = (nn.Parameter(torch.randn(4)) for _ in range(2))
    full = nn.Parameter(torch.randn(2, 4))
    out = x @ modules[0].weight.t() + ((a + b) if second == "sum of two" else full)
    own = [a, b] if second == "sum of two" else [full]
    assert {id(p) for p in passed_on([out])} == {id(p) for p in own}
    trained, given = [modules[0].weight, *own], torch.ones_like(out)
    _, groups = _backward.stage_backward_input([out], [given], [x], iter(trained))
    _backward.stage_backward_weight(iter(trained), groups)
    other = b.grad if second == "sum of two" else given
    kept = second == "sum of two" or torch.__version__ >= "2.13"  # before, what comes in was copied
    assert (own[0].grad.data_ptr() == other.data_ptr()) == kept
