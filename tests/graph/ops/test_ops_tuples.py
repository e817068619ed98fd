from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from opnodes import ROOT, Layer, X, Y, call, method, module, stranger
from torch import fx, nn

from splitkit.graph.ops import is_tuple

aten = torch.ops.aten


TUPLES = [
    (call(torch.max, X), False),
    (call(torch.max, X, 1), True),
    (call(torch.max, X, Y), False),
    (call(torch.max, X, dim=1), True),
    (call(torch.topk, X, 2), True),
    (call(torch.split, X, 2), True),
    (call(torch.std, X), False),
    (call(torch.where, X), True),
    (call(torch.where, X, X, Y), False),
    (call(aten.unbind.int, X), True),
    (call(aten.native_layer_norm.default, X, [4], None, None, 1e-5), True),
    (call(aten.add.Tensor, X, Y), False),
    (call(getattr, X, "shape"), True),
    (call(getattr, X, "dtype"), False),
    (call(operator.add, X, 1), False),
    (call(F.max_pool2d, X, 2), False),
    (call(F.max_pool2d, X, 2, return_indices=True), True),
    (call(F.multi_head_attention_forward, X), True),
    (call(stranger, X, Y), None),
    (method("chunk", X, 2), True),
    (method("size", X), True),
    (method("size", X, 0), False),
    (method("frobnicate", X), None),
    (call(operator.getitem, call(torch.topk, X, 2), 0), False),
    (call(operator.getitem, call(stranger, X, Y), 0), None),
    (call(operator.getitem, call(torch.split, X, 2), slice(1)), True),
]


@pytest.mark.parametrize(("node", "expected"), TUPLES, ids=lambda v: str(v))
def test_is_tuple(node: fx.Node, expected: bool | None) -> None:
    assert is_tuple(node, ROOT) is expected


def test_meta_decides_about_tuples_and_modules_have_their_own() -> None:
    node = call(stranger, X, Y)
    node.meta["val"] = (1, 2)
    assert is_tuple(node) is True
    node.meta["val"] = torch.ones(1)
    assert is_tuple(node) is False
    for m, expected in (
        (nn.LSTM(2, 2), True),
        (nn.Linear(2, 2), False),
        (Layer(), None),
        (nn.MaxPool1d(2, return_indices=True), True),
    ):
        node, root = module(m)
        assert is_tuple(node, root) is expected
    node, root = module(nn.LSTM(2, 2))
    assert is_tuple(node.graph.call_function(operator.getitem, (node, 1)), root) is True
    assert is_tuple(node.graph.call_function(operator.getitem, (node, 0)), root) is False
