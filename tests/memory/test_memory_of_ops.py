"""The simulated memory of single ops is what real tensors take: new storages, views and copies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from campaigns import some_of_all
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import splitkit as sk
from splitkit.memory.kernels.kernel_results import _broadcast


class Beside(nn.Module):
    """An op between two uses of what it takes."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x):
        y = x.exp()
        return self.op(y).sin().sum() + y.sum()


GIVEN_BACK = {
    "dropout(p=0), training": lambda y: F.dropout(y, 0.0, True),
    "dropout in eval mode": lambda y: F.dropout(y, 0.5, False),
    "dropout of everything": lambda y: F.dropout(y, 1.0, True),
    "alpha dropout": lambda y: F.alpha_dropout(y, 0.0, True),
    "channels": lambda y: F.dropout2d(y, 0.0, True),
    "native dropout, eval": lambda y: torch.native_dropout(y, 0.5, False)[0],
    "one group": lambda y: F.channel_shuffle(y, 1),
    "contiguous": lambda y: y.contiguous(),
    "contiguous, transposed": lambda y: y.transpose(1, 2).contiguous(),
    "to": lambda y: y.to(torch.float32),
    "type_as": lambda y: y.type_as(y),
    "reshape": lambda y: y.reshape(-1),
    "reshape, transposed": lambda y: y.transpose(1, 2).reshape(-1),
    "sum_to_size": lambda y: y.sum_to_size(2, 4, 8, 8),
    "chunk": lambda y: y.chunk(2, 1)[1],
    "einsum of one": lambda y: torch.einsum("abcd->dcba", y),
    "pad by nothing": lambda y: F.pad(y, (0, 0)),
    "a view of a constant": lambda y: y * torch.arange(8.0).unsqueeze(1),
}


@pytest.mark.parametrize("name", GIVEN_BACK)
def test_what_an_op_gives_back_of_its_input_is_not_new(name):
    model, x = Beside(GIVEN_BACK[name]), torch.randn(2, 4, 8, 8)
    gm = sk.capture(model, x)
    profile = sk.simulate_memory(gm)
    with torch.no_grad():
        measured = sk.measure_memory(gm, x)
    assert (profile.peak, profile.end) == (measured.peak, measured.end)


def scattered(x):
    wide = torch.zeros(2, 40)
    wide[:, 4:8] = x
    return wide


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.mse_loss(x, x.sin()),
        lambda x: F.mse_loss(x, x.sin(), reduction="sum"),
        lambda x: F.smooth_l1_loss(x, x[:1]),
        lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid()),
        lambda x: F.soft_margin_loss(x, x.sign()),
        lambda x: F.huber_loss(x, x.sin()),
        lambda x: torch.slice_scatter(x[:, ::2], x[:, :1], 1, 0, 1),
        lambda x: torch.select_scatter(x[:1], x[0, :1].expand(1), 1, 0),
        scattered,
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_losses_and_scatters_take_what_their_kernels_take(function):
    class Net(nn.Module):
        def forward(self, x):
            found = function(x)
            return found, x.exp()

    x = torch.randn(2, 4)
    gm = sk.capture(Net(), x)
    profile = sk.simulate_memory(gm)
    with torch.no_grad():
        measured = sk.measure_memory(gm, x)
    assert (profile.peak, profile.end) == (measured.peak, measured.end)


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.SmoothL1Loss(), F.mse_loss, lambda a, b: F.mse_loss(a, a) + b.sum()])
def test_losses_of_symbolic_trace_take_what_their_kernels_take(loss, how):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.loss = nn.Linear(16, 16), loss

        def forward(self, x, y):
            return self.loss(self.layer(x), y)

    x, y = torch.randn(8, 16), torch.randn(8, 16)
    gm = sk.capture(Net(), x, y, how=how)
    if how == "symbolic_trace":
        sk.extend.propagate(gm, x, y)
    with torch.no_grad():
        measured = sk.measure_memory(gm, x, y)
    simulated = sk.simulate_memory(gm)
    assert (simulated.peak, simulated.end) == (measured.peak, measured.end)


KERNELS = [
    (nn.BatchNorm1d(8), (4, 8, 6)),
    (nn.BatchNorm1d(8).eval(), (4, 8, 6)),
    (nn.BatchNorm2d(8), (4, 8, 6, 5)),
    (nn.BatchNorm3d(8), (2, 8, 3, 4, 5)),
    (nn.LogSigmoid(), (4, 8, 6, 5)),
    (nn.RReLU(), (4, 8, 6, 5)),
    (nn.Upsample(scale_factor=2), (4, 8, 6)),
    (nn.GELU(), (4, 8, 6, 5)),
]
ORDERS = ["transposed", "as it is", "channels last", "batch last"]


@pytest.mark.parametrize(("kernel", "order"), some_of_all(KERNELS, ORDERS, always=(), turns=2))
def test_strides_of_real_kernels_decide_what_is_copied(kernel, order):
    module, shape = kernel

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            y = self.module(x)
            return y, y.contiguous(), (y * 2).flatten(1)

    swapped = {"transposed": (-1, -2), "channels last": (1, -1), "batch last": (0, -1), "as it is": (0, 0)}[order]
    x = torch.randn(shape).movedim(*swapped).contiguous().movedim(*swapped[::-1])
    gm = sk.capture(Net(), x)
    profile = sk.simulate_memory(gm)
    with torch.no_grad():
        measured = sk.measure_memory(gm, x)
    assert (profile.peak, profile.end) == (measured.peak, measured.end)


def test_sizes_that_only_the_data_decides_are_broadcast_without_being_known():
    size = ShapeEnv().create_unbacked_symint()
    assert [str(one) for one in _broadcast([(size, 1, 3), (1, 5, 3), (3,)])] == ["3", "5", str(size)]
