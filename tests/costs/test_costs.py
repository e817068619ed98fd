"""FLOPs equal torch's counter on real runs; bytes are those of real tensors; nothing is disturbed."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from splitkit import costs, models
from splitkit.capture import capture
from splitkit.costs.counting import FORMULAS
from splitkit.errors import GraphError

TINY = {"layers": 2, "width": 64, "heads": 4, "vocab": 100, "batch": 2, "seq": 16}


def counted(gm):
    prices = costs.flops(gm)
    return sum(prices.counted(node) for node in gm.graph.nodes)


def really(model, *args, **kwargs):
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        model(*args, **kwargs)
    return counter.get_total_flops()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_sum_is_what_the_counter_reports(name, training):
    example = models.build(name, **TINY)
    example.model.train(training)
    gm = capture(example.model, **example.kwargs)
    assert counted(gm) == really(example.model, **example.kwargs) > 0


def test_real_gpt2_small_is_about_two_flops_a_parameter_and_token():
    example = models.build("gpt2", layers=1)
    gm = capture(example.model, **example.kwargs)
    weights = 12 * 768 * 768 + 50257 * 768
    assert counted(gm) == pytest.approx(2 * weights * 128, rel=0.05)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.lstm = nn.LSTM(8, 4, num_layers=2, dropout=0.1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.drop(self.norm(self.conv(x)))
        out = self.lstm(x.flatten(2).permute(2, 0, 1))[0]
        return torch.einsum("tbi,tbj->bij", out, out)


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
def test_convolutions_recurrence_and_einsum(how):
    model, x = Mixed(), torch.randn(2, 3, 8, 8)
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    state = torch.get_rng_state()
    got = counted(capture(model, x, how=how))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, buffers[k]) for k, v in model.named_buffers())
    assert got == really(model, x) > 0


def test_counting_adds_no_guards_to_symbolic_sizes():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(5, 4)
    gm = capture(model, x, dynamic=True)
    assert counted(gm) == really(model, x)
    gm(torch.randn(9, 4))


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.small(y), lambda y: self.large(y), (x,))


def test_bodies_of_higher_order_ops_are_entered():
    assert counted(capture(Choice(), torch.randn(3, 4))) == 2 * 3 * 4 * 64 * 2


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        y = x @ self.weight
        first, second = (y * self.scale).view(2, 2, 4).unbind(0)
        return (first + second).add_(1), torch.empty(7)


def test_elements_bytes_and_parameters():
    gm = capture(Small(), torch.randn(4, 4))
    prices = costs.flops(gm)
    by_op = {node.target: node for node in gm.graph.nodes if node.op == "call_function"}
    aten = torch.ops.aten
    product, scaled = by_op[aten.matmul.default], by_op[aten.mul.Tensor]
    assert prices.flops(product) == 2 * 4 * 4 * 4 and prices.seconds(product) == prices.flops(product) / 1e12
    assert prices.param_bytes(product) == 64 and prices.param_bytes(scaled) == 32
    assert prices.flops(scaled) == 16 and prices.nbytes(scaled) == 128
    assert prices.flops(by_op[aten.unbind.int]) == 0 and prices.nbytes(by_op[aten.unbind.int]) == 128
    assert prices.flops(by_op[aten.view.default]) == 0 and prices.flops(by_op[aten.add_.Tensor]) == 8
    empty = next(node for node in gm.graph.nodes if str(node.target).startswith("aten.empty"))
    assert prices.flops(empty) == 0 and prices.nbytes(empty) == 28


def test_tied_weights_are_counted_once_a_node():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(4))
            self.b = self.a

        def forward(self, x):
            return torch.addcmul(x, self.a, self.b)

    gm = capture(Tied(), torch.randn(4))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert costs.unit(gm).param_bytes(node) == 16


def test_modules_count_their_own_parameters():
    gm = capture(nn.Sequential(nn.BatchNorm1d(4)), torch.randn(3, 4), how="symbolic_trace")
    node = next(n for n in gm.graph.nodes if n.op == "call_module")
    assert costs.flops(gm).param_bytes(node) == 4 * 4 * 4 + 8


def test_graph_without_values():
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(GraphError, match=r"SK102: input_1, _0, _1 have no meta.*\n.*splitkit\.capture"):
        costs.flops(gm)
    prices = costs.default(gm)
    assert [prices.seconds(n) for n in gm.graph.nodes] == [0, 1, 1, 0]
    assert all(prices.nbytes(n) == 0 for n in gm.graph.nodes)
    assert sum(prices.param_bytes(n) for n in gm.graph.nodes) == 80


def test_default_counts_flops_where_it_can():
    gm = capture(nn.Linear(4, 4), torch.randn(2, 4))
    assert isinstance(costs.default(gm), costs.Flops)
