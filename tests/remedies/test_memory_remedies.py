"""Remedies of refusals for lack of memory or of parts (SK303): the number that a refusal names has a plan."""

from __future__ import annotations

import re

import pytest
import torch
from carried import refusal
from stackednet import Net, X, forward, joint
from torch import nn

import splitkit as sk
from splitkit.policies import (
    Best,
    Budget,
    ByParameterBytes,
    Devices,
    Expert,
    MemoryBudget,
    MinCut,
    Pipeline,
    Stages,
)
from splitkit.studies.frontier import Frontier


def planned(policy):
    """A plan whose split computes what the graph computes."""
    gm, costs = forward()
    split = sk.split(gm, policy, costs=costs)
    assert torch.equal(split(X), gm(X))
    return split.plan


def divided(policy):
    made, costs = joint()
    return made.split(policy, costs)


def named(error):
    """The first number that the remedy of a refusal names."""
    return int(re.search(r"\d{3,}|\d+(?= bytes)|(?<=at most )\d+|\d+(?= at most)", error.value.remedy)[0])


def enough_for(ask, error):
    """The memory that a refusal names has a plan, and so has each above."""
    for nbytes in (named(error), named(error) + 1, 2 * named(error)):
        ask(nbytes)


def test_stages_in_too_little_memory():
    for options in ({}, {"schedule": "1f1b", "microbatches": 4}):
        with refusal("SK303", "Give {...} bytes ({...}) to each of {...} devices") as error:
            planned(Stages(3, memory=1, **options))
        enough_for(lambda n, options=options: planned(Stages(3, memory=n, **options)), error)
    with refusal("SK303", "Give {...} bytes ({...}) to each of {...} devices") as error:
        planned(Devices(["h100", "h100"], memory=1))
    enough_for(lambda n: planned(Devices(["h100", "h100"], memory=n)), error)


def test_replicas_in_too_little_memory():
    def ask(nbytes):
        return planned(Stages(3, replicas=(1, 2), memory=nbytes, schedule="1f1b", microbatches=6))

    with refusal("SK303", "Give {...} bytes ({...}) to each of {...} devices: for that there is a plan.") as error:
        ask(1)
    enough_for(ask, error)


def test_tokens_in_too_little_memory():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = (y.view(1, 4, 2, 8).transpose(1, 2) for y in self.q(x).chunk(3, -1))
            return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 16))

    gm = sk.capture(nn.Sequential(Layer(), Layer()), X)
    costs = sk.costs.roofline(gm, "h100")

    def ask(nbytes):
        return sk.plan(gm, Stages(2, memory=nbytes, objective="tokens"), costs=costs)

    with pytest.raises(sk.errors.NoPlanError) as error:
        ask(1)
    weights = named(error)  # room for the weights, and for no token
    with refusal("SK303", "Give {...} bytes ({...}) to each of {...} devices: for that there is a plan.") as error:
        ask(weights)
    assert ask(named(error)).claim.value >= 1


def test_parameters_over_the_limit():
    with refusal("SK303", "ByParameterBytes({...}) is the smallest limit that has a plan.") as error:
        planned(ByParameterBytes(1))
    enough_for(lambda n: planned(ByParameterBytes(n)), error)
    with pytest.raises(sk.errors.NoPlanError):
        planned(ByParameterBytes(named(error) - 1))  # the smallest indeed


def test_a_memory_budget_in_too_little_memory():
    for parts in (None, 3):
        with refusal("SK303", "MemoryBudget({...}{...}) would do for {...} ({...}).") as error:
            planned(MemoryBudget(1, parts))
        told = re.findall(r"MemoryBudget\((\d+)\) would do for (\d+) part", error.value.remedy)
        assert told
        for nbytes, count in told:
            assert len(planned(MemoryBudget(int(nbytes), int(count))).parts) == int(count)


def test_a_training_step_in_too_little_memory():
    with refusal("SK303", "{...}; a smaller batch or shorter sequence needs less.") as error:
        divided(Budget(1))
    need = int(re.search(r"Budget\((\d+), of='peak'\)", error.value.remedy)[1])
    divided(Budget(need, of="peak"))
    assert "Budget('least')" in error.value.remedy
    divided(Budget("least"))
    smaller = sk.capture_joint(Net(), X[:1])
    assert smaller.split(Budget(need - 1)).plan  # a smaller batch
    with refusal("SK303", "Allow {...} bytes.") as error:
        Frontier(joint()[0], of="peak").within(1)
    assert Frontier(joint()[0], of="peak").within(named(error)).peak <= named(error)


