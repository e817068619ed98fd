from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import pytest
import torch
from custombackwards import BACKWARDS, Net
from torch import nn

import splitkit as sk
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


def test_compare_blames_the_step_that_differs():
    net, x = Net(BACKWARDS["scaled"]), torch.randn(4, 4)
    program = torch.export.export(net, (x,))  # without the backward
    found = compare(net, sk.split(sk.capture(program), sk.policies.Stages(2)), x)
    with pytest.raises(sk.errors.CaptureError, match=r"(?s)SK404: strict export .*custombackwards.py"):
        sk.capture(torch.export.export(net, (x,), strict=True))
    assert found.wrong_step == "capture" and found.steps["split"].same
    assert len(str(found).splitlines()) < 12 and "the capture changed it" in str(found)
    with pytest.raises(sk.errors.CheckError, match=r"SK702(?s:.*)gradient of a.weight"):
        found.raise_if_different()

    made = sk.split(sk.capture(net, x), sk.policies.Stages(2))
    part = next(iter(made.parts.values()))
    node = part.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0]
    with part.graph.inserting_after(node):
        doubled = part.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2))
    node.replace_all_uses_with(doubled, lambda user: user is not doubled)
    part.recompile()
    found = compare(net, made, x)
    assert found.wrong_step == "split"
    with pytest.raises(sk.errors.CheckError, match="SK701"):
        found.raise_if_different()

    fickle = Net(lambda net, h: h * next(net.count))
    fickle.count = itertools.count(1)
    found = compare(fickle, sk.split(sk.capture(fickle, x), sk.policies.Stages(2)), x)
    assert found.wrong_step == "model"
    with pytest.raises(sk.errors.CheckError, match="SK703"):
        found.raise_if_different()


class Doubles(nn.Module):
    """Doubles ``y`` in place, and adds to it what ``x`` was before that (early) or is after it."""

    def __init__(self, early):
        super().__init__()
        self.early = early

    def forward(self, x, y):
        taken = x.clone() if self.early else x
        y.mul_(2)
        return (taken * 3 + y.sum()).sum(-1)


def rows(count, grad):
    return torch.linspace(0.0, 1.0, 2 * count).reshape(count, 2).requires_grad_(grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("pair", "same"),
    [
        (lambda t: (t, t), False),
        (lambda t: (t[:2], t[1:]), False),
        (lambda t: (t, t.detach()[1:]), False),
        (lambda t: (t[:, 0:1], t.T[0]), False),
        (lambda t: (t[:2], t[2:]), True),  # one storage, and nothing shared
        (lambda t: (t, t.clone()), True),
    ],
)
def test_inputs_that_overlap_are_copied_with_what_they_share(pair, same, grad):
    x, y = pair(rows(4, grad))
    before = x.detach().clone()
    assert compare(Doubles(True), Doubles(False), x, y).same == same
    itself = compare(Doubles(True), Doubles(True), x, y)
    assert itself.same and not itself.no_backward
    assert len(itself.gradients) == grad + (grad and y.requires_grad)
    assert torch.equal(x, before)


def test_gradients_of_overlapping_inputs_are_those_of_eager():
    memory = rows(4, True)
    (memory[:3] * memory[1:].exp()).sum().backward()

    class Product(nn.Module):
        def forward(self, x, y):
            return (x * y.exp()).sum()

    held = memory.detach().requires_grad_()
    found = compare(Product(), Product(), held[:3], held[1:], loss=lambda out: out)
    scales = {d.scale for d in found.gradients}
    assert scales == {float(memory.grad.abs().max())}
    assert held.grad is None


def test_inputs_of_two_dtypes_in_one_memory():
    class Flips(nn.Module):
        def forward(self, x, bits):
            bits.zero_()
            return x + 1

    class Reads(nn.Module):
        def forward(self, x, bits):
            y = x + 1
            bits.zero_()
            return y

    x = torch.ones(3)
    assert not compare(Flips(), Reads(), x, x.view(torch.int32)).same
    assert compare(Flips(), Flips(), x, x.view(torch.int32)).same and bool((x == 1).all())


@pytest.mark.parametrize("changes", [True, False])
def test_a_buffer_that_one_run_alone_has_counts_if_that_run_changes_it(changes):
    """A split need not hold a buffer that its graph never reads, but what a run writes must be in both."""

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            if changes:
                self.count += 1
            return x * 2

    class Lacks(nn.Module):
        def forward(self, x):
            return x * 2

    expected = ["value of count"] if changes else []
    for pair in ((Holds(), Lacks()), (Lacks(), Holds())):
        assert [d.name for d in compare(*pair, torch.ones(2)).failures] == expected
