"""Joint graphs made by hand, one node at a time, for tests of what is saved and of orders."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx, nn

from splitkit.graph.dataflow import analyze
from splitkit.training.flow import JointFlow

aten = torch.ops.aten


class Hand:
    """Builds a joint graph; sizes are KiB. Names are nodes: ``h["x"]``."""

    def __init__(self):
        self.graph = fx.Graph()
        self.nodes = {}
        self.tangents = []

    def __getitem__(self, name):
        return self.nodes[name]

    def _add(self, node, name, value, tag=None):
        node.meta["val"] = value
        if tag:
            node.meta["partitioner_tag"] = tag
        self.nodes[name] = node

    def inputs(self, **sizes):
        for name, kib in sizes.items():
            self._add(self.graph.placeholder(name), name, _tensor(kib))
        return self

    def gradients(self, **sizes):
        for name, kib in sizes.items():
            self._add(self.graph.placeholder(name), name, _tensor(kib))
            self.tangents.append(self[name])
        return self

    def op(self, name, kib, *reads, tag="is_forward", target=aten.cat.default):
        args = ([self[r] for r in reads],) if target is aten.cat.default else tuple(self[r] for r in reads)
        self._add(self.graph.create_node("call_function", target, args, name=name), name, _tensor(kib), tag)
        return self

    def back(self, name, kib, *reads, **options):
        return self.op(name, kib, *reads, tag="is_backward", **options)

    def view(self, name, read, tag="is_forward"):
        node = self.graph.create_node("call_function", aten.alias.default, (self[read],), name=name)
        self._add(node, name, self[read].meta["val"].view(-1), tag)
        return self

    def pair(self, name, first, second, *reads, tag="is_forward"):
        """A tuple of two, and its members ``name_0`` and ``name_1``."""
        value = (_tensor(first), _tensor(second))
        args = (self[reads[0]], 0)
        self._add(self.graph.create_node("call_function", aten.max.dim, args, name=name), name, value, tag)
        for i in range(2):
            item = self.graph.create_node("call_function", getitem, (self[name], i), name=f"{name}_{i}")
            self._add(item, f"{name}_{i}", value[i], tag)
        return self

    def flow(self, outputs, gradients):
        """The facts; outputs and gradients in words: ``flow("loss", "gx gw")``."""
        given = outputs.split()
        self.graph.output(tuple(self[n] for n in (*given, *gradients.split())))
        gm = fx.GraphModule(nn.Module(), self.graph)
        return JointFlow.of(analyze(gm), self.tangents, len(given), ())


def _tensor(kib):
    return torch.empty(kib * 256, device="meta")
