"""What several tests share: small graphs built by hand."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn


@pytest.fixture(autouse=True)
def _one_seed_one_thread():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_grad_enabled(True)


@pytest.fixture
def chain():
    """x -> add -> mul -> sub -> out"""

    class Chain(nn.Module):
        def forward(self, x):
            return (x + 1) * 2 - 3

    return fx.symbolic_trace(Chain())


@pytest.fixture
def nodes():
    """name -> node of a graph"""
    return lambda gm: {n.name: n for n in gm.graph.nodes}
