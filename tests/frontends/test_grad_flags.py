"""A model that sets `requires_grad` is captured if its gradients stay the same, else refused with the line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import CaptureError
from splitkit.extend import module_path


def test_requires_grad_of_a_detached_value_is_refused():
    class Marks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).detach().requires_grad_(True) * 2

    with pytest.raises(CaptureError, match="SK401: the model calls requires_grad_"):
        sk.capture(Marks(), torch.ones(1, 4))


def test_requires_grad_of_an_input_is_captured():
    class Audio(nn.Module):
        def __init__(self, prepare, frozen=False):
            super().__init__()
            self.embed, self.linear, self.prepare = nn.Linear(4, 4), nn.Linear(4, 4), prepare
            self.embed.requires_grad_(not frozen)

        def forward(self, x):
            return self.linear(self.prepare(self, x).tanh()).sum()

    def flagged(h):
        h.requires_grad = True
        return h

    x = torch.randn(2, 4)
    for model in (
        Audio(lambda m, x: flagged(x)),
        Audio(lambda m, x: flagged(x[None])),
        Audio(lambda m, x: (x / 255).requires_grad_()),
        Audio(lambda m, x: m.embed(x).requires_grad_()),
        Audio(lambda m, x: m.embed(x).requires_grad_(), frozen=True),
        Audio(lambda m, x: x + torch.zeros(4).requires_grad_(requires_grad=True)),
    ):
        sk.compare(model, sk.capture(model, x), x).raise_if_different()
    for prepare in (
        lambda m, x: m.embed(x).detach().requires_grad_(),
        lambda m, x: x * m.embed.weight.detach().sum().requires_grad_(),
    ):
        with pytest.raises(CaptureError, match=r"(?s)SK401: the model calls requires_grad_.*test_grad_flags.py:\d+"):
            sk.capture(Audio(prepare), x)


class FlagsInside(nn.Module):
    """Sets requires_grad by assignment, as the feature encoders of Wav2Vec2 do; and keeps a table as an attribute."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.table, self.detached = torch.arange(4.0), detached

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        x = self.first(x).detach() if self.detached else x * scale
        x.requires_grad = True
        return self.last(self.norm(self.first(x + self.table))).square().mean()


def test_a_model_that_flags_its_input_has_a_joint_graph():
    torch.manual_seed(0)
    model, x = FlagsInside(), torch.randn(3, 4)
    before = {name: b.clone() for name, b in model.named_buffers()}
    joint = sk.capture_joint(model, x, scale=3.0)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers()) and model.training
    result = joint.run(x, scale=3.0)
    model(x, scale=3.0).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert result.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(result.gradients[name], gradient)
    for name, value in result.updates.items():
        torch.testing.assert_close(value, model.get_buffer(name))
    assert {"first", "norm", "last"} <= {module_path(n) for n in joint.flow.nodes}
    pair = joint.split(sk.policies.Budget("least"))
    assert sk.simulate_memory(pair.forward, pair.backward).peak > 0
    with pytest.raises(CaptureError, match=r"SK401[\s\S]*requires_grad"):  # another gradient than the graph's
        sk.capture_joint(FlagsInside(detached=True), x)
