"""What an optimizer holds, by hand: weights of a small net, in bytes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import PolicyError
from splitkit.training.flow import check_optimizer, optimizer_memory


@pytest.fixture(scope="module")
def flow():
    """32 bytes of weights and 8 of biases train; the weights of the last layer and the input do not."""
    net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2, bias=False))
    net[1].weight.requires_grad_(False)
    return sk.capture_joint(net, torch.ones(3, 4), loss=torch.sum).flow


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [(None, 0), ("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2), (partial(torch.optim.SGD, momentum=0.5), 1)],
)
def test_gradients_and_states_of_what_trains(flow, optimizer, states):
    found = optimizer_memory(flow, optimizer)
    steps = 4 * 2 if states == 2 else 0  # Adam counts the steps of each parameter in a float32
    assert found.gradients == 32 + 8 and found.state == 40 * states + steps
    assert (found.temporary > 0) == (states == 2)


def test_what_is_no_optimizer_is_refused():
    for good in (None, "adam", "rprop", "momentum", torch.optim.SGD):
        check_optimizer(object(), good)
    for bad in ("adams", 3, ["adam"]):
        with pytest.raises(PolicyError, match=r"SK302: list has optimizer=.*\n.*adamw"):
            check_optimizer([], bad)


def test_an_optimizer_that_cannot_step_without_values_is_refused(flow):
    with pytest.raises(PolicyError, match="SK302.*cannot step on the meta device: ValueError: no"):

        def make(parameters):
            raise ValueError("no")

        optimizer_memory(flow, make)
