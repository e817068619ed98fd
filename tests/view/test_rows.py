"""Rows: every value goes down, each part is a band of its own, and modules keep their names."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from torch import nn

import splitkit as sk
from splitkit.graph.dataflow import waits_for
from splitkit.testing import models
from splitkit.testing.small_nets import loss_or_sum
from splitkit.view.data.rows import ladder_rows


def thirds(gm):
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    return sk.plan(gm, lambda n: 3 * place[n] // len(place))


def rows(gm, plan):
    flow = sk.analyze(gm)
    order = sorted({plan.home(n) for n in flow.nodes})
    part = {n: order.index(plan.home(n)) for n in flow.nodes}
    return flow, part, ladder_rows(flow, part)


@pytest.mark.parametrize("name", these_first(["gpt2", "mixtral"], ["t5", "vit"]))
def test_values_go_down_and_parts_are_bands(name):
    example = models.build(name, layers=2)
    gm = sk.capture(example.model, *example.args, **example.kwargs)
    plan = thirds(gm)
    flow, part, found = rows(gm, plan)
    assert all(found.of[read] <= found.of[n] for n in flow.nodes for read in waits_for(flow, n))
    assert all(found.parts[found.of[n]] == part[n] for n in flow.nodes)
    assert list(found.parts) == sorted(found.parts) and set(found.of.values()) == set(range(len(found)))
    assert len(set(found.names)) == len(found) < len(flow.nodes) / 3


def test_names_are_those_of_modules():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Module()
            self.body.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
            self.body.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            for layer in self.body.layers:
                x = layer(x)
            return self.head(self.body.norm(x)) * 2

    gm = sk.capture(Net(), torch.randn(3, 4))
    _, _, found = rows(gm, sk.plan(gm, lambda n: 0))
    assert found.names == ("body.layers.0", "body.layers.1", "body.norm", "head", "(top level)")
    first = next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)))
    _, _, found = rows(gm, sk.plan(gm, lambda n: int(n is not first)))
    assert found.names[:2] == ("body.layers.0", "body.layers.0 (part 2)") and found.parts[:2] == (0, 1)


def test_backward_of_a_joint_graph_stands_beside_its_forward():
    joint = sk.capture_joint(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(3, 4), loss=loss_or_sum
    )
    flow = sk.analyze(joint.graph_module)
    found = ladder_rows(flow, {})
    assert found.backward and found.backward < set(flow.nodes) and set(found.of) == set(flow.nodes)
    assert {found.of[n] for n in found.backward} == set(range(len(found)))
