"""Models with custom backwards, one for each way in which torch defines them."""

from __future__ import annotations

import torch
from torch import nn


class Scaled(torch.autograd.Function):
    """A backward that is not that of its forward."""

    @staticmethod
    def forward(ctx, x, by=100.0):
        ctx.by = by
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.by, None


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(x, w, k=2):
        return x @ w, (x @ w).relu() * k, None

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, a, b, _):
        x, w = ctx.saved_tensors
        return a @ w.t() + 3 * b, x.t() @ b, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 7


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, options):
        ctx.mask = (torch.rand_like(x) > options["p"]).float()
        return x * ctx.mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.mask * 5, None


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        return module(x)

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


class Net(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.a, self.b, self.f = nn.Linear(4, 4), nn.Linear(4, 4), f

    def forward(self, x):
        return self.b(self.f(self, self.a(x))).sum()


def checkpointed(net, h):
    return torch.utils.checkpoint.checkpoint(lambda t: Scaled.apply(net.b(t)), h, use_reentrant=False)


def reentrant(net, h):
    return torch.utils.checkpoint.checkpoint(lambda t: net.b(t).tanh(), h, use_reentrant=True)


BACKWARDS = {
    "scaled": lambda net, h: Scaled.apply(h, 3.0),
    "pair": lambda net, h: sum(Pair.apply(h, net.a.weight)[:2]),
    "in_place": lambda net, h: InPlace.apply(h * 1),
    "noisy": lambda net, h: Noisy.apply(h, {"p": 0.5}),
    "checkpointed": checkpointed,
    "reentrant": reentrant,
}
