"""The advice in each capture error works."""

from __future__ import annotations

import pytest
import torch
from jointmodels import Checked
from torch import nn

import splitkit as sk
from splitkit.errors import CaptureError, GraphError
from splitkit.policies import Budget


def test_the_advice_of_sk401_is_what_helps():
    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            h = self.linear(x)
            if self.training and torch.rand(()) < 0.1:  # layer drop
                return x
            return h

    x, model = torch.randn(2, 4), Trains()
    with pytest.raises(sk.errors.CaptureError, match=r"model.eval\(\) first") as caught:
        sk.capture(model, x)
    assert model.training and model.linear.training
    assert "symbolic_trace" not in caught.value.remedy and "strict" not in caught.value.remedy
    sk.capture(model.eval(), x)
    with pytest.raises(sk.errors.CaptureError, match="Called without capture, the model raises RuntimeError: .*mat1"):
        sk.capture(nn.Linear(4, 4), torch.randn(2, 3))
    with pytest.raises(sk.errors.CaptureError, match="Write the choice with"), torch.device("meta"):
        sk.capture(Trains(), torch.randn(2, 4))


def test_the_advice_for_joint_graphs_is_what_helps():
    class Drops(nn.Module):  # layerdrop, as in M2M100
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if not self.training or torch.rand([]) > 0.5:
                    x = layer(x)
            return x.sum()

    model, x = Drops(), torch.randn(2, 4, requires_grad=True)
    with pytest.raises(sk.errors.CaptureError, match=r"SK401[\s\S]*at .*torch\.rand[\s\S]*Call model\.eval\(\) first"):
        sk.capture_joint(model, x)
    assert model.training and all(layer.training for layer in model.layers)
    assert len(sk.capture_joint(model.eval(), x).signature.gradients) == 5


def test_the_remedy_for_unknown_sizes_lets_a_budget_plan():
    class Repeated(nn.Module):
        def __init__(self, most: int = 0) -> None:
            super().__init__()
            self.linear, self.most = nn.Linear(4, 4), most

        def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            y = torch.repeat_interleave(self.linear(x), counts, 0)
            if self.most:
                torch._check(y.shape[0] <= self.most)
            return y.square().sum()

    inputs = torch.randn(3, 4), torch.tensor([2, 0, 3])
    with pytest.raises(GraphError, match=r"SK108[\s\S]*torch\._check.*and capture again"):
        sk.capture_joint(Repeated(), *inputs).split(sk.policies.Budget("least"))
    pair = sk.capture_joint(Repeated(most=16), *inputs).split(sk.policies.Budget("least"))
    assert "peak about" in str(sk.simulate_memory(pair.forward, pair.backward))


def test_the_remedy_for_a_size_of_constant_counts_lets_a_budget_plan():
    def body(m, x):
        y = torch.repeat_interleave(m.linear(x), torch.tensor([1, 2, 3, 4]), 0)
        if m.bounded:
            torch._check(y.shape[0] <= 16)
        return y.sin().sum()

    model, x = Checked(body), torch.randn(4, 4)
    model.bounded = False
    with pytest.raises(GraphError, match=r"SK108(.|\n)*torch._check"):
        sk.capture_joint(model, x).split(Budget(1.0))
    model.bounded = True
    assert sk.capture_joint(model, x).split(Budget(1.0)).saved


class OnlyWithoutGradients(nn.Linear):
    """As FlexAttention on a CPU."""

    def forward(self, x):
        out = super().forward(x)
        if out.requires_grad:
            raise NotImplementedError("there is no backward")
        return out


def test_a_model_without_a_backward_is_captured_for_inference():
    net, x = OnlyWithoutGradients(4, 4), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r"without gradients: call model\.requires_grad_\(False\) first\.$"):
        sk.capture(net, x)
    assert torch.equal(sk.capture(net.requires_grad_(False), x)(x), net(x))


class MasksItself(nn.Linear):
    """As LongT5, which torch.export does not let make a mask."""

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None and not torch.compiler.is_compiling():
            attention_mask = torch.ones_like(input_ids)
        return super().forward(input_ids * attention_mask)


def test_a_mask_that_export_does_not_make_is_asked_for():
    net, x = MasksItself(4, 4), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r"Pass attention_mask, too: torch\.ones_like\(input_ids\) if nothing is"):
        sk.capture(net, input_ids=x)
    given = {"input_ids": x, "attention_mask": torch.ones_like(x)}
    assert torch.equal(sk.capture(net, **given)(**given), net(input_ids=x))
