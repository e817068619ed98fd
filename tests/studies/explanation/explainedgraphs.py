"""Small graphs whose plans are explained, and brute force over their stages."""

from __future__ import annotations

import torch
from torch import nn

import splitkit as sk
from splitkit.graph.dataflow import waits_for


class Towers(nn.Module):
    """A tower of layers, a skip over all of them, a side branch, and a written buffer."""

    def __init__(self, write=False):
        super().__init__()
        self.write = write
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 32)

    def forward(self, x):
        y = self.layers[0](x)
        side = y.sin()
        if self.write:
            side = side.mul(2)
            side.add_(1)
        for layer in self.layers[1:]:
            y = layer(y).relu()
        return self.head(y + side + x)


def towers(write=False):
    torch.manual_seed(0)
    return sk.capture(Towers(write), torch.ones(2, 4))


class Costs:
    """Prices by name; an op is as long as its bytes are many, and the head longest."""

    note = "by hand"
    unit = "s"

    def __init__(self, gm, head=9.0):
        self.counted, self.head = sk.costs.flops(gm), head

    def seconds(self, node):
        if not node.op.startswith("call"):
            return 0.0
        # binary fractions, whose sums are exact in any order
        return self.head if "head" in str(node.meta["nn_module_stack"]) else 1.0 + len(node.name) / 16

    def nbytes(self, node):
        return self.counted.nbytes(node)

    def flops(self, node):
        return self.counted.flops(node)

    def param_bytes(self, node):
        return self.counted.param_bytes(node)


def stage_plans(flow, count):
    """Yield every plan of so many non-empty stages in which nothing waits for a later stage, as node -> stage."""

    def extended(at, nodes):
        if not nodes:
            if len(set(at.values())) == count:
                yield dict(at)
            return
        node, *left = nodes
        for stage in range(max((at[before] for before in waits_for(flow, node)), default=0), count):
            yield from extended(at | {node: stage}, left)

    yield from extended({}, list(flow.nodes))


def runs(flow, at):
    """Whether nothing waits for a later stage."""
    return all(at[before] <= at[node] for node in at for before in waits_for(flow, node))
