"""Comparisons handle infinite, tiny and sparse gradients, state of every kind, and outputs of any class."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from fuzzing import _alike
from torch import fx, nn

import splitkit as sk
from splitkit import _torch
from splitkit.costs import unit
from splitkit.engine.split import split
from splitkit.policies import RoundRobin
from splitkit.testing import assert_same
from splitkit.testing.compare import compare
from splitkit.testing.differences import bitwise


class Gives(nn.Module):
    """A parameter, and the output that a function makes of it and the input."""

    def __init__(self, function, *values):
        super().__init__()
        self.weights = nn.ParameterList([torch.full((2,), v) for v in values or (1.0,)])
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def same(first, second, x=None, **options):
    return compare(Gives(first), Gives(second), torch.ones(2) if x is None else x, **options).same


def scaled(*factors):
    """Gradients that are these, by hooks."""
    model = Gives(lambda self, x: sum(w.sum() for w in self.weights), *[1.0] * len(factors))
    for weight, factor in zip(model.weights, factors, strict=True):
        weight.register_hook(lambda g, f=factor: g * f)
    return model


def test_one_infinite_gradient_leaves_the_others_compared():
    inf = float("inf")
    found = compare(scaled(inf, 1.0), scaled(inf, 2.0), torch.ones(2))
    assert [d.name for d in found.failures] == ["gradient of weights.1"]
    one_inf, other = torch.tensor([inf, 1.0]), torch.tensor([inf, 2.0])
    assert compare(scaled(one_inf), scaled(one_inf), torch.ones(2)).same
    assert compare(scaled(one_inf), scaled(torch.tensor([inf, 1 + 1e-6])), torch.ones(2)).same
    assert not compare(scaled(one_inf), scaled(other), torch.ones(2)).same
    assert not compare(scaled(one_inf), scaled(torch.tensor([1.0, inf])), torch.ones(2)).same
    assert not compare(scaled(one_inf), scaled(torch.tensor([-inf, 1.0])), torch.ones(2)).same


def test_equal_nan_gradients_are_the_same():
    nan = float("nan")
    assert compare(scaled(nan, 1.0), scaled(nan, 1.0), torch.ones(2)).same
    assert not compare(scaled(nan), scaled(1.0), torch.ones(2)).same
    assert not compare(scaled(1.0), scaled(nan), torch.ones(2)).same
    partly = torch.tensor([nan, 1.0])
    assert compare(scaled(partly), scaled(torch.tensor([nan, 1 + 1e-6])), torch.ones(2)).same
    assert not compare(scaled(partly), scaled(torch.tensor([nan, 2.0])), torch.ones(2)).same


def test_small_gradients_are_compared_beside_a_much_larger_one():
    assert not compare(scaled(2e5, 1.0), scaled(2e5, 1.01), torch.ones(2)).same
    assert not compare(scaled(2e6, 1.0), scaled(2e6, 2.0), torch.ones(2)).same
    assert not compare(scaled(1.0, 1e-9), scaled(1.0, 1e-6), torch.ones(2)).same
    for zero, but_for_rounding in ((1e-9, -3e-9), (6.1e-7, 5.6e-7), (4.8e-8, 2.1e-7)):
        assert compare(scaled(1.0, zero), scaled(1.0, but_for_rounding), torch.ones(2)).same


@dataclass
class Pair:
    """A dataclass that pytree does not know."""

    a: object
    b: object = None


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (lambda m, x: (x * 2,), lambda m, x: (x * 2, None), "output[1]"),
        (lambda m, x: {"a": x * 2}, lambda m, x: {"a": x * 2, "b": None}, "output['b']"),
        (lambda m, x: (x * 2,), lambda m, x: [x * 2], "structure of the output"),
        (lambda m, x: (x * 2, ()), lambda m, x: (x * 2, []), "structure of the output"),
        (lambda m, x: Pair(x * 2), lambda m, x: Pair(x * 2, []), "output['b']"),
        (lambda m, x: Pair(x * 2), lambda m, x: {"a": x * 2, "b": None}, "structure of the output"),
        (lambda m, x: x * m.weights[0], lambda m, x: (x * m.weights[0]).detach(), "output"),
        (lambda m, x: x, lambda m, x: x.clone(), "memory that output shares"),
        (lambda m, x: m.weights[0], lambda m, x: m.weights[0] * 1, "memory that output shares"),
        (lambda m, x: x * 2, lambda m, x: (x * 2, torch.rand(1))[0], "random state afterwards"),
    ],
)
def test_what_an_output_is_beside_its_values_is_compared(first, second, named):
    found = compare(Gives(first), Gives(second), torch.ones(2))
    assert named in [d.name for d in found.failures]
    assert same(first, first) and same(second, second)


def test_tensors_that_are_plain_attributes_are_put_back():
    root = nn.Module()
    root.inner = nn.Module()
    root.inner.count = torch.zeros(2)
    graph = torch.fx.Graph()
    x, count = graph.placeholder("x"), graph.get_attr("inner.count")
    graph.call_method("add_", (count, 1))
    graph.output(graph.call_function(torch.add, (x, count)))
    gm = torch.fx.GraphModule(root, graph)
    assert compare(gm, gm, torch.ones(2)).same and torch.equal(gm.inner.count, torch.zeros(2))
    assert_same(gm, split(gm, lambda node: node.name), torch.ones(2))
    assert_same(gm, copy.deepcopy(gm), torch.ones(2))
    forgets = Gives(lambda self, x: x + 1)
    forgets.inner = nn.Module()
    forgets.inner.count = torch.zeros(2)
    assert [d.name for d in compare(gm, forgets, torch.ones(2)).failures] == ["value of inner.count"]


def test_buffers_that_a_run_binds_anew_are_put_back():
    def counts(self, x):
        self.count = self.count + 1
        return x + self.count

    model = Gives(counts)
    model.register_buffer("count", torch.zeros(2))
    held = model.count
    assert compare(model, copy.deepcopy(model), torch.ones(2)).same and model.count is held
    assert not held.any()
    gm = sk.capture(model, torch.ones(2))
    assert_same(model, split(gm, lambda node: node.name), torch.ones(2))


def test_a_gradient_of_a_plain_tensor_is_compared_and_taken_away():
    model = Gives(lambda self, x: x * self.plain)
    model.plain = torch.ones(2, requires_grad=True)
    found = compare(model, model, torch.ones(2))
    assert found.same and "gradient of plain" in [d.name for d in found.gradients] and model.plain.grad is None


LEAVES = {
    "sparse": lambda x: x.to_sparse(),
    "sparse of a parameter": lambda x: (x * 2).to_sparse(),
    "rows": lambda x: torch.stack([x, x]).to_sparse_csr(),
    "columns": lambda x: torch.stack([x, x]).to_sparse_csc(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "jagged": lambda x: torch.nested.as_nested_tensor([x, x[:1]], layout=torch.jagged),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x[:1]]),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "array": lambda x: x.detach().numpy(),
    "array of objects": lambda x: np.array([float(x[0]), "a"], dtype=object),
    "dataclass": lambda x: Pair(x, [x, 1]),
    "float": lambda x: float(x[0]),
    "complex": lambda x: complex(float(x[0]), 1.0),
    "number of numpy": lambda x: x.detach().numpy()[0],
}

NO_GRADIENT = ("array", "array of objects", "float", "complex", "number of numpy")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LEAVES)
def test_outputs_of_every_kind_equal_themselves_alone(kind):
    make = LEAVES[kind]
    ones, twos = (lambda m, x, f=f: make(x * m.weights[0] * f) for f in (1.0, 2.0))
    found = compare(Gives(ones), Gives(ones), torch.ones(2))
    assert found.same and bool(found.gradients) == (kind not in NO_GRADIENT)
    assert not same(ones, twos)
    nan = torch.tensor([float("nan"), 1.0])
    assert kind == "array of objects" or same(ones, ones, nan)


def test_sparse_gradients_are_compared():
    class Model(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.table = nn.Embedding(5, 2, sparse=True)
            nn.init.ones_(self.table.weight)
            self.factor = factor

        def forward(self, x):
            return self.table(x).sum(), self.table(x + self.factor).sum()

    x = torch.tensor([0, 3, 0])
    assert compare(Model(1), Model(1), x).same
    assert [d.name for d in compare(Model(1), Model(0), x).failures] == ["gradient of table.weight"]


def test_what_cannot_be_compared_is_different_and_no_crash():
    class Odd:
        def __eq__(self, other):
            raise RuntimeError("no")

        __hash__ = None

    one = Odd()
    assert same(lambda m, x: one, lambda m, x: one)
    assert not same(lambda m, x: Odd(), lambda m, x: Odd())


def test_the_state_of_interleaved_autocast_is_put_back():
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    b = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    graph.call_function(_torch.EXIT_AUTOCAST, (a,))
    graph.call_function(_torch.EXIT_AUTOCAST, (b,))
    graph.output(graph.call_function(torch.mm, (x, x)))
    gm = fx.GraphModule(nn.Module(), graph)
    assert_same(gm, split(gm, RoundRobin(1)), torch.randn(3, 3))
    assert not torch.is_autocast_enabled("cpu")


def test_gradients_of_tied_weights_are_compared_under_one_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.last = nn.Linear(4, 4, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.first(x).relu())

    model = Tied()
    gm = sk.capture(model, torch.randn(2, 4))
    result = compare(model, split(gm, RoundRobin(3)), torch.randn(2, 4))
    assert result.same and [d.name for d in result.gradients] == ["gradient of first.weight"]


def test_views_that_are_buffers_are_put_back():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("whole", torch.zeros(2, 2))
            self.register_buffer("turned", self.whole.t())

        def forward(self, x):
            self.whole.copy_(self.linear(x))
            return x @ self.turned

    gm = fx.symbolic_trace(Model())
    assert_same(gm, split(gm, RoundRobin(2), costs=unit(gm)), torch.randn(2, 2))
    assert torch.equal(gm.whole, torch.zeros(2, 2))


def test_a_comparison_prints_a_few_lines():
    net, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), torch.randn(2, 4)
    found = compare(net, sk.capture(net, x), x)
    assert str(found).startswith("same: 1 outputs, 40 gradients") and len(str(found)) < 200
    assert len(str(compare(net, nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), x)).splitlines()) == 10


class Recurrent(nn.Module):
    """Its state is an output, and is written after backward would need it, as RWKV does in eval mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, state):
        state = state * 1
        y = self.linear(x) * state
        state += y.detach().sum()
        return y, state


