"""What must be in one part, with all that lies between, in the order of the graph."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit.search.placement_model import bundled


class Fork(nn.Module):
    """x -> sin -> cos -> tan -> exp, and neg of x between the first two."""

    def forward(self, x):
        y = torch.sin(x)
        z = torch.neg(x)
        return torch.exp(torch.tan(torch.cos(y))) + z


@pytest.mark.parametrize(
    ("together", "found"),
    [
        ([], "sin | neg | cos | tan | exp | add"),
        ([["sin", "tan"]], "sin cos tan | neg | exp | add"),
        ([["tan", "sin"], ["tan", "exp"]], "sin cos tan exp | neg | add"),
        ([["cos", "tan", "neg"]], "sin | neg cos tan | exp | add"),
        ([["neg", "exp"], ["cos", "tan"]], "sin | cos tan | neg exp | add"),
        ([["sin"]], "sin | neg | cos | tan | exp | add"),
    ],
    ids=str,
)
def test_sets_take_what_lies_between_and_bundles_follow_the_graph(together, found):
    gm = fx.symbolic_trace(Fork())
    flow = sk.analyze(gm)
    named = {node.name: node for node in flow.nodes}
    bundles = bundled(flow, flow.nodes, [[named[name] for name in group] for group in together])
    assert " | ".join(" ".join(node.name for node in bundle) for bundle in bundles) == found
