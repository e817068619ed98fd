"""Stages of a capture in another mode, beside the stages that train."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import PipelineError
from splitkit.runtime.ranks.evaluation import split_like

X = torch.ones(2, 4)


class Chain(nn.Module):
    """A product, ops without weights of which some make tuples, a product, and a loss."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        a, b = (self.first(x).tanh().sin() + 1).chunk(2, dim=1)
        return (self.last(torch.cat([a.exp(), b], dim=1).cos()) ** 2).mean()


def in_stages(model, words):
    """A split whose stages have the ops that these words name."""
    gm = sk.capture(model, X)
    stage = {name: i for i, names in enumerate(words) for name in names.split()}
    return sk.split(gm, sk.plan(gm, lambda node: stage[node.name]))


@pytest.mark.parametrize(
    "words",
    [
        ["linear tanh", "sin add chunk getitem getitem_1 exp cat cos", "linear_1 pow_1 mean"],
        ["linear tanh", "sin add chunk getitem getitem_1", "exp cat cos", "linear_1 pow_1", "mean"],
        ["linear tanh sin add chunk getitem getitem_1 exp cat cos linear_1", "pow_1", "mean"],
    ],
    ids=["between", "several", "behind"],
)
def test_stages_without_weights_get_nodes_in_their_order(words):
    model = Chain()
    trained, other = in_stages(model, words), sk.capture(model.eval(), X)
    found = split_like(other, trained)
    assert list(found.names) == list(trained.names)
    assert all(any(n.op == "call_function" for n in part.graph.nodes) for part in found.parts.values())
    assert torch.equal(found(X), model(X))


def test_a_stage_that_can_have_no_node_is_refused():
    """Nothing stands between the two products of the other capture."""
    trained = in_stages(Chain(), ["linear tanh", "sin add chunk getitem getitem_1 exp cat cos", "linear_1 pow_1 mean"])

    class Short(Chain):
        def forward(self, x):
            return self.last(self.first(x))

    with pytest.raises(PipelineError, match="SK801: in this graph, the stages 1 would be empty"):
        split_like(sk.capture(Short(), X), trained)