def test_saved_bytes_that_may_not_be_computed_again():
    noisy = sk.capture_joint(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)), X, loss=torch.sum)
    with refusal("SK303", "Allow {...} bytes.") as error:
        Frontier(noisy, of="saved").within(1)
    assert Frontier(noisy, of="saved").within(named(error)).saved <= named(error)


def test_a_card_that_the_optimizer_alone_overfills():
    with refusal(
        "SK303",
        "No plan of forward and backward changes that: use a larger card, an optimizer with less state, or a smaller "
        "reserve.",
    ):
        divided(Budget(card="28KiB", optimizer="adamw"))
    divided(Budget(card="1MiB", optimizer="adamw"))
    divided(Budget(card="28KiB", optimizer="sgd"))
    with refusal("SK303", "No plan of forward and backward changes that: use a larger card"):
        divided(Budget(card="34KiB", optimizer="adamw", reserve=0.5))
    divided(Budget(card="34KiB", optimizer="adamw", reserve=0.0))
    with refusal("SK303", "{...}; a smaller batch or shorter sequence needs less.") as error:
        divided(Budget(card="30KiB", optimizer="adamw"))
    card = named(error)
    divided(Budget(card=card, optimizer="adamw"))
    with refusal("SK303", "{...}; a smaller batch or shorter sequence needs less."):
        divided(Budget(card=card - 2, optimizer="adamw"))
    with refusal("SK303", "{...}; a smaller batch or shorter sequence needs less.") as error:
        divided(Budget(card="30KiB", optimizer="adamw", reserve="1KiB"))
    divided(Budget(card=named(error), optimizer="adamw", reserve="1KiB"))


def test_more_parts_than_there_are():
    gm, _ = forward()
    with refusal("SK303", "Ask for at most {...}.") as error:
        planned(Stages(99))
    assert len(planned(Stages(named(error))).parts) == named(error) == len(sk.analyze(gm).nodes)
    with refusal("SK303", "Ask for at most {...}, or name modules.") as error:
        planned(Expert(99))
    assert len(planned(Expert(named(error))).parts) == named(error)
    assert len(planned(Expert(["layers.1", "layers.1.1", "layers.4"])).parts) == 4  # modules of any size
    single = sk.capture(nn.Linear(16, 16), X)
    with refusal("SK303", "Name the modules that begin stages."):
        sk.plan(single, Expert(2))
    with refusal("SK303", "Capture a model that computes something."):
        sk.plan(sk.capture(nn.Identity(), X), Stages(2))
    assert planned(Stages(2))
    with refusal("SK303", "Ask for at most {...}.") as error:
        divided(Pipeline(40, "1f1b", 40))
    divided(Pipeline(int(re.search(r"\d+", error.value.remedy)[0]), "1f1b", 40))


def test_best_of_policies_without_a_plan():
    with refusal("SK303", "{...}") as error:
        planned(Best(99))
    assert error.value.remedy == "Ask for at most 14."
    planned(Best(14))
    with refusal("SK303", "Give each rank {...} bytes ({...}): the plan of {...} then fits.") as error:
        planned(Best([Stages(2)], memory="1KiB"))
    planned(Best([Stages(2)], memory=int(re.search(r"(\d+) bytes", error.value.remedy)[1])))


def test_nodes_that_must_stay_together():
    class Written(nn.Module):
        def forward(self, x):
            y = x.clone()
            for _ in range(4):
                y += x
            return y

    class Apart(nn.Module):
        def forward(self, x):
            y = x.clone()
            for _ in range(4):
                y = y + x
            return y

    gm = sk.capture(Written(), X)
    with refusal("SK303", "Ask for {...} at most, or write out of place: x = x + y, not x += y.") as error:
        sk.plan(gm, Stages(4))
    most = int(re.search(r"\d+", error.value.remedy)[0])
    assert len(sk.plan(gm, Stages(most)).parts) == most
    assert len(sk.plan(sk.capture(Apart(), X), Stages(4)).parts) == 4


def test_a_value_that_is_neither_saved_nor_computed_again():
    noisy = sk.capture_joint(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)), X, loss=torch.sum)
    with refusal("SK303", "Let one of these be saved (a finite size), or be computed again."):
        noisy.split(MinCut(size=lambda node: float("inf")))
    noisy.split(MinCut(size=lambda node: 8.0))
