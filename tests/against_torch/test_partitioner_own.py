"""What torch tests of its CapabilityBasedPartitioner, asked of both.

After ``test/test_fx_passes.py`` (TestFXGraphPasses) and ``test/fx/test_partitioner_order.py`` of PyTorch,
Copyright (c) Facebook, Inc. and its affiliates and the PyTorch contributors, under a BSD-3-Clause licence
(https://github.com/pytorch/pytorch/blob/main/LICENSE). ``fuse_by_partitions`` is asked through ``fuse_partitions``.
"""

from __future__ import annotations

import operator
import sys

import pytest
import torch
from partitionergraphs import PARTITIONERS, Rule, names
from torch import fx, nn
from torch.fx.passes.infra.partitioner import Partition

SUPPORTED = {
    operator.add,
    operator.getitem,
    torch.ops.aten.view,
    torch.ops.aten.permute,
    torch.ops.aten.std_mean,
}


@pytest.fixture(params=PARTITIONERS.values(), ids=PARTITIONERS)
def partitioner_class(request):
    return request.param


def is_supported(node):
    return node.op == "call_function" and node.target in SUPPORTED


def forward1(a, b, c):
    add = a + b
    add_1 = add + b
    add_2 = add_1 + c
    relu_1 = add_2.relu()
    add_3 = add_1 + add_2
    add_4 = add_1 + relu_1 + add_3
    relu_2 = add_4.relu()
    add_5 = relu_2 + add_4
    add_6 = add_5 + add_4
    return add_4, add_6


def forward2(a, b, _):
    add = a + b
    add_1 = add + b
    relu_1 = add_1.relu()
    add_3 = add_1 + relu_1
    add_4 = add_1 + add_3
    return add_4, add_1


def forward3(a, b, c):
    return a + b, a + c, b + c


def forward4(a, b, c):
    add = a + b
    add_1 = a + c
    add_2 = b + c
    return torch.where(add > 0, add_1, add_2)


def forward5(a, b, c):
    add = a + 1
    return add.relu(), add + 2


def forward6(a, b, c):
    add = a + 1
    return add.relu(), add.relu()


def forward7(a, b, c):
    add = a + 1
    add_1 = add + 2
    add_2 = add + 1
    add_3 = add_2 + 1
    return add_3, add_1


def forward8(a, b, c):
    add = a + 1
    add_1 = add + 2
    add_2 = add + 1
    return add_2 + add_1


def forward9(a, b, c):
    add = a + 1
    return torch.stack([add + 1, add + 1, add + 1])


def forward10(a, b, c):
    add = a + 1
    add_1 = add + 1
    add_2 = add + 1
    add_3 = add + add_2
    return torch.stack([add_1, add_2, add_3])


def forward11(a, b, c):
    add = a + 1
    add_1 = add.relu()
    add_2 = add + add_1
    return torch.stack([add_1, add_2, add.relu()])


def forward12(a, b, c):
    b0 = a + 1.0
    c0 = a + 1.5
    x0 = b0.relu()
    x1 = c0.relu()
    b1 = b0 + x1
    c2 = x0 + c0
    return b1, c2


def forward13(a, b, c):
    a0, a1, _, _ = a.split(1, 0)
    return (a0 + b) + (a1 + c)


def forward14(a, b, c):
    a0, _ = torch.ops.aten.std_mean(a)
    return a0 + 1.0


def forward15(a, b, c):
    a0 = torch.ops.aten.view(a, [2, 2])
    a1 = torch.ops.aten.permute(a0, [1, 0])
    a2 = a1 + 1.0
    a3 = torch.ops.aten.permute(a2, [1, 0])
    a4 = a3 + 1.0
    a5 = torch.ops.aten.permute(a4, [1, 0])
    return torch.ops.aten.permute(a5, [1, 0])


def forward16(a, b, c):
    return forward15(a - 1.0, b, c) - 1.0


def forward17(a, b, c, d, e, f):
    return a + b, c + d, e + f


def forward18(a, b, c):
    a0, _ = torch.ops.aten.var_mean(a)
    return a0


PERMUTED = ["add_1", "add", "permute_1", "view", "permute_2", "permute_3", "permute"]
EXPECTED = [
    (forward1, [["add_7", "add_6"], ["add_5", "add_4", "add_3"], ["add_2", "add_1", "add"]], False),
    (forward2, [["add_3", "add_2"], ["add_1", "add"]], False),
    (forward3, [["add_2", "add_1", "add"]], False),
    (forward4, [["add_2", "add_1", "add"]], False),
    (forward5, [["add_1", "add"]], False),
    (forward6, [["add"]], False),
    (forward7, [["add_3", "add_2", "add", "add_1"]], False),
    (forward8, [["add_3", "add_2", "add", "add_1"]], False),
    (forward9, [["add_3", "add_2", "add_1", "add"]], False),
    (forward10, [["add_3", "add_2", "add", "add_1"]], False),
    (forward11, [["add_1"], ["add"]], False),
    (forward12, [["add_2", "add_3"], ["add", "add_1"]], False),
    (forward13, [["add_2", "add_1", "add"]], False),
    (forward14, [["add", "std_mean", "getitem", "getitem_1"]], False),
    (forward15, [["permute_1", "add_1", "add"]], True),
    (forward15, [PERMUTED], False),
    (forward16, [["permute_1", "add_1", "add"]], True),
    (forward16, [PERMUTED], False),
    (forward17, [["add", "add_1", "add_2"]], False),
    (forward18, [], False),
]


