"""Formulas that torch's counter lacks: against products of the same meaning that it does count."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from splitkit import capture, costs
from splitkit.costs import flop_formulas as formulas
from splitkit.costs.flop_formulas import FORMULAS

aten = torch.ops.aten


def really(call, *args, **kwargs):
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        call(*args, **kwargs)
    return counter.get_total_flops()


def on_meta(target, *args, **kwargs):
    """FLOPs of a node that calls ``target`` on values of these shapes (fakes of CUDA tensors, where it needs them)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = fx.Graph()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def holder(leaf):
            if not isinstance(leaf, torch.Tensor):
                return leaf
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = mode.from_tensor(leaf)
            return node

        tree = torch.utils._pytree.tree_map(holder, (args, kwargs))
    node = graph.call_function(target, *tree)
    node.meta["val"] = None
    graph.output(node)
    return costs.flops(fx.GraphModule(nn.Module(), graph)).counted(node)


def r(*shape):
    return torch.randn(*shape)


@pytest.mark.parametrize(
    "target, args, expected",
    [
        (aten.mv.default, (r(3, 5), r(5)), 2 * 3 * 5),
        (aten.matmul.default, (r(2, 3, 5), r(5)), 2 * 2 * 3 * 5),
        (aten.dot.default, (r(5), r(5)), 2 * 5),
        (aten.vdot.default, (r(5), r(5)), 2 * 5),
        (aten.addmv.default, (r(3), r(3, 5), r(5)), 2 * 3 * 5),
        (aten.addbmm.default, (r(3, 4), r(2, 3, 5), r(2, 5, 4)), 2 * 2 * 3 * 5 * 4),
        (aten.baddbmm.default, (r(2, 3, 4), r(2, 3, 5), r(2, 5, 4)), 2 * 2 * 3 * 5 * 4),
        (aten._addmm_activation.default, (r(4), r(3, 5), r(5, 4)), 2 * 3 * 5 * 4),
        (aten._int_mm.default, (torch.ones(32, 16).to(torch.int8), torch.ones(16, 8).to(torch.int8)), 2 * 32 * 16 * 8),
        (aten.cdist.default, (r(30, 4), r(40, 4)), 2 * 30 * 40 * 6),
        (aten.bilinear.default, (r(7, 3), r(7, 4), r(5, 3, 4)), 3 * 7 * 3 * 4 * 5),
    ],
    ids=lambda x: str(x) if not isinstance(x, (tuple, int)) else "",
)
def test_products(target, args, expected):
    assert on_meta(target, *args) == expected == really(target, *args)


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ((2, 6, 8), (2, 8, 16), 2 * 2 * 6 * 8 * 16),  # a batch
        ((12, 8), (2, 8, 16), 2 * 12 * 8 * 16),  # rows shared out
        ((6, 16), (16, 8), 2 * 6 * 16 * 8),  # the contracted size shared out
        ((2, 6, 8), (8, 16), 2 * 6 * 8 * 16),  # columns shared out
    ],
)
def test_grouped_products_count_what_their_pieces_do(a, b, expected):
    assert FORMULAS[aten._grouped_mm](torch.Size(a), torch.Size(b)) == expected
    assert FORMULAS[aten._scaled_grouped_mm](torch.Size(a), torch.Size(b), None, None) == expected


HEADS = (2, 4, 16, 8)  # batch, heads, length, width
ONCE = 2 * 2 * 4 * 16 * 16 * 8  # one product


@pytest.mark.parametrize("name", [str(op) for op in [*flop_registry, *FORMULAS] if "dot_product" in str(op)])
def test_every_fused_attention_counts_two_products_and_backward_five(name):
    packet = getattr(aten, name.removeprefix("aten."))
    size = torch.Size(HEADS)
    count = {**flop_registry, **FORMULAS}[packet]
    if packet in FORMULAS:
        got = count(size, size, size, size)
    else:  # torch wraps its own, which take tensors
        value = torch.empty(size, device="meta")
        got = count(value, value, value, value, out_val=value)
    assert got == (5 if name.endswith("backward") else 2) * ONCE


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_of_cuda_has_a_formula(kind):
    assert getattr(aten, f"_scaled_dot_product_{kind}_attention") in flop_registry
    assert getattr(aten, f"_scaled_dot_product_{kind}_attention_backward") in flop_registry


