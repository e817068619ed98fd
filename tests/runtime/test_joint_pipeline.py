"""Stages of joint graphs on real processes, under torch's schedules, beside the whole model."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from launch import launch
from torch import nn

import splitkit as sk
from splitkit import _torch
from splitkit.errors import PipelineError
from splitkit.runtime.ranks.planned_chain import _require_trainable, chain_of_step
from splitkit.runtime.ranks.planned_stage import border_slots
from splitkit.runtime.ranks.rank_device import place_stages
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_plan import stage_plan

CASES = ["odd 1f1b 2 1 4", "odd 1f1b 2 offload 5", "odd zbv 4 offload-deferred 4"]
OTHERS = [
    "t5 zbv 4 deferred 4",
    "llama 1f1b 2 3 4",
    "gpt2,llama zbv 4 deferred 4",
    "gpt2,llama zbv 4 8 4",
    *(f"odd 1f1b 2 {seed} 4" for seed in (0, 2, 3, 4, 5)),
    *(f"gpt2,llama 1f1b 2 {seed} 4" for seed in range(6, 12)),
    "gpt2,llama interleaved-zero-bubble 4 deferred 4",
    "gpt2,llama interleaved-1f1b 4 deferred 4",
    "gpt2,llama 1f1b 2 whole 4",
    "gpt2,llama gpipe 2 5 4",
    "llama zbv 4 deferred 4 compiled",
    "llama zbv 4 offload-deferred 6",
    "gpt2 gpipe 2 offload 5",
    "odd interleaved-1f1b 4 offload 4",
    "llama 1f1b 2 offload 5 compiled",
]
ON_FOUR = [
    "gpt2 1f1b 4 deferred 4",
    "gpt2,llama dualpipev 8 deferred 8",
    "llama zbv 8 whole 8",
    "llama interleaved-1f1b 8 1 8",
]


def assert_like_whole(lines):
    assert lines
    for line in lines:
        assert line["loss"] < 2e-6 and line["gradient"] < 1e-6 and line["weight"] < 1e-6, line
        # batch norm in float32: on some processors the kernels of a part and of the whole round differently
        assert line["buffer"] < 1e-6, line
        assert set(line["left"]) == {0}, "nothing is held after the step"
        assert line["waiting"] == line["expected"], "bytes between input and weight parts are those of the graphs"
        assert line["measured"] == line["moved"], "bytes on the host, and of moved values on the device"
    for name in {line["model"] for line in lines}:
        own = [set(line["trained"]) for line in lines if line["model"] == name]
        assert len(set().union(*own)) > 5


@pytest.mark.parametrize("case", these_first(CASES, OTHERS))
def test_two_ranks_train_like_the_whole_model(case):
    lines = [line for line in launch("runtime/staged_steps.py", 2, *case.split()) if "model" in line]
    assert_like_whole(lines)
    if "offload" in case:
        assert all(line["moved"][0] for line in lines)
    if "deferred" in case:
        assert all(line["waiting"] for line in lines)


@pytest.mark.parametrize("case", these_first(ON_FOUR[:1], ON_FOUR[1:]))
def test_four_ranks_train_like_the_whole_model(case):
    assert_like_whole([line for line in launch("runtime/staged_steps.py", 4, *case.split()) if "model" in line])


def stages_of(model, x, cut):
    joint = sk.capture_joint(model, x, loss=torch.sum)
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    return joint.split(stage_plan(joint.flow, {n: int(i >= cut) for i, n in enumerate(forward)})).stages


def in_one_stage(joint):
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    return joint.split(stage_plan(joint.flow, dict.fromkeys(forward, 0)))


class Squares(nn.Module):
    """The gradients of both factors of a product go back over a border behind which one value goes."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        return self.b(y.view(2, 2, 4).transpose(0, 1).reshape(4, 4)) * y


