"""Models of a training step, captured as joint graphs, and their step in eager mode."""

from __future__ import annotations

import copy

import torch
from torch import nn

from splitkit.testing.models import build

TINY = {"layers": 2, "width": 32, "heads": 4, "batch": 2}


TEXT = {**TINY, "vocab": 64, "seq": 8}


MODELS = {
    **dict.fromkeys(("gpt2", "llama", "bert", "t5"), TEXT),
    "vit": {**TINY, "image": 32, "patch": 16, "classes": 10},
    "mixtral": {**TEXT, "experts": 2},
}


def example(name):
    torch.manual_seed(1)
    if name == "conv":
        return Conv(), (torch.randn(4, 3, 8, 8),), {}
    made = build(name, **MODELS[name])
    return made.model, made.args, made.kwargs


def eager(model, args, kwargs, loss=None):
    """Loss, gradients and buffers of one eager step from seed 0, on a copy of the model."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    output = model(*args, **kwargs)
    value = loss(output) if loss else output.loss if hasattr(output, "loss") else output.sum()
    value.backward()
    return value.detach(), {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())


def assert_steps_alike(step, expected):
    loss, gradients, buffers = expected
    assert torch.equal(step.loss, loss)
    assert {n for n, g in gradients.items() if g is not None} == {
        n for n in step.gradients if not n.startswith("input ")
    }
    for name, gradient in gradients.items():
        if gradient is not None:
            assert torch.equal(step.gradients[name], gradient), name
    for name, value in step.updates.items():
        assert torch.equal(value, buffers[name])


def ran(joint, pair, args, kwargs):
    torch.manual_seed(0)
    outputs, gradients = pair.run(joint.primals(*args, **kwargs), joint.tangents())
    return joint.read([*outputs, *gradients])


class Conv(nn.Module):
    """Convolution, BatchNorm (whose buffers are updated) and dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 5))

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