def test_gradients_are_left_out_where_backward_of_all_outputs_does_not_run():
    model, inputs = Recurrent(), (torch.randn(2, 4), torch.ones(2, 4))
    made = split(sk.capture(model, *inputs), sk.policies.Stages(2))
    found = compare(model, made, *inputs)
    assert found.same and not found.gradients and "modified by an inplace operation" in str(found)
    other = compare(model, nn.ModuleList([model, model])[0], *inputs, loss=lambda out: out[1].sum())
    assert other.same and not other.no_backward


def test_a_candidate_that_alone_has_no_backward_is_different():
    class Other(Recurrent):
        def forward(self, x, state):
            state = state * 1
            y = self.linear(x) * state
            return y, state + y.detach().sum()

    model, inputs = Other(), (torch.randn(2, 4), torch.ones(2, 4))
    worse = Recurrent()
    worse.load_state_dict(model.state_dict())
    found = compare(model, worse, *inputs)
    assert not found.same and [d.name for d in found.failures] == ["whether backward runs"]


def test_equal_objects_of_other_classes_differ():
    for one, other in ((1, True), (1, 1.0), ((1,), [1]), (0, None), (np.float32(1), np.float64(1))):
        assert not same(lambda m, x, v=one: (x * 1, v), lambda m, x, v=other: (x * 1, v)), (one, other)
        assert same(lambda m, x, v=one: (x * 1, v), lambda m, x, v=one: (x * 1, v))


def test_a_dtype_of_autocast_that_a_model_leaves_is_told_and_put_back():
    def leaves(m, x):
        torch.set_autocast_dtype("cpu", torch.float16)
        return x * 1

    before = torch.get_autocast_dtype("cpu")
    assert before == torch.bfloat16
    found = compare(Gives(lambda m, x: x * 1), Gives(leaves), torch.ones(2))
    assert not found.same and any("autocast on cpu" in d.name for d in found.failures)
    assert torch.get_autocast_dtype("cpu") == before


def test_bits_are_those_of_a_dtype():
    assert bitwise(torch.ones(2), torch.ones(2)) and not bitwise(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert _alike(torch.ones(2), torch.ones(2)) and not _alike(torch.ones(2), torch.ones(2, dtype=torch.float64))
