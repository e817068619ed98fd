"""Two small models and their training steps, of which tests store all that the library says."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import splitkit as sk
from splitkit import costs


class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, wide), nn.Linear(wide, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Towers(nn.Module):
    """Two branches of unequal work that meet, a value that is read far behind where it is made, a shared weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.left = nn.Sequential(*map(Block, (64, 16, 48)))
        self.right = nn.Sequential(Block(32), nn.Linear(16, 16), nn.Tanh())
        self.last = nn.Sequential(*map(Block, (24, 64)))
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = nn.Parameter(torch.ones(8, 16))

    def forward(self, x):
        first = self.embed(x)
        met = self.left(first) * self.right(first)
        return self.head(self.last(met) + first) + nn.functional.linear(first, self.head.weight)


@cache
def forward():
    gm = sk.capture(Towers(), torch.randn(32, 8))
    return gm, sk.analyze(gm), costs.training(costs.roofline(gm, "h100"))


@cache
def chain():
    model = nn.Sequential(nn.Linear(8, 16), Block(32), nn.Tanh(), Block(16), nn.Linear(16, 4))
    gm = sk.capture(model, torch.randn(32, 8))
    return gm, sk.analyze(gm), costs.training(costs.roofline(gm, "h100"))


@cache
def joint(*widths):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), *map(Block, widths), nn.Linear(16, 4))
    found = sk.capture_joint(model, torch.randn(32, 8), loss=torch.sum)
    return found, found.flow, costs.roofline(found.graph_module, "h100")
