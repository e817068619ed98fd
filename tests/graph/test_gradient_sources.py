"""What an op takes only the shape or dtype of gives it no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.graph.node_values import Gradients


class Formed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        formed = getattr(mask, self.how)(y)
        return formed, (formed * y).sum()


@pytest.mark.parametrize("how", ["type_as", "expand_as", "view_as", "reshape_as", "to"])
def test_the_form_of_another_tensor_gives_no_gradient(how):
    """A pipeline refused Funnel, whose mask takes its dtype from an embedding, with SK803."""
    model, inputs = Formed(how), (torch.randn(2, 4), torch.ones(2, 4))
    formed, _ = model(*inputs)
    gm = sk.capture(model, *inputs)
    fact = sk.split(gm, lambda node: 0).flow.fact(Gradients)
    for value in gm.graph.output_node().all_input_nodes[:1]:
        assert (value in fact.needed) is formed.requires_grad is False
    reads = {n.name for n in fact.needed}
    assert any(name.startswith("sum") for name in reads) and any(name.startswith("mul") for name in reads)
