"""The pair of forward and backward that torch's partitioner makes, and what the parts of a split print."""

from __future__ import annotations

import torch
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

import splitkit as sk


def test_a_pair_that_torch_divided_says_what_is_saved():
    joint = sk.capture_joint(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), torch.randn(4, 8), loss=torch.sum)
    pair = joint.partition(min_cut_rematerialization_partition)
    handed = pair.forward.graph.output_node().args[0][pair.outputs :]
    assert pair.saved == tuple(node.name for node in handed) != () and pair.sizes == ()
    assert sum(value.nbytes for value in pair.saved_values) > 0


def test_a_split_says_what_each_part_takes_and_gives():
    gm = sk.capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.ones(2, 8))
    text = str(sk.split(gm, {"linear": 0, "relu": 0, "linear_1": 1}))
    assert "submod_0: 2 ops, 288 B of parameters; takes input_1 (64 B); gives relu (64 B)" in text
    assert "submod_1: 1 ops, 144 B of parameters; takes relu (64 B); gives linear_1 (32 B)" in text
