"""What autograd keeps, as found on fake tensors, is what it keeps of real ones, to the byte."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from keptmodels import MODELS, Convolutions, Mixed
from savedbytes import kept_by_autograd
from torch import nn

import splitkit as sk
from splitkit.memory.saved_storages import activations
from splitkit.testing.models import build


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        y = torch.relu(x @ self.weight)
        first, second = y.chunk(2, dim=-1)
        largest, where = torch.max(first * second, dim=-1)
        return largest, where, torch.cumsum(y.t().reshape(-1), 0)


def check(gm, *args, **kwargs):
    found = activations(gm)
    assert found.saved_bytes == kept_by_autograd(gm, lambda: gm(*args, **kwargs))
    assert found.saved_bytes > 0
    assert not found.estimated
    return found


@pytest.mark.parametrize("name", these_first(["gpt2"], sorted({*MODELS} - {"gpt2"})))
def test_models_save_what_eager_saves(name):
    example = build(name, **MODELS[name])
    check(sk.capture(example.model, *example.args, **example.kwargs), *example.args, **example.kwargs)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (Convolutions(), (torch.randn(2, 3, 8, 8), torch.tensor([1, 2]))),
        (Mixed(), (torch.randn(4, 16),)),
        (Products(), (torch.randn(6, 16),)),
    ],
    ids=["convolutions", "mixed", "products"],
)
def test_regions_masks_and_integers_count(model, args):
    check(sk.capture(model.train(), *args), *args)


def test_called_modules_and_tied_weights():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.5))
    model[2].weight = model[0].weight
    gm = torch.fx.symbolic_trace(model)
    x = torch.randn(4, 8)
    sk.extend.propagate(gm, x)
    check(gm, x)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_of_called_modules_are_not_saved_values(training):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)).train(training)
    x = torch.randn(2, 3, 8, 8)
    gm = torch.fx.symbolic_trace(model)
    sk.extend.propagate(gm, x)
    before = {name: t.clone() for name, t in gm.named_buffers()}
    found = activations(gm)
    assert all(torch.equal(t, before[name]) for name, t in gm.named_buffers())  # running statistics are left alone
    assert found.saved_bytes == kept_by_autograd(gm, lambda: gm(x)) and not found.estimated


def test_sizes_that_are_symbols_count_as_seen_at_capture():
    model, x = Products(), torch.randn(6, 16)
    gm = sk.capture(model, x, dynamic=True)
    assert any(isinstance(size, torch.SymInt) for n in gm.graph.nodes if "val" in n.meta for size in _sizes(n))
    check(gm, x)


def _sizes(node):
    value = node.meta["val"]
    return value.shape if isinstance(value, torch.Tensor) else ()


def test_nodes_are_told_apart():
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(3, 4)
    gm = sk.capture(model, x)
    found = activations(gm)
    by_name = {n.name: n for n in gm.graph.nodes}
    saved = {name: [found.nbytes[s] for s in found.saved.get(n, ())] for name, n in by_name.items()}
    assert saved["linear"] == [3 * 4 * 4]  # its input
    assert saved["relu"] == [3 * 6 * 4]  # its result
    assert found.saved[by_name["linear_1"]] == found.values[by_name["relu"]]
    assert {n.name for n in found.requires if n.op != "get_attr"} == {"linear", "relu", "linear_1"}


def test_nothing_is_saved_without_parameters_that_require_grad():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU()).requires_grad_(False)
    found = activations(sk.capture(model, torch.randn(3, 4)))
    assert not found.saved
    assert not found.requires


def test_neither_modes_nor_random_state_nor_gradients_change():
    model, x = Mixed(), torch.randn(4, 16)
    gm = sk.capture(model, x)
    torch.set_grad_enabled(False)
    try:
        state = torch.random.get_rng_state()
        activations(gm)
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.equal(state, torch.random.get_rng_state())
    finally:
        torch.set_grad_enabled(True)
    assert all(p.grad is None for p in gm.parameters())


@torch.library.custom_op("splitkit_tests_activations::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_an_op_that_does_not_run_on_fakes_is_estimated_from_above():
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    y = graph.call_function(torch.mul, (x, w))
    z = graph.call_function(torch.ops.splitkit_tests_activations.opaque.default, (y,))
    last = graph.call_function(torch.exp, (z,))
    graph.output(last)
    root = nn.Module()
    root.w = nn.Parameter(torch.randn(5))
    for node in (x, y, z, last):
        node.meta["val"] = torch.empty(5)
    found = activations(torch.fx.GraphModule(root, graph))
    assert [n.name for n in found.estimated] == [z.name]
    assert set(found.saved[z]) == {*found.values[y], *found.values[z]}
    assert found.saved[last] == found.values[last]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return torch.cond(x.sum() > 0, lambda y: y.sin().exp(), lambda y: y.cos(), (y,)).sum()


def test_an_op_that_calls_graphs_is_estimated_from_above():
    model, x = Branches(), torch.ones(4, 8)
    gm = sk.capture(model, x)
    found = activations(gm)
    assert [str(n.target) for n in found.estimated] == ["cond"]
    linear = next(n for n in gm.graph.nodes if n.name == "linear")
    (cond,) = found.estimated
    # what it takes, what it yields, and the three results inside of branches
    assert set(found.values[linear]) | set(found.values[cond]) <= set(found.saved[cond])
    assert sum(found.nbytes[s] for s in found.saved[cond]) >= 5 * 4 * 8 * 4


def test_bad_input():
    with pytest.raises(sk.SplitError, match="SK101"):
        activations(nn.Linear(2, 2))
    with pytest.raises(sk.SplitError, match="SK102"):
        activations(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())))
