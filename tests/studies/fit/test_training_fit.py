"""What `splitkit.fit` predicts for training is what real steps take."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode

import splitkit as sk
from splitkit.studies.fit.block_fit import TrainingFit
from splitkit.studies.fit.fit_model import fit_model
from splitkit.testing.config_models import config_model, loss_inputs

from small_configs import config_of  # isort: skip


def training(family, microbatches=4, **fields):
    subject = fit_model(config_of(family), None)
    return TrainingFit(subject, "adamw", "1f1b", microbatches, **fields)


@pytest.mark.parametrize("family", ("llama", "gpt2", "mixtral", "t5"))
def test_one_device_takes_what_a_real_step_takes(family):
    """Peak of forward and backward of the second microbatch of a step, measured on real tensors.

    T5 adds a bias to the scores that is trained, for which the CPU has no fused attention: it gets what GPUs have.
    """
    found, config = training(family, 1), config_of(family)
    held = found.holds(found.step(24), 1, 0, len(found.subject.blocks))
    torch.manual_seed(0)
    model = config_model(config, torch.float32, "cpu").train()
    inputs = loss_inputs(model, config, 1, 24)
    model(**inputs).loss.backward()
    with TrainedBias() if family == "t5" else nullcontext():
        measured = sk.measure_memory(Step(model), inputs)
    assert held.weights == sum(one.nbytes for one in {*model.parameters(), *model.buffers()})
    assert held.gradients == sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
    total = held.weights + held.gradients + held.activations
    assert 0.9 * total <= measured.peak <= 1.05 * total


class TrainedBias(TorchFunctionMode):
    """Attention as on a GPU: it keeps its inputs, its result, and a number for each row of scores."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return Fused.apply(*args[:3], kwargs["attn_mask"])


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask):
        *batch, heads, length, _ = query.shape
        result = query.new_zeros(*batch, length, heads, value.shape[-1]).transpose(-2, -3)
        ctx.save_for_backward(query, key, value, mask, result, query.new_empty(*batch, heads, -(-length // 32) * 32))
        return result

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(map(torch.zeros_like, ctx.saved_tensors[:4]))


class Step(torch.nn.Module):
    """Forward and backward of a model, whose weights and gradients `measure_memory` sees."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        self.model(**inputs).loss.backward()


def test_stages_hold_their_microbatches():
    """Of two stages under 1F1B, the first holds two microbatches and the last one; GPipe holds all."""
    found = training("llama")
    step, count = found.step(24), len(found.subject.blocks)
    one, two = found.holds(step, 1, 0, 3), found.holds(step, 2, 0, 3)
    assert found.in_flight(2) == (2, 1)
    assert two.activations - one.activations == found.saved(step, 0, 3) > 0
    assert found.changed(schedule="gpipe").in_flight(2) == (4, 4)
    assert found.in_flight(8) == tuple(range(8, 0, -1))
    again = found.changed(recompute=True)
    assert again.saved(step, 2, count) == 24 * 64 * 4
    assert again.saved(step, 0, 2) == 0 < found.saved(step, 0, 2)


def test_saved_bytes_are_near_those_of_the_captured_graph():
    """Autograd of the model that runs on meta saves what is predicted from the graph, up to views and dead values."""
    found, config = training("gpt2"), config_of("gpt2")
    config.use_cache = False
    model = config_model(config, torch.float32, "cpu").train()
    gm = sk.capture(model, **loss_inputs(model, config, 1, 24))
    stage = sk.stage_costs(sk.analyze(gm), sk.plan(gm, lambda node: 0))[0]
    saved = found.saved(found.step(24), 0, len(found.subject.blocks))
    assert 0.8 * stage.saved_bytes <= saved <= 1.2 * stage.saved_bytes
    assert found.holds(found.step(24), 1, 0, len(found.subject.blocks)).optimizer == stage.optimizer_bytes


TWO_BLOCKS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def net():
    return Net(), (torch.randn(32, 32),)
"""


def test_each_change_with_which_a_model_would_fit_is_said_and_does(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(TWO_BLOCKS)

    def fit(cards="1x100KiB", train="adamw", **more):
        return sk.fit(f"{file}:net", cards, train=train, **more)

    found = fit()
    assert not found.fits
    assert [(one.change, one.value) for one in found.alternatives] == [
        ("devices", 2), ("devices", 2), ("dtype", "bfloat16"), ("optimizer", "momentum")
    ]  # fmt: skip
    assert [one.text.endswith(" with --recompute") for one in found.alternatives] == [True, False, False, False]
    changed = [fit("2x100KiB", recompute=True), fit("2x100KiB"), fit(dtype="bfloat16"), fit(train="momentum")]
    for said, done in zip(found.alternatives, changed, strict=True):
        assert done.fits and said.fullest == max(one.held.total for one in done.devices)


def test_training_says_what_would_fit():
    config = config_of("llama")
    config.num_hidden_layers = 2
    config.num_key_value_heads = config.num_attention_heads  # else a GPU has no fused attention in float32
    found = sk.fit(config, "2x1900KiB", train="adamw", tokens=128)
    assert not found.fits and found.purpose == "training with adamw"
    changes = {one.change: one for one in found.alternatives}
    assert [*changes] == ["tokens", "recompute", "devices", "dtype", "optimizer"]
    assert (changes["dtype"].value, changes["optimizer"].value) == ("bfloat16", "momentum")
    assert found.tokens == changes["tokens"].value < 128
    assert sk.fit(config, "2x1900KiB", train="adamw", tokens=found.tokens).fits
    assert not sk.fit(config, "2x1900KiB", train="adamw", tokens=found.tokens + 1).fits
    assert sk.fit(config, "2x1900KiB", train="adamw", tokens=128, recompute=True).fits
    assert sk.fit(config, "2x1900KiB", train="momentum", tokens=128).fits
    more = changes["devices"].value
    assert sk.fit(config, f"{more}x1900KiB", train="adamw", tokens=128).fits


def test_the_budget_is_what_microbatches_may_save_within_the_limit():
    found = sk.fit(config_of("llama"), "2x8MiB", train="sgd", tokens=32)
    for device in found.devices:
        assert device.saved < device.budget
        room = device.card.limit - device.held.total
        assert 0 <= room - (device.budget - device.saved) * device.in_flight < device.in_flight
    assert [device.in_flight for device in found.devices] == [2, 1]
    assert found.devices[0].held.optimizer == 0
