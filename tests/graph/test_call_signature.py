"""A graph's own signature binds what a call gives to its placeholders."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import splitkit as sk
from splitkit.graph.call_signature import bind_inputs, input_binder
from splitkit.graph.storages import always_aliases


class Net(torch.nn.Module):
    def forward(self, x, pair, *, scale=2.0):
        return x * scale + pair["a"]


def test_values_of_placeholders_in_their_order():
    x, a = torch.ones(2), torch.zeros(2)
    traced = fx.symbolic_trace(lambda x, y: x + y)
    assert [id(value) for value in bind_inputs(traced, (x,), {"y": a})] == [id(x), id(a)]
    gm = sk.capture(Net(), x, {"a": a}, scale=3.0)
    assert [id(v) for v in bind_inputs(gm, (x, {"a": a}), {"scale": 3.0}) if isinstance(v, torch.Tensor)] == [
        id(x),
        id(a),
    ]
    assert input_binder(traced)(a, x) == (a, x)
    with pytest.raises(TypeError):
        bind_inputs(traced, (x,), {})


def test_ops_whose_result_is_always_of_their_first_argument():
    aten = torch.ops.aten
    shares = [aten.view.default, aten.t.default, aten.add_.Tensor, aten.split.Tensor, aten.alias.default]
    others = [aten.add.Tensor, aten.reshape.default, aten.clone.default, torch.sin, "view"]
    assert all(map(always_aliases, shares)) and not any(map(always_aliases, others))
