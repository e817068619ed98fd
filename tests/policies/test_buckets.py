"""Buckets of parameters; see also tests/consumers/test_ddp_optimizer.py."""

from __future__ import annotations

import pytest
import torch
from policygraphs import graph, labels
from torch import fx, nn

from splitkit.errors import PolicyError
from splitkit.policies import Buckets


class Layers(nn.Module):
    """A model whose weights have 4 bytes each."""

    def __init__(self, n, tied=False):
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(n))
        if tied:
            self.w[n - 1] = self.w[0]

    def forward(self, x):
        x = x.relu()
        for w in self.w:
            x = (x * w).sin()
        return x


def test_buckets_are_filled_from_the_end():
    """The nodes are relu, then five times mul and sin."""
    gm = fx.symbolic_trace(Layers(5))
    assert labels(gm, Buckets(8)) == [0] * 3 + [1] * 4 + [2] * 4
    assert labels(gm, Buckets(8, first=4)) == [0] * 5 + [1] * 4 + [2] * 2
    assert labels(gm, Buckets(5, first=1)) == labels(gm, Buckets(8, first=4)), "a bucket may run over"
    assert labels(gm, Buckets(4)) == [0] * 3 + [1] * 2 + [2] * 2 + [3] * 2 + [4] * 2, "relu joins what follows it"
    assert labels(gm, Buckets(100)) == [0] * 11
    assert labels(graph(torch.sin, torch.cos), Buckets(1)) == [0, 0], "no parameters"
    assert labels(graph(), Buckets(1)) == []


def test_a_tied_parameter_counts_once_at_the_reader_that_is_last_in_backward():
    gm = fx.symbolic_trace(Layers(4, tied=True))
    assert labels(gm, Buckets(4)) == [0] * 3 + [1] * 2 + [2] * 4


def test_what_gets_no_gradient_or_is_ignored_by_ddp_does_not_count():
    model = Layers(4)
    model.w[3].requires_grad_(False)
    model.w[1]._ddp_ignored = True
    assert labels(fx.symbolic_trace(model), Buckets(4)) == [0] * 5 + [1] * 4


def test_parameters_of_called_modules_count():
    gm = fx.symbolic_trace(nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))))
    assert labels(gm, Buckets(16)) == [0, 0, 1, 1]


def test_a_bucket_that_gives_nothing_takes_more_until_it_does():
    """A part that only writes has no place in backward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            y = x * self.w
            z = y.detach().clone()
            z.add_(self.v)
            return y

    assert labels(fx.symbolic_trace(Model()), Buckets(1)) == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["bytes", "first"])
@pytest.mark.parametrize("value", [0, -5, 1.5, True])
def test_buckets_of_no_size(name, value):
    with pytest.raises(PolicyError, match=rf"SK302: Buckets\({name}="):
        Buckets(**{"bytes": 8, name: value})