@pytest.mark.parametrize(("function", "expected", "bookends"), EXPECTED)
def test_partitions(partitioner_class, function, expected, bookends):
    gm = fx.symbolic_trace(function)
    transparent = ["torch.ops.aten.view", "torch.ops.aten.permute"] if bookends else []
    partitioner = partitioner_class(gm, Rule(is_supported), True, non_compute_ops=transparent)
    partitions = partitioner.propose_partitions()
    if bookends:
        partitioner.remove_bookend_non_compute_ops(partitions)
    assert [set(found) for found in names(partitions)] == [set(wanted) for wanted in expected]
    fused = partitioner.fuse_partitions(partitions)
    inputs = [torch.rand(4) for n in gm.graph.nodes if n.op == "placeholder"]
    torch.testing.assert_close(fused(*inputs), function(*inputs))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.linear2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.param = nn.Parameter(torch.rand(4, 4))

    def forward(self, a, b, c):
        add = a + b
        linear_1 = self.linear(add)
        add_1 = add + c
        add_2 = add_1 + self.param
        add_3 = add_1 + linear_1
        add_4 = add_2 + add_3
        linear_2 = self.linear2(add_4)
        add_5 = linear_2 + add_4
        add_6 = add_5 + a
        return add_4, add_6, add_6.relu()


def fused_by_names(partitioner_class, model, partitions):
    gm = fx.symbolic_trace(model)
    nodes = {node.name: node for node in gm.graph.nodes}
    partitions = [Partition(i, [nodes[name] for name in found]) for i, found in enumerate(partitions)]
    return partitioner_class(gm, Rule(is_supported)).fuse_partitions(partitions)


@pytest.mark.parametrize(
    "partitions",
    [
        [["add", "add_1"], ["add_5", "add_6"]],
        [["add", "add_1", "add_2"]],
        [["add_2", "add_3"]],
        [["add_3", "add_4"]],
        [["add_6", "add_5"]],
        [["add_4", "add_1", "add_3", "add_2"]],
        [["add_5", "add_6"], ["add_1", "add_2", "add_3", "add_4"]],
        [["add_5", "linear2"]],
        [["add_6", "relu"]],
        [["param", "add_2"]],
        [["param", "add_1", "linear"]],
        [["add", "linear", "add_1", "param", "add_2", "add_3", "add_4", "linear2", "add_5", "add_6", "relu"]],
    ],
)
def test_fuse_partitions_of_ones_own(partitioner_class, partitions):
    model, inputs = Model(), [torch.rand(4) for _ in range(3)]
    torch.testing.assert_close(fused_by_names(partitioner_class, model, partitions)(*inputs), model(*inputs))


@pytest.mark.parametrize(
    "partitions",
    [
        [["add", "add_1"], ["add_1", "add_5", "add_6"]],
        [["add", "add_1", "add_3"]],
        [["add_4", "add_5"]],
        [["relu", "add_5"]],
    ],
)
def test_what_cannot_be_fused(partitioner_class, partitions):
    with pytest.raises((AssertionError, ValueError)):
        fused_by_names(partitioner_class, Model(), partitions)


def test_a_deep_model(partitioner_class):
    def forward(a, b, c):
        o = a + b + 1.0
        for _ in range(sys.getrecursionlimit() + 1):
            o = o - c
        return o

    partitioner = partitioner_class(fx.symbolic_trace(forward), Rule(is_supported), True)
    assert names(partitioner.propose_partitions()) == [["add", "add_1"]]


def two_branches(x):
    return (x + 1) + 1, (x * 2) * 2


def test_skip_horizontal_fusion(partitioner_class):
    gm, rule = fx.symbolic_trace(two_branches), Rule(lambda node: node.op == "call_function")
    assert len(partitioner_class(gm, rule, True).propose_partitions()) == 1
    assert len(partitioner_class(gm, rule, True, skip_horizontal_fusion=True).propose_partitions()) == 2


def test_the_order_of_nodes(partitioner_class):
    """Every node is supported, inputs and the output too."""

    class Dummy(partitioner_class):
        def __init__(self, gm):
            super().__init__(gm, Rule(lambda node: True, every=True), allows_single_node_partition=True)

    def forward(x):
        y = torch.add(x, x)
        return torch.add(y, x)

    for _ in range(3):
        gm = fx.symbolic_trace(forward)
        assert names(Dummy(gm).propose_partitions()) == [[n.name for n in gm.graph.nodes]]
