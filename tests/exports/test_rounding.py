"""Rounding is exact: the dynamic program against all cuts, by prices of the general scoring and by simulated peaks."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from campaigns import few_and_many
from decodermodels import Decoder, TwoLists, captured, ids, stages
from hypothesis import strategies as st

import splitkit as sk
from splitkit.errors import NoPlanError, PlanError
from splitkit.exports import rounding
from splitkit.exports.carried_plan import layer_sequence
from splitkit.exports.rounding import best_cuts, cheapest_cuts, interval_loads, pricing_of, round_plan
from splitkit.pipeline.schedules import pipeline_order
from splitkit.policies import Stages

THREE = 3


@pytest.fixture(scope="module")
def decoder():
    gm, flow = captured(Decoder(4), ids())
    return gm, flow, sk.costs.roofline(gm, "h100")


def loads_of(loads, cuts):
    return [table[i, j] for table, (i, j) in zip(loads, pairwise([0, *cuts, loads.shape[1] - 1]), strict=True)]


@st.composite
def tables(draw):
    count = draw(st.integers(2, 7))
    values = st.sampled_from([0.0, 1.0, 1.5, 2.0, 3.0, 7.0])
    stages, alike = draw(st.integers(1, count)), draw(st.booleans())
    shape = (1 if alike else stages, count + 1, count + 1)
    loads = np.array([draw(values) for _ in range(int(np.prod(shape)))]).reshape(shape)
    loads[:, *np.tril_indices(count + 1)] = np.inf
    borders = [b for b in range(1, count) if draw(st.booleans())]
    return np.concatenate([loads] * stages) if alike else loads, borders, stages, draw(st.integers(0, 2**16))


def is_cheapest(case):
    loads, borders, stages, seed = case
    refused = np.random.default_rng(seed).random(loads.shape) < 0.15
    found = cheapest_cuts(np.where(refused, np.inf, loads), borders)
    allowed = [
        cuts
        for cuts in combinations(borders, stages - 1)
        if not any(refused[s, i, j] for s, (i, j) in enumerate(pairwise([0, *cuts, loads.shape[1] - 1])))
    ]
    if not allowed:
        assert found is None
        return
    scores = {cuts: (max(loads_of(loads, cuts)), sum(x * x for x in loads_of(loads, cuts))) for cuts in allowed}
    assert scores[found] == pytest.approx(min(scores.values()))


test_the_program_finds_the_cheapest_cuts, test_the_program_finds_the_cheapest_cuts_of_many = few_and_many(
    60, 3000, tables()
)(is_cheapest)


@pytest.mark.parametrize("level", ["layers", "ends", "blocks", "modules"])
@pytest.mark.parametrize("links", [None, "nvlink4"])
def test_loads_of_runs_are_those_of_plans(decoder, level, links):
    """Each stage of a plan has the load that the general scoring finds: the slowest of random cuts, one at a time."""
    _, flow, costs = decoder
    pricing = pricing_of(flow, stages(decoder[0], "layers.2"), costs, links=links)
    sequence = layer_sequence(flow, costs, level)
    loads = interval_loads(sequence, pricing.request, pricing.request.seconds)
    for seed in range(4):
        count = np.random.default_rng(seed).integers(1, min(4, len(sequence.borders)) + 1)
        cuts = sorted(np.random.default_rng(seed).choice(sequence.borders, count, replace=False).tolist())
        assert max(loads_of(np.stack([loads] * (len(cuts) + 1)), cuts)) == pytest.approx(
            pricing.price(sequence.plan(cuts, "")).load, rel=1e-9
        )


class Late(Decoder):
    """Only the last two layers read the table."""

    def forward(self, ids):
        x, table = self.tok_embeddings(ids), self.rotary(ids.shape[1])
        for layer in self.layers[:2]:
            x = layer(x, 1.0)
        for layer in self.layers[2:]:
            x = layer(x, table)
        return self.lm_head(self.norm(x))


def test_a_stage_with_all_readers_of_a_shared_node_computes_it_too():
    gm, flow = captured(Late(4), ids())
    costs = sk.costs.unit(gm)
    sequence = layer_sequence(flow, costs, "layers")
    assert sequence.shared
    pricing = pricing_of(flow, sequence.plan((3,), ""), costs)
    loads = interval_loads(sequence, pricing.request, pricing.request.seconds)
    before, behind = loads_of(np.stack([loads] * 2), (3,))
    assert behind > before and behind == pricing.price(sequence.plan((3,), "")).load


@pytest.mark.parametrize(("level", "schedule"), [("layers", None), ("blocks", "1f1b")])
def test_rounding_is_the_best_of_all_cuts(decoder, level, schedule):
    gm, flow, costs = decoder
    order = None if schedule is None else pipeline_order(schedule, THREE, 6)
    plan = sk.plan(gm, Stages(THREE, schedule=schedule, links="nvlink4"), costs)
    pricing = pricing_of(flow, plan, costs, order)
    sequence = layer_sequence(flow, costs, level)
    cuts = round_plan(pricing, sequence, plan, [0, 1, 2])
    every = {c: pricing.price(sequence.plan(c, "")).load for c in combinations(sequence.borders, THREE - 1)}
    assert every[cuts] == pytest.approx(min(every.values()))
    assert pricing.price(plan).load <= every[cuts] * 1.01  # the policy gives up 1 % at most


def test_rounding_within_memory_is_the_best_that_fits(decoder):
    """The limits lie between the peaks of all plans, so that each excludes some and leaves some."""
    gm, flow, costs = decoder
    order = pipeline_order("1f1b", THREE, 6)
    plan = sk.plan(gm, Stages(THREE, schedule="1f1b"), costs)
    sequence = layer_sequence(flow, costs, "layers")
    free = pricing_of(flow, plan, costs, order)
    every = {c: free.price(sequence.plan(c, "")) for c in combinations(sequence.borders, THREE - 1)}
    peaks = sorted({price.peak for price in every.values()})
    for limit in peaks[:: max(1, len(peaks) // 5)]:
        cuts = best_cuts(pricing_of(flow, plan, costs, order, memory=limit), sequence, THREE)
        assert every[cuts].peak <= limit
        assert every[cuts].load == pytest.approx(min(p.load for p in every.values() if p.peak <= limit))
    with pytest.raises(NoPlanError, match="SK303.*whole modules fit"):
        best_cuts(pricing_of(flow, plan, costs, order, memory=peaks[0] - 1), sequence, THREE)


def test_a_stage_that_does_not_fit_is_excluded_at_its_place_alone(decoder, monkeypatch):
    """Layer 2 does not fit as the second stage of the fastest plan; in the next one it is the third, and fits."""
    _, flow, costs = decoder
    sequence = layer_sequence(flow, costs, "layers")
    count = len(sequence.layers)
    loads = np.full((count + 1, count + 1), np.inf)
    loads[np.triu_indices(count + 1, 1)] = 9.0
    fastest, following = (2, 3, 5), (1, 2, 3)
    for i, j in pairwise([0, *following, count]):
        loads[i, j] = 2.0
    for i, j in pairwise([0, *fastest, count]):
        loads[i, j] = 1.0
    monkeypatch.setattr(rounding, "interval_loads", lambda sequence, request, seconds: loads)
    monkeypatch.setattr(rounding, "_too_large", lambda pricing, sequence, cuts: [1] if cuts == fastest else [])
    assert best_cuts(pricing_of(flow, sequence.plan((1,), ""), costs), sequence, 4) == following


def test_a_plan_between_layers_stays_as_it_is(decoder):
    """Even where other cuts would be faster."""
    gm, flow, costs = decoder
    uneven = stages(gm, "layers.3", "norm")
    sequence = layer_sequence(flow, costs, "layers")
    pricing = pricing_of(flow, uneven, costs)
    cuts = round_plan(pricing, sequence, uneven, [0, 1, 2])
    last = [name for layer in sequence.layers[cuts[1] :] for name in layer.names]
    assert last == ["norm", "lm_head"] and cuts != best_cuts(pricing, sequence, THREE)


def test_cuts_between_two_lists():
    gm, flow = captured(TwoLists(), __import__("torch").randn(2, 8))
    costs = sk.costs.roofline(gm, "h100")
    sequence = layer_sequence(flow, costs, "layers")
    pricing = pricing_of(flow, sequence.plan((3,), ""), costs, links="pcie4")
    every = {c: pricing.price(sequence.plan(c, "")).load for c in combinations(sequence.borders, 2)}
    assert every[best_cuts(pricing, sequence, THREE)] == pytest.approx(min(every.values()))


def test_too_many_stages_are_refused(decoder):
    _, flow, costs = decoder
    sequence = layer_sequence(flow, costs, "blocks")
    with pytest.raises(PlanError, match="SK522.*5 stages, and the model can be cut into 4"):
        best_cuts(pricing_of(flow, sequence.plan((1,), ""), costs), sequence, 5)
