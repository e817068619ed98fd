"""A limit of exactly the lowest possible peak is met, under every schedule, and ``"least"`` finds it."""

from __future__ import annotations

import random

import pytest
import torch
from leastmemory import every_plan
from torch import nn

import splitkit as sk
from splitkit.pipeline.schedules import known_schedules
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.policies import Stages

SCHEDULES = [schedule.word for schedule in known_schedules()]


class Conv(nn.Module):
    """Eight ops, of which the first needs the most memory."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, stride=2, padding=1)
        self.c = nn.Linear(4 * 8 * 8, 10)

    def forward(self, x):
        y = torch.relu(self.b(nn.functional.gelu(self.a(x))))
        return self.c(y.flatten(1)).logsumexp(1).sum()


class Chance(nn.Module):
    """A random model of layers and sums of earlier values."""

    def __init__(self, seed):
        super().__init__()
        chance = random.Random(seed)
        self.width = chance.choice([4, 8])
        self.rows = chance.choice([2, 64])
        count = chance.randint(4, 6)
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(count))
        self.plan = [
            (chance.choice(["layer", "sin", "add"]), chance.randrange(max(0, i - 1), i + 1)) for i in range(count)
        ]

    def forward(self, x):
        values = [x]
        for i, (kind, source) in enumerate(self.plan):
            at = values[source]
            values.append(
                self.layers[i](at) if kind == "layer" else torch.sin(at) if kind == "sin" else at + values[-1]
            )
        return values[-1].sum() + values[-2].sum()


def captured(name):
    torch.manual_seed(0)
    if name == "conv":
        return sk.capture(Conv(), torch.randn(6, 3, 16, 16))
    net = Chance(name)
    return sk.capture(net, torch.randn(net.rows, net.width))


SHORT = [("conv", "1f1b")]
CASES = [
    pytest.param(name, schedule, marks=() if (name, schedule) in SHORT else pytest.mark.campaign)
    for name in ("conv", *range(12))
    for schedule in SCHEDULES
]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_what_one_plan_needs_is_enough(name, schedule):
    gm = captured(name)
    flow, plain = sk.analyze(gm), sk.costs.roofline(gm, "h100")
    prices = StagePrices(flow, sk.costs.training(plain, gm))

    def peak(parts):
        return max(sk.simulate_schedule(prices.of(parts), schedule, 4).peaks)

    peaks = [
        peak([[n for n, s in zip(flow.nodes, stages, strict=True) if s == part] for part in range(4)])
        for stages in every_plan(flow, 4)
    ]
    if not peaks:
        pytest.skip("fewer nodes than stages")
    asked = {"schedule": schedule, "microbatches": 4}
    for memory in (min(peaks), "least"):
        assert peak(sk.plan(gm, Stages(4, memory=memory, **asked), plain)) == min(peaks)
    with pytest.raises(sk.errors.NoPlanError, match="SK303"):
        sk.plan(gm, Stages(4, memory=min(peaks) - 1, **asked), plain)
