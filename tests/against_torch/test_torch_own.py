"""What torch tests of its split_module (test/test_fx_experimental.py), asked of both."""

from __future__ import annotations

import operator
from itertools import count

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module as torch_split_module
from torchgraphs import by_name, called, dynamo, graph_of, inputs_of, label, traced
from torchmodels import Documented

import splitkit as sk

X = torch.arange(6.0).view(2, 3)


@pytest.fixture(params=[torch_split_module, sk.split_module], ids=["torch", "splitkit"])
def split_module(request):
    return request.param


def test_round_robin_keeps_values_and_meta(split_module):
    gm = fx.symbolic_trace(Documented())
    for node in gm.graph.nodes:
        node.meta["mark"] = True
    counter = count()
    split = split_module(gm, None, lambda node: next(counter) % 3)
    inputs = torch.rand(3, 4), torch.rand(3, 4)
    assert torch.equal(split(*inputs), gm(*inputs))
    for part in called(split):
        assert all(n.meta["mark"] for n in split.get_submodule(part).graph.nodes if n.op != "output")


def test_parts_that_do_the_same_have_the_same_inputs(split_module):
    def forward(self, x, a0, a1, b0, b1):
        x = x + a0**2 + a1 / 2
        return x + b0**2 + b1 / 2

    counter = count()
    split = split_module(traced(forward), None, lambda n: next(counter) // 4, keep_original_input_name=False)
    assert inputs_of(split.submod_0) == inputs_of(split.submod_1) == ["arg_0", "arg_1", "arg_2"]
    assert split.submod_0.code == split.submod_1.code


def test_dead_code(split_module):
    def forward(self, x):
        alive = x * 2
        x + 2
        return alive

    gm = traced(forward)
    split = split_module(gm, None, by_name(add=1))
    assert split.submod_1.graph.output_node().args == ((),)
    assert torch.equal(split(X), gm(X))


def test_a_part_without_a_value_has_an_output(split_module):
    def write(call, graph):
        call("p1", "add_", graph.placeholder("x"), 1)

    split = split_module(graph_of(write), None, label)
    assert split.submod_1.graph.output_node().args == ((),)
    assert split(X) is None


def test_variadic_keywords(split_module):
    def forward(self, x, **more):
        return x + more["shift"]

    gm = traced(forward)
    split = split_module(gm, None, lambda n: int(n.target is not operator.getitem))
    assert torch.equal(split(X, shift=X), 2 * X)


def test_a_default_argument(split_module):
    class Model(nn.Module):
        def forward(self, x, targets=None):
            return x.sin() if targets is None else x + targets

    gm = fx.symbolic_trace(Model(), concrete_args={"targets": None})
    assert torch.equal(split_module(gm, None, by_name())(X), gm(X))


@pytest.mark.parametrize("keep_original_order", [False, True])
def test_a_graph_without_nodes(split_module, keep_original_order):
    gm = make_fx(lambda x: (x,), tracing_mode="fake")(X)
    split = split_module(gm, None, by_name(), keep_original_order=keep_original_order)
    assert [n.op for n in split.graph.nodes] == ["placeholder", "output"]


class Router(nn.Module):
    """How many rows go to each expert is known only from the data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        values, experts = self.layer(x).topk(2, dim=1)
        rows = torch.zeros(x.size(0), 4).scatter(1, experts, 1).long().sum(0).tolist()
        order = experts.flatten().sort(0)[1].div(2, rounding_mode="trunc")
        return x[order].split(rows, dim=0), values


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_symbols_from_data_enter_the_parts_that_need_them(split_module):
    gm, inputs = dynamo(Router(), torch.rand(6, 8))
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    parts = {n: i // 5 for i, n in enumerate(nodes)}
    split = split_module(gm, None, parts.get, keep_original_order=True, keep_original_node_name=True)
    assert all(map(torch.equal, split(*inputs), gm(*inputs)))
