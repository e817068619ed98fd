"""`Frontier(offload=)`: against every way to keep, offload or recompute, and never above the frontier without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from campaigns import few_of_many
from hypothesis import strategies as st
from offloadgraphs import LINK, EveryWay, chained
from torch import nn

import splitkit as sk
from splitkit.cli import main
from splitkit.costs import Links, flops, roofline
from splitkit.engine.pair import divide
from splitkit.errors import CostError, PolicyError
from splitkit.studies.frontier import Frontier
from splitkit.view.renderers import html

NET = f"{Path(__file__).parents[1] / 'cli' / 'tinynet.py'}:net"
BOTH = Links(pairs={("device", "host"): LINK.out, ("host", "device"): LINK.back})


def simulated(pair):
    return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak


@few_of_many(2, 60, st.integers(0, 10**6), st.sampled_from([None, 6 * 1024]))
def test_points_lie_between_every_way_and_the_frontier_without(seed, host):
    flow, prices = chained(seed)
    every = EveryWay(flow, prices)
    without = Frontier(flow, prices, of="peak", budgets=3)
    frontier = Frontier(flow, prices, of="peak", budgets=3, offload=BOTH, host=host)
    for point in frontier.points:
        pair = divide(flow, point.plan, prices)
        assert simulated(pair) <= point.peak and pair.host_bytes == point.host <= (host or float("inf"))
        least = every.least(point.peak, host or float("inf"))
        assert frontier.bound(point.peak) - 1e-9 <= least <= point.seconds + 1e-9
    for point in without.points:
        assert frontier.within(point.peak).seconds <= point.seconds


class Mlp(nn.Module):
    """Layers of one width with a pointwise op between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def test_a_plan_within_bytes_is_carried_out():
    joint = sk.capture_joint(Mlp(), torch.randn(64, 16))
    frontier = Frontier(joint, roofline(joint.graph_module, "h100"), of="peak", budgets=2, offload=5e9)
    first = frontier.points[0]
    pair = joint.split(frontier.within(first.peak).plan)
    assert pair.host_bytes == first.host > 0 and first.to_dict()["waits"] == first.waits
    x = torch.randn(64, 16)
    outputs, gradients = pair.run(joint.primals(x), joint.tangents())
    found = joint.read([*outputs, *gradients])
    loss = joint.model(x)
    loss.backward()
    assert torch.allclose(found.loss, loss)
    assert all(torch.allclose(p.grad, found.gradients[name]) for name, p in joint.model.named_parameters())
    assert "on the host" in first.plan.note and "host" in str(frontier.table().columns[-1].header)
    assert "waiting" in html(frontier)


def test_what_makes_no_sense_is_refused():
    flow, prices = chained(1)
    for words, error, code in (
        ({"offload": "pcie5"}, PolicyError, "of='peak'"),
        ({"of": "peak", "host": "1GiB"}, PolicyError, "no link"),
        ({"of": "peak", "offload": "pcie9"}, CostError, "pcie9"),
        ({"of": "peak", "offload": 1e9, "host": 0}, PolicyError, "without memory"),
    ):
        with pytest.raises(error, match=code):
            Frontier(flow, prices, **words)
    joint = sk.capture_joint(Mlp(), torch.randn(64, 16))
    with pytest.raises(PolicyError, match="seconds"):
        _ = Frontier(joint, flops(joint.graph_module), of="peak", offload=1e9).points


def test_the_command(capsys):
    words = ["sweep", NET, "--size", "layers=1,width=8,vocab=32", "--points", "2"]
    assert main([*words, "--offload", "pcie5"]) == 2 and "--of peak" in capsys.readouterr().err
    assert main([*words, "--of", "peak", "--offload", "pcie5", "--host", "1GiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["offload"] == "pcie5" and all(row["host"] <= 2**30 for row in data["points"])
