from __future__ import annotations

import functools
import math
import operator
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from handgraphs import graph_of
from opnodes import FRESH, ROOT, X, Y, call, method, seen
from torch import fx, nn

import splitkit as sk
from splitkit.graph.ops import Effects, effects_of
from splitkit.policies import RoundRobin
from splitkit.testing import assert_same

aten = torch.ops.aten


COMMON = [
    (aten.linear.default, X, Y),
    (aten.addmm.default, X, Y, X),
    (aten.mm.default, X, Y),
    (aten.bmm.default, X, Y),
    (aten.matmul.default, X, Y),
    (aten.conv2d.default, X, Y),
    (aten.convolution.default, X, Y, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    (aten.layer_norm.default, X, [4]),
    (aten.native_layer_norm.default, X, [4], None, None, 1e-5),
    (aten.gelu.default, X),
    (aten.silu.default, X),
    (aten.add.Tensor, X, Y),
    (aten.mul.Tensor, X, 2),
    (aten.softmax.int, X, -1),
    (aten._softmax.default, X, -1, False),
    (aten.embedding.default, X, Y),
    (aten.cat.default, [X, Y]),
    (aten.mean.dim, X, [1]),
    (aten.where.self, X, X, Y),
    (aten.cross_entropy_loss.default, X, Y),
    (aten.pad.default, X, [1, 1]),
    (aten.einsum.default, "ij,jk->ik", [X, Y]),
    (aten.max_pool2d.default, X, [2, 2]),
    (F.linear, X, Y),
    (F.relu, X),
    (F.gelu, X),
    (F.silu, X),
    (F.softmax, X, -1),
    (F.layer_norm, X, (4,)),
    (F.conv2d, X, Y),
    (F.embedding, X, Y),
    (F.cross_entropy, X, Y),
    (F.normalize, X),
    (F.interpolate, X),
    (F.pad, X, (0, 1)),
    (F.one_hot, X),
    (F.max_pool2d, X, 2),
    (F.scaled_dot_product_attention, X, Y, Y),
    (torch.add, X, Y),
    (torch.cat, [X, Y], 1),
    (torch.matmul, X, Y),
    (torch.sort, X),
    (torch.where, X, X, Y),
    (torch.arange, X),
    (torch.tensor, 1.0),
    (torch.is_grad_enabled,),
    (torch.sym_int, X),
    (operator.add, X, Y),
    (operator.mul, X, 2),
    (operator.matmul, X, Y),
    (math.sqrt, X),
    (len, X),
    (isinstance, X, int),
]


@pytest.mark.parametrize("parts", COMMON, ids=lambda p: getattr(p[0], "__name__", str(p[0])))
def test_common_ops_are_known_to_be_harmless(parts: tuple[Any, ...]) -> None:
    assert seen(call(*parts)) == FRESH


TABLE = [
    # target, arguments, keywords, writes, aliases, random, impure
    (F.relu, (X,), {"inplace": True}, "x", "x", False, False),
    (F.relu, (X, True), {}, "x", "x", False, False),
    (F.relu, (X, False), {}, "", "", False, False),
    (F.dropout, (X,), {}, "", "", True, False),
    (F.dropout, (X, 0.5, False), {}, "", "x", False, False),
    (F.dropout, (X,), {"p": 0.0}, "", "x", False, False),
    (F.dropout, (X, 0.5, Y), {}, "", "x", True, False),
    (F.dropout, (X,), {"training": True, "inplace": True}, "x", "x", True, False),
    (F.alpha_dropout, (X,), {}, "", "x", False, False),
    (aten.dropout.default, (X, 0.5, True), {}, "", "", True, False),
    (aten.dropout.default, (X, 0.5, False), {}, "", "x", False, False),
    (aten.dropout_.default, (X, 0.5, True), {}, "x", "x", True, False),
    (aten.native_dropout.default, (X, 0.5, False), {}, "", "", False, False),
    (aten.rrelu.default, (X,), {}, "", "", False, False),
    (aten.rrelu.default, (X, 0.1, 0.2, True), {}, "", "", True, False),
    (aten.scaled_dot_product_attention.default, (X, X, X), {}, "", "", False, False),
    (aten.scaled_dot_product_attention.default, (X, X, X, None, 0.1), {}, "", "", True, False),
    (aten.scaled_dot_product_attention.default, (X, X, X), {"dropout_p": Y}, "", "", True, False),
    (F.scaled_dot_product_attention, (X, X, X), {"dropout_p": 0.1}, "", "", True, False),
    (aten.lstm.input, (X, [Y], [], True, 2, 0.5, False, False, True), {}, "", "", False, False),
    (aten.lstm.input, (X, [Y], [], True, 2, 0.5, True, False, True), {}, "", "", True, False),
    (torch.lstm, (X, [Y], [], True, 2, 0.0, True, False, True), {}, "", "", False, False),
    (aten.batch_norm.default, (X, None, None, Y, "$z", True, 0.1, 1e-5, False), {}, "y z", "", False, False),
    (aten.batch_norm.default, (X, None, None, Y, "$z", False, 0.1, 1e-5, False), {}, "", "", False, False),
    (aten._native_batch_norm_legit.default, (X, None, None, Y, "$z", False, 0.1, 1e-5), {}, "", "", False, False),
    (F.batch_norm, (X, Y, "$z"), {"training": True}, "y z", "", False, False),
    (F.batch_norm, (X, Y, "$z"), {}, "", "", False, False),
    (F.instance_norm, (X, Y, "$z"), {}, "y z", "", False, False),
    (F.embedding, (X, Y), {"max_norm": 1.0}, "y x", "", False, False),
    (F.gumbel_softmax, (X,), {}, "", "", True, False),
    (
        F.multi_head_attention_forward,
        (X, X, X, 4, 2, None, None, None, None, False, 0.1, Y, None),
        {},
        "",
        "",
        True,
        False,
    ),
    (torch.rand, (3,), {}, "", "", True, False),
    (torch.rand_like, (X,), {}, "", "", True, False),
    (torch.bernoulli, (X,), {}, "", "", True, False),
    (torch.add, (X, Y), {"out": "$z"}, "z", "z", False, False),
    (torch.sort, (X,), {"out": [Y, "$z"]}, "y z", "y z", False, False),
    (aten._foreach_add_.List, ([X, Y], ["$z"]), {}, "x y", "", False, False),
    (aten.chunk.default, (X, 2), {}, "", "x", False, False),
    (aten.add.out, (X, X), {"out": Y}, "y", "y", False, False),
    (aten.einsum.default, ("ij->ji", [X]), {}, "", "x", False, False),
    (torch.split, (X, 2), {}, "", "x", False, False),
    (torch.meshgrid, (X, Y), {}, "", "x y", False, False),
    (torch.ops.aten.relu_, (X,), {}, "x", "x", False, False),
    (operator.iadd, (X, Y), {}, "x", "x y", False, False),
    (operator.setitem, (X, 0, Y), {}, "x", "x y", False, False),
    (operator.getitem, (X, 0), {}, "", "x", False, False),
    (getattr, (X, "T"), {}, "", "x", False, False),
    (max, (X, Y), {}, "", "x y", False, False),
    (print, (X,), {}, "", "", False, True),
    (warnings.warn, ("!",), {}, "", "", False, True),
    (torch.manual_seed, (0,), {}, "", "", True, True),
    (torch.ops.aten._print.default, ("!",), {}, "", "", False, True),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{getattr(r[0], '__name__', r[0])}{r[1]}{r[2]}")
def test_functions(row: tuple[Any, ...]) -> None:
    target, args, kwargs, writes, aliases, random, impure = row
    expected = (set(writes.split()), set(aliases.split()), random, impure)
    assert seen(call(target, *args, **kwargs)) == expected


@pytest.mark.parametrize(
    ("name", "args", "writes", "aliases", "random"),
    [
        ("add", (Y,), "", "", False),
        ("add_", (Y,), "x", "x", False),
        ("view", (2, 3), "", "x", False),
        ("permute", (1, 0), "", "x", False),
        ("float", (), "", "x", False),
        ("to", (torch.float16,), "", "x", False),
        ("contiguous", (), "", "x", False),
        ("chunk", (2,), "", "x", False),
        ("item", (), "", "", False),
        ("size", (), "", "", False),
        ("numpy", (), "", "x", False),
        ("masked_fill", (Y, 0.0), "", "", False),
        ("masked_fill_", (Y, 0.0), "x", "x", False),
        ("copy_", (Y,), "x", "x", False),
        ("set_", (Y,), "x", "x y", False),
        ("normal_", (), "x", "x", True),
        ("bernoulli", (), "", "", True),
        ("__setitem__", (0, Y), "x", "x y", False),
        ("__rsub__", (1,), "", "", False),
    ],
)
def test_methods(name: str, args: tuple[Any, ...], writes: str, aliases: str, random: bool) -> None:
    assert seen(method(name, X, *args)) == (set(writes.split()), set(aliases.split()), random, False)


@pytest.mark.parametrize(
    "target", [torch._assert, torch._check, aten._assert_async.msg, aten.sym_constrain_range.default]
)
def test_assertions_only_raise(target: Any) -> None:
    assert effects_of(call(target, X, "why"), ROOT) == Effects(check=True)


@pytest.mark.parametrize(
    "node",
    [
        call(F.normalize, X, 2.0, 0, 1e-12, Y),
        call(torch.norm, X, 2, 0, False, Y),
        call(torch.tensordot, X, X, 1, Y),
        call(aten.add, X, X, out=Y),
        call(torch.add, X, X, out=Y),
    ],
)
def test_an_out_by_position_is_written(node: Any) -> None:
    assert seen(node)[:2] == ({"y"}, {"y"})


def test_the_guard_call_of_export_writes_nothing():
    class Model(nn.Module):
        def forward(self, x, y):
            return x.sin() + y.cos()

    gm = torch.export.export(Model(), (torch.ones(2), torch.ones(2))).module()
    flow = sk.analyze(gm)
    assert not any(flow.after[n] for n in flow.nodes)
    assert_same(gm, sk.split(gm, RoundRobin(2)), torch.ones(2), torch.ones(2))


def test_the_power_of_tensors_may_be_called_as_a_function():
    gm = graph_of(lambda g: g.output(g.call_function(torch.Tensor.__pow__, (g.placeholder("x"), 2))))
    assert list(sk.split(gm, {"pow_1": 0}).parts) == [0]


def test_a_wrapper_of_a_torch_function_is_unknown():
    """`functools.wraps` copies `__name__` and `__module__`, by which functions are known."""

    @functools.wraps(F.relu)
    def noisy(x):
        return F.relu(x) + torch.rand_like(x)

    gm = graph_of(lambda g: g.output(g.call_function(noisy, (g.placeholder("x"),))))
    assert sk.analyze(gm).once


def test_the_products_of_transformers_experts_are_not_random():
    import transformers.integrations.moe  # noqa: F401  (defines the op)

    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "xwo"]
    node = graph.call_function(torch.ops.transformers.grouped_mm_fallback.default, tuple(inputs))
    graph.output(node)
    assert node not in sk.analyze(fx.GraphModule(nn.Module(), graph)).once