def test_attention_of_the_cpu_and_its_backward():
    q, k, v = (r(*HEADS).requires_grad_() for _ in range(3))
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts == {
        "aten._scaled_dot_product_flash_attention_for_cpu": 2 * ONCE,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward": 5 * ONCE,
    }


def test_wider_values_and_longer_keys():
    q, k, v, out = torch.Size((1, 2, 3, 4)), torch.Size((1, 2, 5, 4)), torch.Size((1, 2, 5, 6)), (1, 2, 3, 6)
    scores, values = 2 * 2 * 3 * 5 * 4, 2 * 2 * 3 * 5 * 6
    assert formulas.attention_flops(q, k, v) == scores + values
    assert formulas.attention_backward_flops(out, q, k, v) == 3 * scores + 2 * values


def test_packed_sequences_count_as_long_as_the_longest():
    forward = FORMULAS[aten._cudnn_attention_forward]
    packed, starts = torch.Size((20, 4, 8)), torch.Size((3,))
    assert forward(packed, packed, packed, None, starts, starts, 12, 12) == 2 * 2 * 4 * 12 * 12 * 16
    assert forward(HEADS, HEADS, HEADS, None, None, None, 16, 16) == 2 * ONCE


@pytest.mark.parametrize("layers, both", [(1, False), (2, True)])
def test_recurrence_counts_every_weight_matrix_at_every_step(layers, both):
    model = nn.LSTM(8, 4, num_layers=layers, bidirectional=both)
    x = r(5, 3, 8)
    expected = 2 * 5 * 3 * sum(p.numel() for p in model.parameters() if p.ndim == 2)
    gm = capture(model, x)
    assert really(model, x) == expected == sum(map(costs.flops(gm).counted, gm.graph.nodes))
    weights = [torch.Size(p.shape) for p in model.parameters()]
    assert FORMULAS[aten._cudnn_rnn](torch.Size((5, 3, 8)), weights, 4) == expected
    assert FORMULAS[aten._cudnn_rnn_backward](torch.Size((5, 3, 8)), weights, 4) == 2 * expected


def test_encoder_layer_counts_as_its_pieces():
    layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True, dropout=0.0).eval()
    x = r(2, 6, 8)
    attention, first, second = layer.self_attn, layer.linear1, layer.linear2
    args = (x, 8, 2, attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight,
            attention.out_proj.bias, False, False, 1e-5, layer.norm1.weight, layer.norm1.bias, layer.norm2.weight,
            layer.norm2.bias, first.weight, first.bias, second.weight, second.bias)  # fmt: skip
    shapes = [a.shape if isinstance(a, torch.Tensor) else a for a in args]
    whole = FORMULAS[aten._transformer_encoder_layer_fwd](*shapes)
    assert whole == really(layer.train(), x)


@pytest.mark.parametrize("stride, groups", [(1, 1), (2, 2)])
def test_convolutions_of_other_backends_count_as_the_plain_one(stride, groups):
    x, w = r(2, 4, 9, 9), r(6, 4 // groups, 3, 3)
    out = nn.functional.conv2d(x, w, stride=stride, groups=groups)
    plain = 2 * out.numel() * (4 // groups) * 9
    for name in ("mkldnn_convolution", "miopen_convolution", "_conv_depthwise2d", "slow_conv_dilated2d"):
        assert FORMULAS[getattr(aten, name)](x.shape, w.shape, out_shape=out.shape) == plain
    if groups == 1:  # torch's formula ignores groups
        assert really(nn.functional.conv2d, x, w, stride=stride) == plain
        back = really(nn.functional.conv_transpose2d, x, w.transpose(0, 1).contiguous())
        assert FORMULAS[aten.cudnn_convolution_transpose](x.shape, w.transpose(0, 1).shape) == back
