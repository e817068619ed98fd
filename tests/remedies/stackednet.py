"""A stack of six layers, captured once as a forward graph and once as a training step, with prices."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import splitkit as sk

X = torch.ones(4, 16)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


@cache
def forward():
    gm = sk.capture(Net(), X)
    return gm, sk.costs.roofline(gm, "h100")


@cache
def joint():
    made = sk.capture_joint(Net(), X)
    return made, sk.costs.roofline(made.graph_module, "h100")
