"""Where torch's split_module refuses, or breaks, what is valid: its error beside our result."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.split_module import split_module as torch_split_module
from torchgraphs import both, by_name, called, dynamo, graph_of, inputs_of, label, named, traced

import splitkit as sk
from splitkit.testing import assert_same

X = torch.ones(2, 2)
AUTOCAST = ("cpu", torch.bfloat16, True, None)


def only_torch_refuses(error, match, gm, callback, *inputs, **flags):
    """torch raises; ours runs like the graph. Returns ours."""
    with pytest.raises(error, match=match):
        torch_split_module(gm, None, callback, **flags)
    ours = sk.split_module(gm, None, callback, **flags)
    assert_same(gm, ours, *inputs)
    return ours


def autocast(call, graph):
    x = graph.placeholder("x")
    enter = call("p0_enter", torch.amp._enter_autocast, *AUTOCAST)
    y = call("p1", torch.mm, call("p0", torch.mm, x, x), x)
    call("p1_exit", torch.amp._exit_autocast, enter)
    return y


def no_grad(call, graph):
    x = graph.placeholder("x")
    call("p0_off", torch._C._set_grad_enabled, False)
    y = call("p1", torch.cos, call("p0", torch.sin, x))
    call("p1_on", torch._C._set_grad_enabled, True)
    return y


def autocast_beside_another_part(call, graph):
    x = graph.placeholder("x")
    enter = call("p0_enter", torch.amp._enter_autocast, *AUTOCAST)
    a = call("p0_mm", torch.mm, x, x)
    call("p0_exit", torch.amp._exit_autocast, enter)
    return call("p1", torch.add, x, 1), call("p0_sub", torch.sub, a, 1)


each_region = pytest.mark.parametrize("region", [autocast, no_grad], ids=lambda r: r.__name__)


def test_parts_0_1_0_in_a_graph_with_autocast():
    only_torch_refuses(AssertionError, "monotonic", graph_of(autocast_beside_another_part), label, X)


@each_region
def test_an_affix_with_a_region(region):
    ours = only_torch_refuses(KeyError, "0", graph_of(region), label, X, partition_affix="pp")
    assert called(ours) == ["submod_pp_0", "submod_pp_1"]


@each_region
def test_string_ids_with_a_region(region):
    ours = only_torch_refuses(TypeError, "not supported between", graph_of(region), lambda n: "ab"[label(n)], X)
    assert called(ours) == ["submod_a", "submod_b"]


@each_region
def test_a_callback_that_counts_with_a_region(region):
    """The counter of torch's own docstring: two nodes to a part."""

    def two_each():
        counter = count()
        return lambda node: next(counter) // 2

    gm = graph_of(region)
    with pytest.raises(KeyError):
        torch_split_module(gm, None, two_each())
    ours = sk.split_module(gm, None, two_each())
    assert_same(gm, ours, X)
    assert called(ours) == ["submod_0", "submod_1"]


@each_region
def test_how_often_the_callback_is_called(region):
    def calls(split_module):
        counts = Counter()
        split_module(graph_of(region), None, lambda n: counts.update([n.name]) or label(n))
        return set(counts.values())

    assert min(calls(torch_split_module)) >= 3
    assert calls(sk.split_module) == {1}


def test_the_original_order_where_a_later_part_appears_first():
    def forward(self, x, y):
        return (x + 1) - y * 2

    gm = traced(forward)
    ours = only_torch_refuses(KeyError, "mul", gm, by_name(mul=1), X, X, keep_original_order=True)
    assert called(ours) == ["submod_1", "submod_0"]


def test_the_original_order_with_a_parameter_that_only_the_output_uses():
    def forward(self, x):
        return x + 1, self.w

    gm = traced(forward, w=nn.Parameter(torch.ones(2)))
    only_torch_refuses(KeyError, "w", gm, by_name(), X, keep_original_order=True)


def test_variadic_keywords_with_original_node_names():
    def forward(self, x, *rest, **more):
        return x + more["shift"] - rest[0]

    gm = traced(forward)
    torchs, ours = both(gm, by_name(), keep_original_node_name=True)
    with pytest.raises(TypeError):
        torchs(X, X, shift=X)
    assert torch.equal(ours(X, X, shift=3 * X), gm(X, X, shift=3 * X))


def test_keywords_of_the_signature_with_original_node_names():
    gm, [x] = dynamo(torch.sin, X)
    torchs, ours = both(gm, by_name(), keep_original_node_name=True)
    [keyword] = (str(n.target) for n in gm.graph.nodes if n.op == "placeholder")
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
        torchs(**{keyword: x})
    assert torch.equal(ours(**{keyword: x})[0], X.sin())


def test_a_parameter_called_submod_0():
    def forward(self, x):
        return x * self.submod_0

    gm = traced(forward, submod_0=nn.Parameter(torch.full((2,), 5.0)))
    torchs, ours = both(gm, by_name())
    with pytest.raises(TypeError, match="GraphModule"):
        torchs(X)
    assert_same(gm, ours, X)


class Dicts(nn.Module):
    def forward(self, batch):
        return {"sum": batch["a"] + batch["b"]}


def test_dict_inputs_and_outputs_of_an_exported_module():
    batch = {"a": X, "b": X}
    gm = torch.export.export(Dicts(), (batch,)).module()
    torchs, ours = both(gm, by_name())
    with pytest.raises(TypeError, match="positional argument"):
        torchs(batch)
    assert torch.equal(ours(batch)["sum"], 2 * X)


def test_the_output_of_an_exported_module():
    gm = torch.export.export(nn.ReLU(), (X,)).module()
    torchs, ours = both(gm, by_name())
    assert isinstance(torchs(X), tuple)
    assert torch.equal(ours(X), gm(X))


class Handle:
    """Something that is not a tensor and no number, as a stream is not."""


def give(x, value):
    return value


def take(x, value):
    return x + 1


OPAQUE = [torch.device("cpu"), torch.float32, slice(0, 3), Handle()]


@pytest.mark.parametrize("value", OPAQUE, ids=lambda v: type(v).__name__)
def test_an_opaque_value_that_crosses(value):
    def write(call, graph):
        x = graph.placeholder("x")
        made = call("p0", give, x, graph.get_attr("opaque"))
        made.meta["example_value"] = value
        return call("p1", take, x, made)

    gm = graph_of(write, opaque=value)
    ours = only_torch_refuses(AssertionError, "cannot extract sympy expressions", gm, label, X)
    assert inputs_of(ours.submod_1) == ["x", "p0"]


def test_a_symbol_from_data_that_no_node_gives():
    def write(call, graph):
        x = graph.placeholder("x")
        return call("p1", torch.add, call("p0", torch.ops.aten.nonzero.default, x), 1)

    gm, shapes = graph_of(write), ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        rows = shapes.create_unbacked_symint()
        named(gm)["p0"].meta["example_value"] = torch.empty((rows, 1), dtype=torch.int64)
    only_torch_refuses(KeyError, "u0", gm, label, X)


def test_a_symbol_of_a_shape_that_no_input_gives():
    gm = make_fx(lambda x: (x + 1).cos(), tracing_mode="symbolic")(torch.rand(5, 3))
    for node in gm.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    only_torch_refuses(KeyError, "s", gm, by_name(cos=1), torch.rand(5, 3))
