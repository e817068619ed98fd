"""Joint graphs take numbers, flags and strings as inputs, and refuse other values later."""

from __future__ import annotations

import pytest
import torch
from jointmodels import assert_step_like_eager
from torch import nn

import splitkit as sk
from splitkit.errors import GraphError
from splitkit.policies import Budget, MinCut, SaveAll


class Flagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, flag=True, scale=1.0, mode="a", none=None, many=()):
        h = self.linear(x).relu() if flag else self.linear(x)
        for factor in many:
            h = h if factor is None else h * factor
        return h.mul(scale).sum() if mode == "a" else h.mean()


@pytest.mark.parametrize(
    "given",
    [
        {"flag": False},
        {"flag": True},
        {"scale": 2.0},
        {"scale": 3},
        {"mode": "b"},
        {"none": None},
        {"many": [2, None, 0.5, True]},
        {"many": (torch.ones(8), 3)},
    ],
    ids=str,
)
def test_python_values_among_the_inputs_are_planned_with_and_held_to(given):
    x = torch.randn(2, 8)
    joint = assert_step_like_eager(Flagged(), Budget(1.0), x, **given)
    assert sk.Frontier(joint).points
    assert joint.split(Budget(0.9, of="saved")).plan
    other = {"many": [5, 5]} if "many" in given else {"none": 1} if "none" in given else {"scale": -1.0, **given}
    other = other if other != given else {"scale": 7.0}
    with pytest.raises(GraphError, match="SK109"):
        joint.primals(x, **other)


def test_not_a_number_is_the_same_input_again():
    x = torch.randn(2, 8)
    joint = sk.capture_joint(Flagged(), x, scale=float("nan"))
    assert joint.primals(x, scale=float("nan"))
    with pytest.raises(GraphError, match="SK109"):
        joint.primals(x, scale=1.0)


@pytest.mark.parametrize("policy", [SaveAll(), MinCut(), Budget(1.0), Budget(0.9, of="saved")], ids=str)
def test_partition_fn_takes_a_python_int(policy):
    from functorch.compile import aot_function, nop

    w, x = torch.randn(4, requires_grad=True), torch.randn(4)
    made = aot_function(lambda w, x, k: (x * w).sin() ** k, nop, partition_fn=sk.extend.partition_fn(policy))
    made(w, x, 3).sum().backward()
    again = w.detach().clone().requires_grad_()
    ((x * again).sin() ** 3).sum().backward()
    torch.testing.assert_close(w.grad, again.grad)
