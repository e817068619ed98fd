"""torch.fx.experimental.const_fold: what only reads attributes is computed once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental import const_fold

PLACE = "torch.fx.experimental.const_fold"


class Foldable(nn.Module):
    """Constants of parameters, of buffers, of a nested attribute and of a called module."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.inner = nn.Module()
        self.inner.k = nn.Parameter(torch.randn(4))
        self.register_buffer("b", torch.randn(4))
        self.linear = nn.Linear(4, 4)
        self.act = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        w = (self.w + self.w.t()).relu()
        c = self.linear(w) * self.b + self.inner.k
        return self.act(x) @ c + w + self.linear(x), c


class AllConstant(nn.Module):
    """Nothing is left for the second part."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self):
        return (self.w + 1).relu()


class OneConstant(nn.Module):
    """The constant part has one output."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.w.exp()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")
@pytest.mark.filterwarnings("ignore:Failed to fetch module:UserWarning")
@pytest.mark.parametrize("make", [Foldable, AllConstant, OneConstant])
def test_the_folded_model_gives_what_the_model_gives(use, make):
    torch.manual_seed(0)
    model = make()
    inputs = () if make is AllConstant else (torch.randn(4, 4),)
    folded = {}
    for engine in ("torch", "splitkit"):
        spy = use(engine, PLACE)
        folded[engine] = const_fold.split_const_subgraphs(model)
        assert len(spy.made) == 1
    for _ in range(2):  # the first run folds, the second uses what was folded
        for a, b in zip(*(_tensors(m(*inputs)) for m in (folded["splitkit"], model)), strict=True):
            assert torch.equal(a, b)
    assert folded["splitkit"].has_folding_been_run
    shapes = [[(n.op, _plain(n.target)) for n in m.graph.nodes] for m in folded.values()]
    assert shapes[0] == shapes[1]


def _tensors(value):
    return value if isinstance(value, tuple) else (value,)


def _plain(target):
    return target if isinstance(target, str) else target.__name__
