"""Factories of models that are sharded over the mesh that they are given."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    """Three blocks of two products, and their loss."""

    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, 32) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(32, 8) for _ in range(3))

    def forward(self, x):
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x).relu())
        return x.square().mean()


def net(mesh=None):
    """Two blocks are sharded."""
    model = Net()
    if mesh is not None:
        for i in range(2):
            parallelize_module(model, mesh, {f"ups.{i}": ColwiseParallel(), f"downs.{i}": RowwiseParallel()})
    return model, (torch.randn(4, 8),)


def plain():
    """Nothing is sharded."""
    return Net(), (torch.randn(4, 8),)


def needy(mesh):
    """It must be given a mesh."""
    return net(mesh)
