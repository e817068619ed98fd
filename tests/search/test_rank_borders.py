"""Where ranks have several stages: no plan is slower than cuts between blocks, and cuts by ranks' loads are even."""

from __future__ import annotations

from itertools import combinations
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.pipeline.purpose import ranks_of
from splitkit.policies import Expert, Stages
from splitkit.search.stages.rank_borders import RankBorders
from splitkit.solvers.line.rank_pairs import even_pairs


class Headed(nn.Module):
    """Ten blocks, and a head that takes more than one of them."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(10))
        self.head = nn.Linear(64, 1200)

    def forward(self, x):
        for block in self.h:
            x = x + block(x)
        return self.head(x).logsumexp(-1).sum()


def test_no_step_is_longer_than_that_of_cuts_between_blocks():
    with torch.device("meta"):
        gm = sk.capture(Headed(), torch.zeros(4096, 64))
    costs = sk.costs.training(sk.costs.roofline(gm, "h100"))
    flow, links = sk.analyze(gm), sk.costs.Links.preset("nvlink4")

    def step(plan):
        return sk.simulate_schedule(sk.stage_costs(flow, plan, costs), "zbv", 16, links=links).seconds

    asked = Stages(6, schedule="zbv", microbatches=16, links="nvlink4")
    found = step(sk.plan(gm, asked, costs))
    hands = [Expert(6), Expert([1, 2, 2, 2, 2, 1]), Expert(["h.1", "h.3", "h.5", "h.8", "head"])]
    assert found <= min(step(sk.plan(gm, hand, costs)) for hand in hands) * (1 + 1e-3)
    with patch.object(RankBorders, "stages", lambda self, *, moved: iter(())):
        assert found < 0.98 * step(sk.plan(gm, asked, costs))


@pytest.mark.parametrize("schedule", ["zbv", "interleaved-1f1b"])
def test_pairs_of_stages_are_about_as_even_as_they_can_be(schedule):
    rank_of = ranks_of(schedule, 8, 4)
    assert sorted(rank_of) == [0, 0, 1, 1]
    random = np.random.default_rng(0)
    for _ in range(20):
        total = np.concatenate([[0.0], np.cumsum(random.random(14) ** 3)])
        (cuts,) = even_pairs(total, rank_of)

        def worst(inner, total=total):
            return np.bincount(rank_of, np.diff(total[[0, *inner, 14]])).max()

        assert len(cuts) == 3
        assert worst(cuts) <= 1.001 * min(worst(inner) for inner in combinations(range(1, 14), 3))
