"""Placement handles shared ranks, unequal links, extreme prices and graphs of few nodes."""

from __future__ import annotations

import pytest
import torch
from campaigns import few_of_many
from hypothesis import given, settings
from hypothesis import strategies as st
from placedgraphs import Prices, dags, load_of
from torch import fx, nn

import splitkit as sk
from splitkit.pipeline.purpose import ranks_of
from splitkit.policies import Best, Devices, Stages


def chain(*seconds):
    """A chain of relus with these prices."""
    graph = fx.Graph()
    value, by_name = graph.placeholder("x"), {}
    for price in seconds:
        value = graph.call_function(torch.relu, (value,))
        by_name[value.name] = price
    graph.output(value)
    gm = fx.GraphModule(nn.Module(), graph)
    sk.extend.propagate(gm, torch.ones(4))
    return gm, Prices(by_name)


class Two(nn.Module):
    """A large and a small layer that do not wait for each other."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(64, 16)

    def forward(self, x):
        return self.a(x), self.b(x)


def test_memory_limits_go_by_stage_where_stages_do_not_wait_for_each_other():
    gm = sk.capture(Two(), torch.ones(2, 64))
    small = sk.plan(gm, Stages(2, memory=["40KiB", "2MiB"]), sk.costs.unit(gm))
    assert {n.name: small.home(n) for n in small} == {"linear": 1, "linear_1": 0}
    stages = sk.stage_costs(sk.analyze(gm), small, sk.costs.unit(gm))
    assert stages[0].parameter_bytes < stages[1].parameter_bytes


def test_the_claim_counts_every_stage_of_a_rank():
    gm, costs = chain(3.0, 1.0, 3.0, 1.0)
    plan = sk.plan(gm, Stages(4, schedule="interleaved-1f1b"), costs)
    assert ranks_of("interleaved-1f1b", None, 4) == (0, 1, 0, 1)
    assert plan.claim.value == 6.0 and plan.claim.limiting in (0, 2) and plan.claim.bound <= 6.0


@few_of_many(1, 25, dags(), st.sampled_from(["interleaved-1f1b", "zbv"]), st.sampled_from([0.2, 1.0]))
def test_the_bound_of_best_holds_where_two_stages_share_a_rank(case, schedule, latency):
    gm, seconds = case
    costs, links = Prices(seconds), sk.costs.Links(sk.costs.Link(1e9, latency))
    if len(sk.analyze(gm).nodes) < 2:
        return
    alone = sk.plan(gm, Stages(2, schedule=schedule, links=links), costs)
    best = sk.plan(gm, Best(2, schedule=schedule, links=links), costs)
    assert best.claim.bound <= alone.claim.value + 1e-9


def test_the_claimed_makespan_is_that_of_the_pieces_as_they_run():
    """Left of two towers, then their sum: two pieces of one device, with the other's tower between."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    left, right = graph.call_function(torch.relu, (x,)), graph.call_function(torch.sin, (x,))
    early = graph.call_function(torch.cos, (left,))
    total = graph.call_function(torch.add, (early, right))
    graph.output((graph.call_function(torch.neg, (left,)), total))
    gm = fx.GraphModule(nn.Module(), graph)
    sk.extend.propagate(gm, torch.ones(4))
    costs = Prices({"relu": 1.0, "sin": 2.0, "cos": 1.0, "add": 1.0, "neg": 2.0})
    flow = sk.analyze(gm)
    plan = sk.plan(gm, Devices(["h200", "h200"], objective="latency", pieces=2, seconds=1), costs)
    done: dict[object, float] = {}
    free: dict[object, float] = {}
    for key in sk.split(gm, plan).subgraphs:  # each part starts when all that it takes is there
        nodes = plan.members(key)
        device = key[0] if isinstance(key, tuple) else key
        waits = [done[plan.home(read)] for n in nodes for read in flow.inputs(n) if plan.home(read) != key]
        start = max([free.get(device, 0.0), *waits])
        done[key] = free[device] = start + sum(map(costs.seconds, nodes))
    assert max(done.values()) == pytest.approx(plan.claim.value)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(dags(nodes=5), st.lists(st.sampled_from([0.0, 0.5, 4.0]), min_size=6, max_size=6))
def test_devices_with_links_that_differ_are_no_slower_than_one_of_them_alone(case, waits):
    gm, seconds = case
    costs, pairs = Prices(seconds), iter(waits)
    latency = [[0.0 if i == j else next(pairs) for j in range(3)] for i in range(3)]
    links = sk.costs.Links.matrix([[1e9] * 3] * 3, latency)
    plan = sk.plan(gm, Devices(["h100"] * 3, links=links, seconds=0.2), costs)
    assert plan.claim.value <= sum(seconds.values()) + 1e-9


def test_one_device_is_used_where_it_alone_holds_the_model():
    gm = sk.capture(Two(), torch.ones(2, 64))
    whole = sk.stage_costs(sk.analyze(gm), [sk.analyze(gm).nodes], sk.costs.unit(gm), optimizer=None)[0]
    room = whole.parameter_bytes + whole.temporary_bytes
    plan = sk.plan(gm, Devices(["h100", "h100"], memory=[1000, room]), sk.costs.unit(gm))
    assert list(plan.parts) == [1]


def test_stages_that_share_a_rank_pay_for_no_link():
    gm, costs = chain(1.0, 1.0, 1.0, 1.0, 1.0)
    links = sk.costs.Links(sk.costs.Link(1e9, 1.0))
    plan = sk.plan(gm, Stages(2, schedule="zbv", links=links), costs)
    stage = {n: plan.home(n) for n in plan}
    assert plan.claim.value == pytest.approx(
        sum(load_of(sk.analyze(gm), costs, stage, s, sk.costs.Link(1e9)) for s in (0, 1))
    )


def test_there_may_be_as_many_stages_as_nodes_with_masks_among_them():
    class Masked(nn.Module):
        def forward(self, x):
            mask = torch.ones(8).cumsum(0)
            return (x * mask).relu() + mask

    gm = sk.capture(Masked(), torch.randn(8))
    count = len(sk.analyze(gm).nodes)
    plan = sk.plan(gm, Stages(count, links="nvlink4"), sk.costs.unit(gm))
    assert len(plan.parts) == count


def test_a_bound_of_fewer_stages_does_not_stand_for_exactly_so_many():
    gm, costs = chain(1.0, 1.0, 1.0)
    plan = sk.plan(gm, Stages(3, links=sk.costs.Links(sk.costs.Link(1e9, 10.0))), costs)
    assert plan.claim.optimal and plan.claim.value == pytest.approx(21.0, rel=1e-6)


@pytest.mark.parametrize("price", [5e-324, 1e308])
def test_extreme_prices_are_planned_with_or_refused(price):
    gm, costs = chain(price, price, price)
    if price > 1:
        with pytest.raises(sk.errors.CostError, match="SK323"):
            sk.plan(gm, Stages(2), costs)
    else:
        assert len(sk.plan(gm, Stages(2), costs).parts) == 2
