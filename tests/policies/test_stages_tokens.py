"""`Stages` for inference with a cache: as many tokens, or as fast, as the best of all cuts and no worse than rules."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example
from torch import nn

import splitkit as sk
from splitkit.errors import NoPlanError, SplitError
from splitkit.extend import cache_bytes
from splitkit.pipeline.memory import ByteBreakdown, cache_room
from splitkit.pipeline.stage_prices import StagePrices, run_order
from splitkit.policies import Devices, Stages
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.stages.stage_search import StagePlanner


class Decoder(nn.Module):
    """An embedding, blocks of attention and two products whose sizes differ, and a head."""

    def __init__(self, widths, words=300, width=16):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.inner = nn.ModuleList(nn.Linear(width, w, bias=False) for w in widths)
        self.outer = nn.ModuleList(nn.Linear(w, width, bias=False) for w in widths)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids):
        x = self.embed(ids)[:, None]
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            x = outer(torch.relu(inner(x)))
        return self.head(x)


@cache
def decoder(*widths):
    gm = sk.capture(Decoder(widths), torch.zeros(1, 4, dtype=torch.long))
    return gm, sk.analyze(gm), sk.costs.roofline(gm, "h100")


def inference_prices(flow):
    return StagePrices(flow, sk.costs.flops(flow.root), None)


def prices_of(flow):
    return flow.fact(inference_prices)


def kept(flow, plan, count):
    """Bytes of cache per token of each stage."""
    held = [0] * count
    for node, nbytes in cache_bytes(flow).items():
        held[plan.home(node)] += nbytes
    return held


def room_of(flow, plan, limits):
    """The tokens that a plan has room for, by its true peaks; it may leave devices empty."""
    used = run_order(flow, plan)
    held = kept(flow, plan, len(limits))
    return min(cache_room(prices_of(flow).of(plan), [held[d] for d in used], [limits[d] for d in used]))


@cache
def rooms(widths, limits):
    """Every cut of a decoder, and the tokens that it has room for."""
    _, flow, _ = decoder(*widths)
    return [(cut, room_of(flow, cut, limits)) for cut in every_cut(flow, len(limits))]


def every_cut(flow, count):
    nodes = flow.nodes
    for cuts in combinations(range(1, len(nodes)), count - 1):
        yield sk.Plan.of({node: sum(at >= cut for cut in cuts) for at, node in enumerate(nodes)})


def bottleneck(flow, costs, plan, count, links=None):
    travel = None if links is None else TransferTimes.over(links, range(count), training=False)
    placing = PlacementModel(flow, costs, [{n: costs.seconds(n) for n in flow.nodes}])
    return float(placing.loads(plan, tuple(range(count)), [0] * count, travel).max())


@pytest.mark.parametrize(
    ("widths", "limits"),
    [
        ((8, 8, 8, 8), (60_000, 60_000)),
        ((8, 64, 8, 128), (60_000, 50_000)),
        ((128, 8, 8, 64, 8), (40_000, 80_000, 30_000)),
        ((16, 16, 16, 16, 16), (24_000, 90_000, 40_000)),
    ],
)
def test_no_cut_has_room_for_more_tokens(widths, limits):
    gm, flow, costs = decoder(*widths)
    plan = sk.plan(gm, Stages(len(limits), objective="tokens", memory=list(limits)), costs)
    best = max(room for _, room in rooms(widths, limits))
    assert plan.claim.objective == "tokens" and plan.claim.optimal
    assert plan.claim.value == plan.claim.bound == room_of(flow, plan, limits) == best
    quickest = min(bottleneck(flow, costs, cut, len(limits)) for cut, room in rooms(widths, limits) if room == best)
    assert bottleneck(flow, costs, plan, len(limits)) <= quickest * 1.01 * (1 + 1e-9)


def test_the_note_says_what_the_tightest_stage_holds():
    gm, flow, costs = decoder(8, 64, 8, 128)
    plan = sk.plan(gm, Stages(2, objective="tokens", memory="60kB"), costs)
    tight, tokens = plan.claim.limiting, plan.claim.value
    stage = prices_of(flow).of(plan)[tight]
    held = ByteBreakdown.of_stage(stage, cache=tokens * kept(flow, plan, 2)[tight])
    per_token = kept(flow, plan, 2)[tight]
    assert held.total <= 60_000 < held.total + per_token
    assert f"{tokens:,} tokens" in plan.note and f"inference: stage {tight} is tightest, {held.told}" in plan.note


UNEQUAL = sk.costs.Links.matrix([[0, 1e9, 1e8], [1e9, 0, 1e7], [1e8, 1e7, 0]], 1e-6)


@pytest.mark.parametrize(("links", "share"), [(None, 1.0), (UNEQUAL, 0.5), (UNEQUAL, 1.0)])
def test_no_cut_with_room_for_the_tokens_is_faster(links, share):
    widths, limits = (128, 8, 8, 64, 8), (40_000, 80_000, 30_000)
    gm, flow, costs = decoder(*widths)
    most = sk.plan(gm, Stages(3, objective="tokens", memory=list(limits)), costs).claim.value
    tokens = int(share * most)
    policy = Stages(3, objective="throughput", tokens=tokens, memory=list(limits), links=links, tolerance=0.0)
    plan = sk.plan(gm, policy, costs)
    assert room_of(flow, plan, limits) >= tokens
    loads = [bottleneck(flow, costs, cut, 3, links) for cut, room in rooms(widths, limits) if room >= tokens]
    assert plan.claim.bound * (1 - 1e-9) <= plan.claim.value <= min(loads) * (1 + 1e-9)
    assert plan.claim.value == pytest.approx(bottleneck(flow, costs, plan, 3, links))
    assert "of cache" in plan.note
    with pytest.raises(sk.errors.NoPlanError, match=r"SK303.*for inference.*of cache") as error:
        sk.plan(gm, Stages(3, objective="throughput", tokens=most * 2, memory=list(limits), links=links), costs)
    need = int(re.search(r"Give (\d+) bytes", error.value.remedy)[1])
    sk.plan(gm, Stages(3, objective="throughput", tokens=most * 2, memory=need, links=links), costs)


@pytest.mark.parametrize("links", [None, "pcie4"])
def test_devices_of_unequal_speed_leave_room_for_the_tokens(links):
    gm, flow, costs = decoder(128, 8, 8, 64, 8)
    policy = Devices(["l4", "h100"], memory=[40_000, 90_000], links=links)
    free = sk.plan(gm, policy, costs)
    tokens = 1 + room_of(flow, free, (40_000, 90_000))
    plan = sk.plan(gm, replace(policy, tokens=tokens), costs)
    assert room_of(flow, free, (40_000, 90_000)) < tokens <= room_of(flow, plan, (40_000, 90_000))
    assert "of cache" in plan.note and plan.claim.value >= free.claim.value
    with pytest.raises(sk.errors.NoPlanError, match="of cache"):
        sk.plan(gm, replace(policy, tokens=10**6), costs)
    with pytest.raises(sk.errors.PolicyError, match="objective='latency' is for a single one"):
        Devices(["l4", "h100"], objective="latency", tokens=5)


@pytest.fixture(scope="module")
def rules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("rules")
    sys.modules.pop("rules", None)


@pytest.mark.parametrize("name", these_first(["llama"], ["gpt2"]))
def test_no_rule_of_another_tool_has_room_for_more_tokens(rules, name):
    example, gm = captured_example(name, layers=4, width=32, heads=2, vocab=400, batch=1, seq=4)
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    whole = prices_of(flow).of([flow.nodes])[0].parameter_bytes
    for limits in ((whole, whole, whole // 2), (whole // 2, whole, whole, whole)):
        plan = sk.plan(gm, Stages(len(limits), objective="tokens", memory=list(limits), seconds=0.5), costs)
        assert plan.claim.value == room_of(flow, plan, limits) <= plan.claim.bound
        others = {}
        for rule, planned in rules.SERVING.items():
            with suppress(SplitError):
                others[rule] = room_of(flow, planned(flow, example.model, len(limits), costs), limits)
        with suppress(SplitError, IndexError):
            others["greedy"] = room_of(flow, rules.accelerate_within(flow, example.model, limits), limits)
        assert len(others) >= 4 and plan.claim.value >= max(others.values()), others


def test_one_token_short_is_refused_with_a_memory_that_does():
    gm, flow, costs = decoder(8, 8)
    peaks = [[ByteBreakdown.of_stage(stage).total for stage in prices_of(flow).of(cut)] for cut in every_cut(flow, 2)]
    least = min(map(max, peaks))
    huge = dict.fromkeys(cache_bytes(gm), 10**6)
    with pytest.raises(sk.errors.NoPlanError, match=r"inference.*not the cache of one token") as error:
        sk.plan(gm, Stages(2, objective="tokens", memory=least, cache=huge), costs)
    need = int(re.search(r"Give (\d+) bytes", error.value.remedy)[1])
    assert sk.plan(gm, Stages(2, objective="tokens", memory=need, cache=huge), costs).claim.value == 1
    with pytest.raises(sk.errors.NoPlanError, match=r"does not fit.*inference: .* of weights"):
        sk.plan(gm, Stages(2, objective="tokens", memory=least // 2), costs)


def test_the_cache_can_be_given():
    gm, _, costs = decoder(8, 8, 8, 8)
    twice = {node.name: 2 * nbytes for node, nbytes in cache_bytes(gm).items()}
    policy = Stages(2, objective="tokens", memory="60kB")
    found = sk.plan(gm, policy, costs).claim.value
    less = sk.plan(gm, Stages(2, objective="tokens", memory="60kB", cache=twice), costs).claim.value
    assert found // 2 == less
    by_node = {node: 2 * nbytes for node, nbytes in cache_bytes(gm).items()}
    assert sk.plan(gm, Stages(2, objective="tokens", memory="60kB", cache=by_node), costs).claim.value == less


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"objective": "speed"}, "objective is 'speed'"),
        ({"objective": "tokens"}, "needs the memory of each device"),
        ({"objective": "tokens", "memory": ["1GiB", None]}, "needs the memory of each device"),
        ({"objective": "tokens", "memory": "1GiB", "tokens": 5}, "finds the tokens"),
        ({"objective": "throughput", "tokens": -1}, "tokens is -1"),
        ({"objective": "throughput", "schedule": "1f1b"}, "is for training"),
        ({"objective": "throughput", "optimizer": "adam"}, "is for training"),
        ({"objective": "tokens", "memory": "1GiB", "replicas": (1, 2)}, "is for training"),
        ({"objective": "tokens", "memory": "least"}, "memory='least'"),
        ({"tokens": 5}, "without an objective"),
        ({"cache": {}}, "without an objective"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given, text):
    with pytest.raises(sk.errors.PolicyError, match="SK302") as error:
        Stages(2, **given)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("cache", "text"),
    [({"nothing": 1}, "not a node"), ({"linear": -1}, "is -1"), ([1], r"cache is \[1\]"), ({"linear": 0}, "no bytes")],
)
def test_a_senseless_cache_is_refused(cache, text):
    gm, _, costs = decoder(8, 8)
    with pytest.raises(sk.errors.PolicyError, match=rf"SK302.*{text}"):
        sk.plan(gm, Stages(2, objective="tokens", memory="1MiB", cache=cache), costs)


def test_a_graph_without_attention_and_prices_with_backward_are_refused():
    gm = sk.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(1, 4))
    with pytest.raises(sk.errors.PolicyError, match="no node calls scaled_dot_product_attention"):
        sk.plan(gm, Stages(2, objective="tokens", memory="1MiB"))
    gm, _, costs = decoder(8, 8)
    with pytest.raises(sk.errors.PolicyError, match="the prices include backward"):
        sk.plan(gm, Stages(2, objective="tokens", memory="1MiB"), sk.costs.training(costs))


def test_a_file_keeps_the_plan_with_its_claim():
    gm, _, costs = decoder(8, 8, 8, 8)
    made = sk.plan(gm, Stages(2, objective="tokens", memory="60kB"), costs)
    assert made.claim.value <= made.claim.bound
    assert sk.Plan.from_dict(gm.graph, made.to_dict()).claim == made.claim


def test_the_fastest_cut_with_room_stands_in_where_no_other_stages_are_found(monkeypatch):
    widths, limits = (128, 8, 8, 64, 8), (40_000, 80_000, 30_000)
    gm, flow, costs = decoder(*widths)
    tokens = max(room for _, room in rooms(widths, limits)) // 2

    def finds_none(planner):
        raise NoPlanError("SK303", "none was found", "Give more seconds.")

    monkeypatch.setattr(StagePlanner, "plan", finds_none)
    plan = sk.plan(gm, Stages(3, objective="throughput", tokens=tokens, memory=list(limits), tolerance=0.0), costs)
    best = min(bottleneck(flow, costs, cut, 3) for cut, room in rooms(widths, limits) if room >= tokens)
    assert plan.claim.value == pytest.approx(bottleneck(flow, costs, plan, 3)) == pytest.approx(best)
    assert 0 < plan.claim.bound <= best * (1 + 1e-9) and plan.claim.objective == "bottleneck"
