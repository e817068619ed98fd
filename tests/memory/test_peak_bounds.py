"""A segment never shrinks by more than `PeakBounds` allows when it is extended."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn
from zoographs import specimens

import splitkit as sk
from splitkit.memory.graph_memory import GraphMemory
from splitkit.memory.saved_storages import activations
from splitkit.memory.segment import PeakBounds
from splitkit.search.memory_cuts import MemoryCuts

MODELS = [
    "dropout, exported",
    "many outputs, exported",
    "mutation, exported",
    "tied language model, exported",
    "dynamic batch",
]


class Wide(nn.Module):
    """Towers that read each other, so that many values cross every cut, many of them as views."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        values = [x, torch.sin(x), x.t().contiguous().t()]
        for layer in self.layers:
            values.append(torch.tanh(layer(values[-1])) * values[-3])
            values.append(values[-1].view(2, 8).view(4, 4) + values[-2])
        return values[-1].sum(), values[-4]


@pytest.mark.parametrize("name", ["wide", *MODELS])
def test_a_longer_segment_shrinks_by_no_more_than_the_bounds(name):
    flow = sk.analyze(sk.capture(Wide(), torch.randn(4, 4)) if name == "wide" else specimens()[name].graph)
    held = activations(flow)
    shrunk = 0
    for training in (True, False):
        order = GraphMemory(flow, held, training).order([flow.nodes])
        chain, length = MemoryCuts(order, 2 if training else 0), min(order.length, 24)
        for in_flight in (1, 3):
            bounds = PeakBounds.of(order, in_flight)
            for start, end in combinations(range(length + 1), 2):
                inner = chain.peak(start, end, in_flight)
                for further in range(end + 1, length + 1):
                    less = inner - chain.peak(start, further, in_flight)
                    assert less <= bounds.ends[further] - bounds.ends[end], (start, end, further)
                    shrunk += less > 0
                for earlier in range(start):
                    less = inner - chain.peak(earlier, end, in_flight)
                    assert less <= bounds.starts[start] - bounds.starts[earlier], (earlier, start, end)
                    shrunk += less > 0
    assert shrunk or name != "wide"