class Wide(nn.Module):
    """Before the last cuts there is no activation of the size of the gradient of the loss."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        return self.b(y.view(-1, 2, 4).sum(1)) * y[:, ::2] + y.mean()


@pytest.mark.parametrize(("model", "cuts", "slots_only"), [(Squares(), 9, 0), (Wide(), 11, 3)])
def test_each_gradient_comes_back_in_the_slot_of_an_activation_of_its_size(model, cuts, slots_only):
    x, added = torch.randn(4, 4), 0
    for cut in range(1, cuts):
        first, second = stages_of(model, x, cut)
        slots = border_slots(first, second)
        added += len(slots.activations) - len(first.sent)
        assert len(set(slots.slot_of)) == len(slots.slot_of) == len(second.gradients_sent)
        gradients = [torch.randn(value.like.shape) for value in slots.gradients]
        back = slots.packed(gradients, torch.device("cpu"), "here")
        assert [t is not None for t in back] == [value.like.requires_grad for value in slots.crossing]
        for given, found in zip(gradients, slots.unpacked(back, torch.device("cpu")), strict=True):
            assert torch.equal(given, found)
    assert added == slots_only, "a slot is added only where no activation fits"


def test_models_whose_gradients_others_manage_are_refused():
    class Wrapped:
        model = nn.Sequential(nn.Linear(2, 2))

    class Managed(nn.parallel.DistributedDataParallel):
        def __init__(self):
            nn.Module.__init__(self)

    _require_trainable(Wrapped)
    Wrapped.model.append(Managed())
    with pytest.raises(PipelineError, match=r"SK801.*managed by DDP"):
        _require_trainable(Wrapped)


def test_a_pipeline_needs_a_process_group():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    joint = sk.capture_joint(model, x, loss=torch.sum)
    with pytest.raises(PipelineError, match="SK804: there is no process group"):
        sk.runtime.pipeline(in_one_stage(joint))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        x = self.inner(x)
        return nn.functional.scaled_dot_product_attention(x, x, x).sum()


def test_attention_that_was_captured_for_the_cpu_is_refused_on_another_device(monkeypatch):
    monkeypatch.setattr(_torch, "has_kernel", lambda target, kind: kind == "cpu" or "_for_cpu" not in str(target))
    joint = sk.capture_joint(Attention(), torch.randn(1, 3, 4, 4))
    chain = chain_of_step(in_one_stage(joint))
    place_stages(chain, [0], torch.device("cpu"))
    with pytest.raises(PipelineError, match=r"SK801.*_for_cpu.*, which cuda does not have"):
        place_stages(chain, [0], torch.device("cuda"))


def test_a_model_without_weights_is_refused():
    model = Attention().to("meta")
    joint = sk.capture_joint(model, torch.randn(1, 3, 4, 4, device="meta"))
    with pytest.raises(PipelineError, match=r"SK807.*on meta(.|\n)*Capture the model on the CPU"):
        place_stages(chain_of_step(in_one_stage(joint)), [0], torch.device("cpu"))
    model.to_empty(device="cpu")
    place_stages(chain_of_step(in_one_stage(joint)), [0], torch.device("cpu"))


def test_what_ranks_cannot_run_is_refused_on_both():
    lines = [line for line in launch("runtime/refused_stages.py", 2) if "said" in line]
    said = {case: {line["said"] for line in lines if line["case"] == case} for case in {line["case"] for line in lines}}
    assert len(lines) == 2 * len(said)
    assert said["batch"] == {"SK802: input is float32[6, 8]"}
    (weights,) = said["weights"]
    assert weights.startswith("SK804: 2.") and "other values on rank 1 than on rank 0" in weights
    assert all(text.startswith("SK804: input has other values on rank") for text in said["other batch"])
    assert said["buffer"] == {
        "SK801: stage 1 updates seen, and stage 0 reads it: its next microbatch would miss the update"
    }
    assert said["spectral norm"] == {""} and said["same cut"] == {""}
    (written,) = said["other cut"]
    assert written.startswith("SK804: 2.") and "other values on rank 1 than on rank 0" in written
