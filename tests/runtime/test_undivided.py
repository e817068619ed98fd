"""Stages whose backward torch cannot divide are found by the steps of backward, as zero-bubble schedules meet them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from splitkit.runtime.undivided import run_whole_if_needed
from splitkit.runtime.values import fresh


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.table = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.kind == "once":
            return (self.b(self.a(x).relu()),)
        if self.kind == "behind a line of ops":
            return (self.a(x) + self.table.weight.exp().t(),)
        if self.kind == "twice":
            return (self.a(self.b(self.a(x))),)
        if self.kind == "what is made of it is read by two":  # as T5's layers do
            bias = self.table.weight.exp()
            return (self.b(self.a(x) + bias) + bias,)
        assert self.kind == "read, and handed on"
        bias = self.table.weight.exp()
        return (self.a(x) + bias, fresh(bias, x))


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        ("once", False),
        ("behind a line of ops", False),
        ("twice", True),
        ("what is made of it is read by two", True),
        ("read, and handed on", True),
    ],
)
def test_a_parameter_that_several_steps_reach(kind, whole):
    torch.manual_seed(0)
    net, x = Net(kind), torch.randn(4, 4, requires_grad=True)
    stage = SimpleNamespace(dw_builder=None)
    run_whole_if_needed(stage, net(x), [x])
    assert (stage.dw_builder is not None) == whole
    if whole:
        assert stage.dw_builder()() is None  # nothing is left


def test_a_stage_without_inputs_that_train_is_left_alone():
    net, x = Net("twice"), torch.randn(4, 4)
    stage = SimpleNamespace(dw_builder=None)
    run_whole_if_needed(stage, net(x), [x])
    assert stage.dw_builder is None


def test_torch_has_what_is_set():
    assert "dw_builder" in PipelineStage.__init__.__annotations__
