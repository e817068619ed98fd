"""What the page is told so that it can be steered: where cuts may go, and how a step is simulated anew."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from ownorders import own_order
from torch import nn

import splitkit as sk
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.policies import RoundRobin, Stages
from splitkit.view.data.ladder import MOST_MARKS, LadderView, border_marks, resimulated


def test_cuts_may_be_anywhere_where_there_are_few_rows():
    assert border_marks([0, 2, 5], [1.0] * 5) == [0, 1, 2, 3, 4, 5]
    assert border_marks([0, MOST_MARKS], [0.0] * MOST_MARKS) == list(range(MOST_MARKS + 1))
    even = border_marks([0, 640], [1.0] * 640)
    assert even == list(range(0, 641, 640 // MOST_MARKS))


def test_of_many_rows_cuts_may_be_where_they_divide_rows_and_time_evenly_and_where_the_plan_cuts():
    seconds = [0.0] * 450 + [1.0] * 50
    found = border_marks([0, 7, 8, 9, 500], seconds)
    assert {0, 7, 8, 9, 500} <= set(found) and len(found) <= MOST_MARKS + 1 and found == sorted(set(found))
    assert max(b - a for a, b in pairwise(found)) < 500 / 20
    assert max(sum(seconds[a:b]) for a, b in pairwise(found)) < 50 / 20
    assert border_marks(range(501), seconds)[0] == 0 and len(border_marks(range(501), seconds)) <= MOST_MARKS + 1
    assert border_marks([0, 100], [0.0] * 100)[-1] == 100  # without prices


@pytest.fixture(scope="module")
def tall():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(75)])
    gm = sk.capture(model, torch.ones(2, 4))
    return LadderView(sk.analyze(gm), sk.plan(gm, Stages(3)), sk.costs.training(sk.costs.flops(gm)))


def test_a_tall_ladder_prices_stretches_between_marks_only(tall, monkeypatch):
    asked = []
    stage = StagePrices.stage
    monkeypatch.setattr(StagePrices, "stage", lambda *given: asked.append(given) or stage(*given))
    of = replace(tall)  # nothing is known yet
    data = of.still()
    rows = len(data["rows"])
    assert rows == 150 and len(asked) == rows + 3
    asked.clear()
    data = of.to_dict()
    assert len(asked) <= MOST_MARKS * (MOST_MARKS + 1) / 2 and len(data["marks"]) <= MOST_MARKS + 1
    assert len(data["stretches"]["saved"]) == len(asked)
    stages = of.stages
    for k, (a, b) in enumerate(
        pairwise(sorted({0, rows, *(r for r in range(1, rows) if of.rows.parts[r] != of.rows.parts[r - 1])}))
    ):
        i, j, count = data["marks"].index(a), data["marks"].index(b), len(data["marks"]) - 1
        assert data["stretches"]["saved"][i * count - i * (i - 1) // 2 + j - i - 1] == stages[k].saved_bytes


def test_more_parts_than_places_are_drawn(tall):
    plan = sk.plan(tall.flow.root, RoundRobin(2))
    data = LadderView(tall.flow, plan, tall.costs).to_dict()
    assert len(data["stages"]["saved"]) == len(plan.parts) == 150 and len(data["marks"]) == MOST_MARKS + 1


@pytest.fixture(scope="module")
def stages(tall):
    return sk.stage_costs(tall.flow, tall.plan, tall.costs)


def test_the_same_step_of_other_stages(stages):
    links = sk.costs.Links.uniform(1e3, 1e-3)
    run = sk.simulate_schedule(stages, "1f1b", 4, links=links, static_buffers=True)
    again = resimulated(run, stages[:2])
    same = sk.simulate_schedule(stages[:2], "1f1b", 4, links=links, static_buffers=True)
    assert again.timeline == same.timeline and again.peaks == same.peaks
    assert resimulated(run, stages * 2) is None  # more stages than microbatches
    own = sk.simulate_schedule(stages, own_order(["0F0 0B0", "1F0 1B0", "2F0 2B0"]))
    assert resimulated(own, stages) is None
