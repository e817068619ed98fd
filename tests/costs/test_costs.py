"""FLOPs equal torch's counter on real runs; bytes are those of real tensors; nothing is disturbed."""

from itertools import product

import pytest
import torch
from campaigns import some_of_all, these_first
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

import splitkit as sk
from splitkit import costs
from splitkit.costs.flop_formulas import FORMULAS
from splitkit.errors import GraphError
from splitkit.frontends.joint_capture import capture
from splitkit.testing import models

TINY = {"layers": 1, "width": 64, "heads": 4, "vocab": 100, "batch": 2, "seq": 16}
IMAGE = {"layers": 2, "width": 64, "heads": 4, "image": 32, "patch": 8, "classes": 10, "batch": 2}


def counted(gm):
    prices = costs.flops(gm)
    return sum(prices.counted(node) for node in gm.graph.nodes)


def really(model, *args, **kwargs):
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        model(*args, **kwargs)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "training"),
    these_first(
        [("llama", False), ("t5", True), ("vit", False)],
        [
            *[("llama", True), ("t5", False), ("vit", True)],
            *product(["gpt2", "bert", "mixtral"], [True, False]),
        ],
    ),
)
def test_sum_is_what_the_counter_reports(name, training):
    example = models.build(name, **(IMAGE if name == "vit" else TINY))
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


class Residual(nn.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.first = nn.Conv2d(width, 2 * width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(2 * width, 2 * width, 3, 1, 1, groups=2)
        self.skip = nn.Conv2d(width, 2 * width, 1, stride)
        self.norms = nn.ModuleList(nn.BatchNorm2d(2 * width) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norms[1](self.second(self.relu(self.norms[0](self.first(x)))))
        y += self.skip(x)
        return self.relu(y)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=2, dilation=2)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 2, 1)

    def forward(self, x):
        kept = self.down(x).relu()
        y = self.up(self.deep(nn.functional.max_pool2d(kept, 2)))
        return self.last(torch.cat([kept, nn.functional.interpolate(y, size=kept.shape[-2:])], 1))


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.heads(x, x, x)[0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(0.3, inplace=True)

    def forward(self, ids):
        x = self.drop(self.embed(ids))
        x.add_(self.inner(x)).mul_(2)
        return self.head(x) + x @ self.embed.weight.T


KINDS = {
    "resnet": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3), Residual(4, 1), Residual(8, 2)),
        torch.randn(2, 3, 16, 16),
    ),
    "unet": (UNet, torch.randn(2, 3, 8, 8)),
    "lstm": (
        lambda: nn.Sequential(nn.LSTM(8, 4, num_layers=2, dropout=0.1, bidirectional=True)),
        torch.randn(5, 2, 8),
    ),
    "gru": (lambda: nn.Sequential(nn.GRU(8, 4, batch_first=True)), torch.randn(2, 5, 8)),
    "attention": (SelfAttention, torch.randn(5, 2, 8)),
    "tied": (Tied, torch.tensor([[1, 2, 3], [4, 5, 6]])),
}
WAYS = [(True, "export"), (False, "symbolic_trace"), (False, "export"), (True, "symbolic_trace")]


@pytest.mark.parametrize(("kind", "way"), some_of_all(KINDS, WAYS, always=(), turns=2))
def test_nets_of_each_kind(kind, way):
    (make, inputs), (training, how) = KINDS[kind], way
    model = make().train(training)
    assert counted(capture(model, inputs, how=how)) == really(model, inputs) > 0


def test_counting_does_not_act():
    class Acting(nn.Module):
        def forward(self, x):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                y = x @ x
            return torch.vmap(lambda row: row * 2)(y)

    gm = capture(Acting(), torch.randn(4, 4))
    with gm.graph.inserting_before(next(iter(reversed(gm.graph.nodes)))):
        gm.graph.call_function(print, ("counted",)).meta["val"] = None
        gm.graph.call_function(torch._C._functorch._vmap_increment_nesting, (2, "error")).meta["val"] = None
    sheet = torch.get_rng_state()
    assert counted(gm) == 2 * 4 * 4 * 4
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    torch.randn(2)  # inside a vmap it would be refused
    torch.set_rng_state(sheet)


def test_counting_does_not_print(capsys):
    graph = torch.fx.Graph()
    graph.call_function(print, ("counted",)).meta["val"] = None
    graph.output(None)
    assert counted(torch.fx.GraphModule(nn.Module(), graph)) == 0
    assert capsys.readouterr().out == ""


class Scanned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        from torch._higher_order_ops.scan import scan

        return scan(lambda carry, row: (carry @ self.weight + row, carry.clone()), x[0], x)[0]


def test_a_scan_counts_every_step():
    gm = capture(torch.export.export(Scanned(), (torch.randn(7, 3, 4),)))
    assert counted(gm) == 7 * 2 * 3 * 4 * 4


class Flex(nn.Module):
    def forward(self, q, k, v):
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score * 2)


def test_flex_attention_counts_its_products_and_not_its_bodies():
    q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
    gm = capture(Flex(), q, k, v)
    assert counted(gm) == 2 * 2 * 2 * 128 * 128 * 16
    node = next(n for n in gm.graph.nodes if str(n.target) == "flex_attention")
    assert costs.flops(gm).count(node).counted == counted(gm)
    assert costs.roofline(gm, "a100").seconds(node) > 0
    torch.randn(2)  # its capture leaves calls that enter a vmap: not called


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


@pytest.mark.parametrize("make", [costs.flops, costs.roofline, costs.unit])
def test_prices_of_what_is_no_graph_are_refused(make):
    with pytest.raises(GraphError, match="SK101.*Linear"):
        make(nn.Linear(2, 2))


def test_prices_of_a_deleted_module_are_refused():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(16, 16)))
    sk.extend.propagate(gm, torch.randn(8, 16))
    del gm._modules["0"]
    with pytest.raises(GraphError, match="SK104"):
        sum(costs.flops(gm).flops(node) for node in gm.graph.nodes)


def test_unit_prices_know_bytes_where_values_are_known():
    gm = capture(nn.Linear(4, 2), torch.ones(3, 4))
    (linear,) = (node for node in gm.graph.nodes if node.op == "call_function")
    prices = costs.unit(gm)
    assert (prices.seconds(linear), prices.flops(linear)) == (1.0, 1.0)
    assert (prices.nbytes(linear), prices.param_bytes(linear)) == (3 * 2 * 4, (4 * 2 + 2) * 4)
    del linear.meta["val"]
    assert prices.nbytes(linear) == 0
