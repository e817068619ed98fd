"""Budgets of a whole card: what a real training loop holds at once is what was predicted."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from torch import nn

import splitkit as sk
from splitkit.errors import NoPlanError, PolicyError
from splitkit.policies import Budget, SaveAll
from splitkit.training.flow import optimizer_memory


class Net(nn.Module):
    """A model that returns a loss for an input of shape (batch, 32)."""

    def __init__(self, width=128):
        super().__init__()
        layers = (nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        return self.body(x).square().mean()


def prices(gm):
    return sk.costs.roofline(gm, "a100")


def peak_of(pair):
    return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak


def measured(policy, optimizer, x, microbatches):
    """Return the plan's own peak, and the peak of an epoch of a real loop once the optimizer has its state."""
    torch.manual_seed(0)
    model, backend = Net(), sk.backend(policy, costs=prices)
    step, optimizer = torch.compile(model, backend=backend), optimizer(model.parameters())

    def loop():
        for _ in range(microbatches):
            step(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    loop()
    return peak_of(backend.pairs[0]), sk.measure_memory(loop).peak


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "sgd": torch.optim.SGD,
}


@pytest.mark.parametrize(
    ("name", "microbatches"), these_first([("adamw", 2), ("sgd", 1)], [("adamw", 1), ("momentum", 2)])
)
def test_a_training_loop_holds_what_was_predicted(name, microbatches):
    """Weights, gradients, state of the optimizer and activations, to the byte; and the card holds them."""
    torch._dynamo.reset()
    x = torch.randn(256, 32)
    joint = sk.capture_joint(Net(), x)
    most = peak_of(joint.split(SaveAll()))
    taken = optimizer_memory(joint.flow, name)
    weights = sum(p.numel() * p.element_size() for p in joint.model.parameters())
    kept = taken.gradients if microbatches > 1 else 0
    assert taken.gradients == weights and (taken.state - weights * {"adamw": 2, "momentum": 1, "sgd": 0}[name]) in (
        0,
        24,
    )
    card = int(1.25 * (0.9 * most + taken.state + kept))
    policy = Budget(card=card, optimizer=name, accumulate=microbatches > 1, reserve=0.2)
    own, all_of_it = measured(policy, OPTIMIZERS[name], x, microbatches)
    assert all_of_it == own + taken.state + kept <= card * 0.8 + 1
    assert own < most


def test_a_card_too_small_for_the_step_of_the_optimizer_is_refused():
    """If parameters are most of the memory, the optimizer's step needs more than forward and backward."""
    torch._dynamo.reset()
    x = torch.randn(1, 32)
    joint = sk.capture_joint(Net(), x)
    taken = optimizer_memory(joint.flow, "adamw")
    step = 2 * taken.gradients + taken.state + taken.temporary
    card = step + x.numel() * 4 + 4  # the input, and the gradient of the loss
    fits = Budget(card=card + 64, optimizer="adamw", accumulate=False, reserve=0)
    own, all_of_it = measured(fits, torch.optim.AdamW, x, 1)
    assert own + taken.state < step <= all_of_it <= card + 64
    with pytest.raises(NoPlanError, match="SK303.*optimizer's step alone") as refused:
        joint.split(Budget(card=card - 1, optimizer="adamw", accumulate=False, reserve=0))
    assert refused.value.nearest is not None and refused.value.excess == 1


def test_a_card_is_planned_for_while_torch_compiles():
    """Foreach implementations, which GPUs use, step on meta tensors only outside of the compiler's fake mode."""
    torch._dynamo.reset()
    model, x = Net().to("meta"), torch.randn(256, 32, device="meta")
    taken = optimizer_memory(sk.capture_joint(model, x).flow, "adamw")
    backend = sk.backend(Budget(card=taken.gradients * 6 + 600_000, optimizer="adamw", reserve=0), costs=prices)
    torch.compile(model, backend=backend)(x).backward()
    assert peak_of(backend.pairs[0]) <= 600_000 + 3 * taken.gradients


def test_a_function_may_make_the_optimizer():
    joint = sk.capture_joint(Net(), torch.randn(4, 32))
    by_name = optimizer_memory(joint.flow, "adamw")
    assert optimizer_memory(joint.flow, lambda p: torch.optim.AdamW(p, foreach=False)) == by_name
    assert optimizer_memory(joint.flow, lambda p: torch.optim.AdamW(p, foreach=True)).temporary != by_name.temporary
    assert optimizer_memory(joint.flow, None).state == 0
    with pytest.raises(PolicyError, match="SK302"):
        optimizer_memory(joint.flow, lambda parameters: 3)


def test_the_frozen_have_no_gradient_and_no_state():
    model = Net()
    model.body[2].requires_grad_(False)
    taken = optimizer_memory(sk.capture_joint(model, torch.randn(4, 32)).flow, "adamw")
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    assert taken.gradients == trained and taken.state == 2 * trained + 4 * 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": 0.5, "card": "1GiB"},
        {"card": "1GiB", "of": "saved"},
        {"card": "much"},
        {"card": "1GiB", "optimizer": "adamn"},
        {"card": "1GiB", "reserve": 1.5},
        {"card": "1GiB", "accumulate": 2},
        {},
    ],
    ids=str,
)
def test_a_bad_card_is_refused(wrong):
    with pytest.raises(PolicyError, match="SK302"):
        Budget(**wrong)
