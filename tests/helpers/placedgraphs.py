"""Small graphs with prices, every way to put them into stages, and the load of one by the definition."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import strategies as st
from torch import fx, nn

import splitkit as sk


class Prices:
    """Costs by the names of nodes."""

    def __init__(self, seconds, nbytes=0):
        self._seconds, self._nbytes = seconds, nbytes

    def seconds(self, node):
        return self._seconds[node.name]

    def flops(self, node):
        return self.seconds(node)

    def nbytes(self, node):
        return self._nbytes

    def param_bytes(self, node):
        return 0


@st.composite
def dags(draw, nodes=6):
    """A graph of sums and its prices."""
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    count = draw(st.integers(2, nodes))
    for _ in range(count):
        a, b = (draw(st.sampled_from(values)) for _ in range(2))
        values.append(graph.call_function(torch.add, (a, b)))
    graph.output(tuple(values[1:]))
    gm = fx.GraphModule(nn.Module(), graph)
    sk.extend.propagate(gm, torch.ones(2))
    price = st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0, 2.0])
    return gm, {n.name: draw(price) for n in values[1:]}


def load_of(flow, costs, stage, number, link):
    """By the definition: work, and each value that leaves or enters, once."""
    load = sum(costs.seconds(n) for n in flow.nodes if stage[n] == number)
    for value in flow.nodes:
        readers = {stage[u] for u in value.users if u in stage} - {stage[value]}
        if readers and (number == stage[value] or number in readers):
            load += link.latency + costs.nbytes(value) / link.bandwidth
    return load


def every_chain(flow, count):
    """Every way to put the nodes into stages 0 .. count - 1, none of them empty, no value going back."""
    for choice in product(range(count), repeat=len(flow.nodes)):
        stage = dict(zip(flow.nodes, choice, strict=True))
        if len(set(choice)) == count and all(stage[r] <= stage[n] for n in flow.nodes for r in flow.inputs(n)):
            yield stage


class Deep(nn.Module):
    """Sixteen blocks whose activations are much larger than their weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(16))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()
