"""Policies that look at each node once plan large graphs in no time."""

from __future__ import annotations

import time

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit.policies import AroundOps, AtMarkers, Buckets, BySupport


@pytest.mark.parametrize(
    "policy",
    [
        AroundOps("sin"),
        AtMarkers("sin"),
        Buckets(100),
        BySupport(lambda n: n.target != "sin"),
        BySupport("sin", unsupported="parts", min_size=2),
    ],
    ids=lambda p: type(p).__name__,
)
def test_large_graphs_are_planned_in_well_under_a_second(policy, large):
    flow, costs = large
    start = time.perf_counter()
    plan = policy.assign(flow, costs)
    assert time.perf_counter() - start < 1.5, "0.1 to 0.2 s on an idle core"
    assert len(plan) == len(flow.nodes) == 30_000


@pytest.fixture(scope="module")
def large():
    made = fx.Graph()
    root = nn.Module()
    x = y = made.placeholder("x")
    for i in range(5_000):
        root.register_parameter(f"w{i}", nn.Parameter(torch.ones(2)))
        x = made.call_function(torch.mul, (x, made.get_attr(f"w{i}")))
        y = made.call_function(torch.add, (x, y))
        size = made.call_method("size", (y,))
        y = made.call_method("view", (made.call_method("sin", (y,)), size))
        x = made.call_method("relu", (y,))
    made.output((x, y))
    gm = fx.GraphModule(root, made)
    return sk.analyze(gm), sk.costs.unit(gm)
