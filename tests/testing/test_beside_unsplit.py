"""How far a pipeline is said to be from the unsplit model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from besidewhole import require_same
from torch import nn

import splitkit as sk
from splitkit.errors import PipelineError
from splitkit.runtime import pipeline
from splitkit.testing.pipeline_check import UnsplitModel, gradient_of


class Keys(nn.Module):
    """Attention whose keys have a bias, of which every softmax is free, and a constant made an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)
        return ((weights @ self.v(x)) * torch.tensor([1.0, 2.0] * 4)).square().mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = Keys()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.keys(x)


@pytest.fixture
def beside(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        x = torch.randn(2, 4, 8)
        gm = sk.capture(Net(), x)
        pipe = pipeline(sk.split(gm, lambda node: 0), "gpipe", 2)
        whole = UnsplitModel(pipe)
        batch = torch.cat([x, -x])
        yield pipe, whole, pipe.step(batch), whole.step(batch)
    finally:
        dist.destroy_process_group()


def test_constants_of_a_graph_are_not_compared(beside):
    """KeyError: 'lifted_tensor_0', of Gemma 3, Falcon and DeBERTa."""
    pipe, whole, found, losses = beside
    assert pipe.named_tensors().keys() > whole.held.keys()
    assert repr(pipe) == "<Pipeline GPipe, rank 0: stages (0,) of 1>"
    seen = require_same(whole, found, losses)
    assert seen.gradient < 1e-6 and seen.weight == 0.0


def test_a_gradient_of_mere_rounding_is_no_difference(beside):
    """Of DistilBERT, OPT and RoBERTa, --check said that gradients differ by 0.4 to 1.2."""
    pipe, whole, *_ = beside
    assert 0 < float(gradient_of(whole.held["keys.k.bias"]).abs().max()) < 1e-7
    rounded = -gradient_of(whole.held["keys.k.bias"])
    assert whole.relative_deviation("gradient", "keys.k.bias", rounded) < 1e-3
    for name in ("keys.q.bias", "keys.k.weight", "keys.v.bias"):
        mine = gradient_of(pipe.named_parameters()[name])
        assert whole.relative_deviation("gradient", name, mine) < 1e-6
        assert whole.relative_deviation("gradient", name, 1.1 * mine) == pytest.approx(0.1, rel=1e-3)
        assert whole.relative_deviation("gradient", name, mine * float("nan")) == float("inf")
    assert whole.relative_deviation("weight", "keys.v.bias", whole.held["keys.v.bias"] * 1.01) == pytest.approx(
        0.01, rel=1e-3
    )


def test_a_model_without_a_loss_is_refused_before_anything_runs(tmp_path):
    """Rank 0 spoke of a connection that was closed, since only the last rank saw that there is no loss."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.randn(2, 4)
        pipe = pipeline(sk.split(sk.capture(nn.Linear(4, 4), x), lambda node: 0), "gpipe", 2)
        with pytest.raises(PipelineError, match="SK802: the model returns no loss"):
            pipe.step(torch.cat([x, x]))
        outputs = pipe.infer(torch.cat([x, x]))
        assert outputs is not None and len(outputs) == 2
    finally:
        dist.destroy_process_group()
