"""What units add to the memory of their device: never more than what their stage holds, and of one unit as much."""

from __future__ import annotations

import torch
from torch import nn

import splitkit as sk
from splitkit.memory.saved_storages import activations
from splitkit.search.additive_memory import AdditiveMemory
from splitkit.search.placement_model import PlacementModel


class Flat(nn.Module):
    """Two weights that are halves of one memory, as an LSTM on CUDA has them, and an expanded buffer."""

    def __init__(self):
        super().__init__()
        memory = torch.randn(8, 4)
        self.a, self.b = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
        self.register_buffer("e", torch.ones(1).expand(4))

    def forward(self, x):
        return (x @ self.a + self.e).relu() @ self.b


def test_weights_in_one_memory_and_expanded_buffers():
    gm = sk.capture(Flat(), torch.randn(2, 4))
    flow, prices = sk.analyze(gm), sk.costs.flops(gm)
    plan = sk.plan(gm, lambda node: 0)
    (stage,) = sk.stage_costs(flow, plan, prices)
    assert (stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes) == (4 * 32 + 4, 4 * 32, 2 * 4 * 32)
    placing = PlacementModel(flow, prices, [{node: prices.seconds(node) for node in flow.nodes}])
    held = AdditiveMemory.of(placing, activations(gm), "adam")
    assert held.fixed.sum() == stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes
    assert AdditiveMemory.of(placing, None, None).fixed.sum() == stage.parameter_bytes
    (part,) = sk.report(gm, plan).parts
    assert (part.parameters, part.parameter_bytes) == (32, 4 * 36)
