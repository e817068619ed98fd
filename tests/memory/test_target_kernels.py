"""What attention, recurrent layers and norms save is what the kernels of the plan's device save, wherever captured."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import splitkit as sk
from splitkit.errors import CostError
from splitkit.hardware.device_specs import Device
from splitkit.memory.kernels.target_kernels import lstm_workspace
from splitkit.memory.saved_storages import activations

B, H, T, D = 2, 4, 40, 32
ROWS = B * H * T
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


class Attention(nn.Module):
    """Attention of inputs alone, so that what it saves can be counted by hand."""

    def __init__(self, mask=None, dropout=0.0, causal=False, grouped=False):
        super().__init__()
        self.mask, self.dropout, self.causal, self.grouped = mask, dropout, causal, grouped

    def forward(self, q, k, v):
        mask = None
        if self.mask is not None:
            mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
            mask = mask if self.mask == "bool" else mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout, self.causal, enable_gqa=self.grouped).clone()


def captured(model, device, dtype, *shapes, how="symbolic_trace"):
    with torch.device(device):
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        gm = sk.capture(model.to(device), *inputs, how=how)
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["val"].requires_grad_()  # not all ways to capture keep that
    return gm


def saved(model, kernels, dtype, *shapes):
    """Return what a model saves on a device, which must not depend on where it was captured."""
    found = {activations(captured(model, on, dtype, *shapes), kernels).saved_bytes for on in ("cpu", "meta")}
    assert len(found) == 1
    return found.pop()


Q = (B, H, T, D)
INPUTS = 4 * ROWS * D  # elements of query, key, value and result
PHILOX = 24  # flash: two numbers of 8 bytes and one
SEEDS = 16  # other kernels: two numbers
EFFICIENT_ROWS = B * H * 64  # rows are padded to a multiple of 32


@pytest.mark.parametrize(
    ("kernels", "dtype", "options", "expected"),
    [
        ("sm80", BF16, {}, 2 * INPUTS + 4 * ROWS + PHILOX),
        ("sm80", BF16, {"dropout": 0.1}, 2 * INPUTS + 4 * ROWS + PHILOX),
        ("sm89", F16, {"causal": True}, 2 * INPUTS + 4 * ROWS + PHILOX),
        ("sm90", BF16, {}, 2 * INPUTS + 4 * ROWS + SEEDS),  # cuDNN
        ("sm90", BF16, {"dropout": 0.1}, 2 * INPUTS + 4 * ROWS + PHILOX),  # cuDNN has multiples of 1/16 only
        ("sm90", BF16, {"dropout": 0.125}, 2 * INPUTS + 4 * ROWS + SEEDS),
        ("sm90", BF16, {"mask": "bool"}, 2 * (INPUTS + T * T) + 4 * ROWS + SEEDS),
        ("sm80", BF16, {"mask": "bool"}, 2 * (INPUTS + T * T) + 4 * EFFICIENT_ROWS + SEEDS),
        ("sm90", F32, {}, 4 * (INPUTS + EFFICIENT_ROWS) + SEEDS),
        ("sm90", F32, {"dropout": 0.1}, 4 * (INPUTS + EFFICIENT_ROWS) + SEEDS),
        ("sm90", F32, {"mask": "float"}, 4 * (INPUTS + T * T + EFFICIENT_ROWS) + SEEDS),
        ("sm70", F16, {"causal": True}, 2 * INPUTS + 4 * EFFICIENT_ROWS + SEEDS),
        ("cpu", F32, {}, 4 * (INPUTS + ROWS)),
        ("cpu", BF16, {"mask": "bool"}, 2 * (INPUTS + T * T) + 4 * ROWS),
    ],
)  # fmt: skip
def test_fused_attention_saves_what_its_kernel_returns(kernels, dtype, options, expected):
    assert saved(Attention(**options), kernels, dtype, Q, Q, Q) == expected


@pytest.mark.parametrize(
    ("kernels", "dtype", "options", "shapes"),
    [
        ("sm70", BF16, {}, (Q, Q, Q)),  # computes bfloat16 in no fused kernel
        ("sm90", F64, {}, (Q, Q, Q)),
        ("cpu", F32, {"dropout": 0.1}, (Q, Q, Q)),
        ("sm90", F32, {}, ((B, H, T, 30), (B, H, T, 30), (B, H, T, 30))),  # rows of 120 bytes, not a multiple of 16
        ("sm90", F32, {}, ((H, T, D), (H, T, D), (H, T, D))),
    ],
)
def test_attention_without_a_fused_kernel_saves_the_scores(kernels, dtype, options, shapes):
    scores = H * T * T * (B if len(shapes[0]) == 4 else 1)
    assert saved(Attention(**options), kernels, dtype, *shapes) > INPUTS // (4 * B) + scores * dtype.itemsize


def test_grouped_heads_are_not_repeated_by_flash_attention():
    few = (B, 1, T, D)
    expected = 2 * (2 * ROWS * D + 2 * B * T * D) + 4 * ROWS
    assert saved(Attention(grouped=True), "sm80", BF16, Q, few, few) == expected + PHILOX
    assert saved(Attention(grouped=True), "sm90", BF16, Q, few, few) == expected + SEEDS


def test_flash_attention_pads_narrow_heads_and_computes_wide_ones_where_it_can_train_them():
    def size(kernels, width, **options):
        return saved(Attention(**options), kernels, BF16, *[(B, H, T, width)] * 3)

    assert size("sm80", 20) == 2 * 4 * ROWS * 24 + 4 * ROWS + PHILOX  # all four are copies, with heads of 24
    assert size("sm80", 200) == 2 * 4 * ROWS * 200 + 4 * ROWS + PHILOX
    assert size("sm89", 200) == 2 * 4 * ROWS * 200 + 4 * EFFICIENT_ROWS + SEEDS
    assert size("sm89", 256) == 2 * 4 * ROWS * 256 + 4 * ROWS + PHILOX
    assert size("sm89", 256, dropout=0.1) == 2 * 4 * ROWS * 256 + 4 * EFFICIENT_ROWS + SEEDS


def test_switches_of_the_user_apply_to_other_devices_too():
    gm = captured(Attention(), "meta", BF16, Q, Q, Q)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert activations(gm, "sm90").saved_bytes == 2 * INPUTS + 4 * EFFICIENT_ROWS + SEEDS


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_a_stage_has_the_memory_of_the_device_of_its_costs(device):
    found = set()
    for on in ("cpu", "meta"):
        gm = captured(Attention(dropout=0.1), on, F32, Q, Q, Q, how="export")
        plan = sk.plan(gm, lambda node: 0)
        (stage,) = sk.stage_costs(sk.analyze(gm), plan, sk.costs.training(sk.costs.roofline(gm, device)))
        found.add((stage.saved_bytes, stage.temporary_bytes))
    assert len(found) == 1
    scores = 4 * B * H * T * T
    assert (found.pop()[0] > 4 * INPUTS + scores) == (device == "cpu")


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.inner = kind(8, 16, **options)

    def forward(self, x):
        return self.inner(x)[0].clone()


def kept_of_real(model, x):
    """Return the bytes of storages that autograd saves of a real run, without parameters."""
    held, own = {}, {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(x)
    assert result.requires_grad
    return sum(nbytes for _, nbytes in held.values())


@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True, "dropout": 0.5}, {"bias": False, "batch_first": True}],
)
def test_an_lstm_on_the_cpu_saves_its_workspace(options):
    model, shape = Recurrent(nn.LSTM, **options), (5, 3, 8)
    real = kept_of_real(model, torch.randn(shape, requires_grad=True))
    found = {on: activations(captured(Recurrent(nn.LSTM, **options), on, F32, shape), CPU) for on in ("cpu", "meta")}
    assert found["cpu"].saved_bytes == found["meta"].saved_bytes == real
    assert not found["cpu"].estimated


CPU = "cpu"


@pytest.mark.parametrize("sizes", [(1, 1, 16, 16), (7, 3, 5, 20), (30, 8, 64, 64), (9, 8, 100, 256), (65, 3, 300, 128)])
def test_the_workspace_of_an_lstm_has_the_bytes_that_onednn_gives_it(sizes):
    steps, batch, features, hidden = sizes
    weights = [torch.zeros(4 * hidden, n) for n in (features, hidden)] + [torch.zeros(4 * hidden)] * 2
    state, x = torch.zeros(batch, hidden), torch.zeros(steps, batch, features)
    *_, workspace = torch.ops.aten.mkldnn_rnn_layer(
        x, *weights, state, state, False, [], 2, hidden, 1, True, False, False, True
    )
    assert workspace.numel() == lstm_workspace(*sizes)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_cudnn_reserves_is_an_upper_bound_and_the_same_from_anywhere(kind):
    found = [activations(captured(Recurrent(kind), on, F32, (5, 3, 8)), "sm90") for on in ("cpu", "meta")]
    assert found[0].saved_bytes == found[1].saved_bytes
    for one in found:
        assert ["cuDNN" in why for why in one.estimated.values()] == [True]


@pytest.mark.parametrize("kernels", ["cpu", "sm90"])
def test_convolutions_and_batch_norm_save_inputs_and_two_numbers_a_channel(kernels):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    pixels = 2 * 16 * 16
    assert saved(model, kernels, F32, (2, 3, 16, 16)) == 4 * (pixels * (3 + 8 + 8) + 2 * 8)


@pytest.mark.parametrize(
    ("norm", "statistics", "shape"),
    [
        (nn.LayerNorm(8), 64, (4, 8, 8)),
        (nn.GroupNorm(2, 8), 8, (2, 8, 4, 4)),
        (nn.BatchNorm2d(8), 16, (2, 8, 4, 4)),
        (nn.BatchNorm2d(8).eval(), 0, (2, 8, 4, 4)),
    ],
)
def test_norms_save_their_statistics_in_single_precision_but_on_the_cpu(norm, statistics, shape):
    inputs = 2 * 256

    def size(kernels):
        return saved(nn.Sequential(deepcopy(norm).to(BF16)), kernels, BF16, shape)

    real = kept_of_real(deepcopy(norm).to(BF16), torch.randn(shape, dtype=BF16, requires_grad=True))
    assert size("cpu") == inputs + 2 * statistics == real
    assert size("sm90") == inputs + 4 * statistics


def test_steps_of_a_recurrent_layer_run_one_after_the_other():
    def seconds(steps, how="symbolic_trace", **options):
        gm = captured(Recurrent(nn.LSTM, **options), "cpu", F32, (steps, 3, 8), how=how)
        costs = sk.costs.roofline(gm, "h100")
        return max(map(costs.seconds, gm.graph.nodes))

    assert seconds(20) > 20 * 4e-6 > 1.5 * seconds(10)
    assert seconds(20, num_layers=3) == seconds(20, "export", num_layers=3) > 60 * 4e-6


def test_kernels_of_a_device_are_checked():
    with pytest.raises(CostError, match="kernels is 'hopper'") as error:
        Device("mine", {"float32": 1e12}, 1e11, 10**9, kernels="hopper")
    assert error.value.code == "SK320" and "sm90" in error.value.remedy
