"""By how much the memory of a stretch falls as it grows: never more than `Falls` says, on real and drawn graphs."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn
from zoographs import specimens

import splitkit as sk
from splitkit.memory.autograd import activations
from splitkit.memory.falls import Falls
from splitkit.memory.lines import Units
from splitkit.search.memorycuts import MemoryCuts

MODELS = [
    "dropout, exported",
    "many outputs, exported",
    "mutation, exported",
    "tied language model, exported",
    "dynamic batch",
]


class Wide(nn.Module):
    """Towers that read each other, so that much is taken and given at every cut, and much of it as views."""

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
def test_a_stretch_falls_by_no_more_than_is_said(name):
    flow = sk.analyze(sk.capture(Wide(), torch.randn(4, 4)) if name == "wide" else specimens()[name].graph)
    held = activations(flow)
    fallen = 0
    for training in (True, False):
        line = Units(flow, held, training).line([flow.nodes])
        chain, length = MemoryCuts(line, 2 if training else 0), min(line.length, 24)
        for flights in (1, 3):
            falls = Falls.of(line, flights)
            for start, end in combinations(range(length + 1), 2):
                inner = chain.peak(start, end, flights)
                for further in range(end + 1, length + 1):
                    fall = inner - chain.peak(start, further, flights)
                    assert fall <= falls.ends[further] - falls.ends[end], (start, end, further)
                    fallen += fall > 0
                for earlier in range(start):
                    fall = inner - chain.peak(earlier, end, flights)
                    assert fall <= falls.starts[start] - falls.starts[earlier], (earlier, start, end)
                    fallen += fall > 0
    assert fallen or name != "wide"
