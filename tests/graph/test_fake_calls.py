"""Calls of nodes on stand-ins: which are alike, and what sizes they see."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import splitkit as sk
from splitkit.graph.node_values import StandIn, hint, hints, op_name


def test_sizes_that_only_the_data_decides_count_as_one():
    env = ShapeEnv()
    open_ = env.create_unbacked_symint()
    assert hints((3, open_, 5)) == (3, 1, 5) and hint(open_) == 1 and hints(()) == ()
    rows = torch.export.Dim("rows", min=2)
    gm = sk.capture(torch.export.export(nn.ReLU(), (torch.ones(4, 3),), dynamic_shapes=({0: rows},)))
    (given,) = gm.graph.find_nodes(op="placeholder")
    rows = given.meta["val"].shape[0]
    assert isinstance(rows, torch.SymInt) and hints((rows, 3)) == (4, 3)
    assert hints((rows, 3), {str(rows.node.expr): 7}) == (7, 3)


def test_calls_are_alike_that_differ_in_no_shape_dtype_or_value():
    def key(*args, target=torch.add, autocast=(), **kwargs):
        return StandIn(target, args, kwargs, {}, autocast).key

    x = torch.ones(2, 3)
    assert key(x, x) == key(torch.zeros(2, 3), torch.ones(2, 3)) and key(x, [1, "a"]) == key(x, [1, "a"])
    others = [
        key(x, x, target=torch.mul), key(x, x, autocast=(("cpu",),)), key(torch.ones(3, 2), x), key(x.double(), x),
        key(torch.ones(3, 2).t(), x), key(x, 1), key(x, 2), key(x, x, alpha=2), key(x, [x]),
    ]  # fmt: skip
    assert len({key(x, x), *others}) == len(others) + 1


def test_names_of_targets():
    targets = torch.ops.aten.add_.Tensor, torch.Tensor.add_, "add_", object()
    assert [op_name(target) for target in targets] == ["add_", "add_", "add_", ""]
