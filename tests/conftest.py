"""What several tests share: small graphs built by hand."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import fx, nn

gc.disable()  # until all is imported, which takes a third less time so


def pytest_collection_finish():
    """What was imported lives to the end: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _one_seed_one_thread():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    _leave_autocast()


def _leave_autocast():
    """Regions that interleave leave torch's count of open ones too high; then casts of weights are never dropped."""
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()


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
