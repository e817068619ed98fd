"""A net whose parameters are sharded, in one process that stands for the first of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

X = torch.ones(3, 8)


class Net(nn.Module):
    """Blocks of two products; returns a loss for an input of shape (batch, 8), and counts its calls."""

    def __init__(self, blocks=4):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, 32) for _ in range(blocks))
        self.downs = nn.ModuleList(nn.Linear(32, 8) for _ in range(blocks))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x).relu())
        return x.square().mean()


@contextmanager
def first_of(count: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of so many ranks, two along ``"tp"``, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh, blocks: int = 4) -> Net:
    """Return a net that is sharded over a dimension of a mesh."""
    model = Net(blocks)
    for i in range(blocks):
        parallelize_module(model, mesh, {f"ups.{i}": ColwiseParallel(), f"downs.{i}": RowwiseParallel()})
    return model
