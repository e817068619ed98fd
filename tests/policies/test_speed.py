"""Policies that visit each node once take time linear in the size of the graph."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit.policies import AroundOps, AtMarkers, Buckets, ByParameterBytes, BySupport


@pytest.mark.parametrize(
    "policy",
    [
        AroundOps("sin"),
        AtMarkers("sin"),
        Buckets(100),
        ByParameterBytes(100),
        ByParameterBytes("1GiB"),
        BySupport(lambda n: n.target != "sin"),
        BySupport("sin", unsupported="parts", min_size=2),
    ],
    ids=lambda p: type(p).__name__,
)
def test_plans_take_linear_time(policy):
    assert calls(policy, 200) < 5 * calls(policy, 50)


def calls(policy, layers):
    """Count the function calls that planning a graph of six nodes per layer takes."""
    flow, costs, counted = *graph_of(layers), [0]
    flow.nodes  # noqa: B018  what is cached is made before
    sys.setprofile(lambda frame, event, arg: counted.__setitem__(0, counted[0] + event.endswith("call")))
    try:
        plan = policy.assign(flow, costs)
    finally:
        sys.setprofile(None)
    assert len(plan) == len(flow.nodes) == 6 * layers
    return counted[0]


def graph_of(layers):
    made = fx.Graph()
    root = nn.Module()
    x = y = made.placeholder("x")
    for i in range(layers):
        root.register_parameter(f"w{i}", nn.Parameter(torch.ones(2)))
        x = made.call_function(torch.mul, (x, made.get_attr(f"w{i}")))
        y = made.call_function(torch.add, (x, y))
        size = made.call_method("size", (y,))
        y = made.call_method("view", (made.call_method("sin", (y,)), size))
        x = made.call_method("relu", (y,))
    made.output((x, y))
    gm = fx.GraphModule(root, made)
    return sk.analyze(gm), sk.costs.unit(gm)
