"""`Acyclic`: multilevel stages, with links and memory, and a claim that holds."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit.policies.acyclic import Acyclic
from splitkit.policies.stages import Stages


class Block(nn.Module):
    """A residual block of a few branches."""

    def __init__(self, width):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        a, b, c = (way(x) for way in self.ways)
        return x + torch.relu(a) * torch.sigmoid(b) + torch.tanh(c)


def blocks(count, width=8):
    return sk.capture(nn.Sequential(*(Block(width) for _ in range(count))), torch.randn(2, width))


def wide(count, seed=0):
    """A graph of many cheap ops in layers of ten, each of which reads two of the layer before."""
    made = fx.Graph()
    x = made.placeholder("x")
    layer, random = [x] * 10, torch.Generator().manual_seed(seed)
    while len(made.nodes) < count:
        chosen = torch.randint(10, (10, 2), generator=random).tolist()
        layer = [made.call_function(torch.add, (layer[a], layer[b])) for a, b in chosen]
    made.output(tuple(layer))
    return fx.GraphModule(nn.Module(), made)


def one_way(flow, plan):
    """Return whether no value goes to an earlier stage."""
    return all(plan.home(read) <= plan.home(node) for node in flow.nodes for read in flow.inputs(node) if read in plan)


def test_a_small_graph_gets_the_stages_of_stages():
    gm = blocks(6)
    flow, costs = sk.analyze(gm), sk.costs.unit(gm)
    plan, stages = Acyclic(4).assign(flow, costs), Stages(4).assign(flow, costs)
    assert plan.claim.optimal and plan.claim.value == stages.claim.value
    assert sk.split(gm, plan) is not None and one_way(flow, plan)


def test_a_graph_past_exact_reach_is_split_near_its_bound_and_the_same_each_time():
    gm = wide(2200)
    flow, costs = sk.analyze(gm), sk.costs.unit(gm)
    plan = Acyclic(8).assign(flow, costs)
    claim = plan.claim
    assert set(plan.parts) == set(range(8)) and one_way(flow, plan)
    assert claim.bound == pytest.approx(len(flow.nodes) / 8, abs=1) and claim.gap < 0.01
    sizes = [sum(plan.home(n) == part for n in flow.nodes) for part in range(8)]
    assert max(sizes) == claim.value == sizes[claim.limiting]
    assert Acyclic(8).assign(flow, costs) == plan


def test_links_and_memory_are_taken_into_account():
    gm = blocks(8, width=32)
    flow, costs = sk.analyze(gm), sk.costs.roofline(gm, "h200")
    free, linked = Acyclic(4).assign(flow, costs), Acyclic(4, links="nvlink4").assign(flow, costs)
    assert linked.claim.value > free.claim.value and one_way(flow, linked)
    each = 8 * 3 * (32 * 32 + 32) * 4
    held = Acyclic(4, memory=each // 3).assign(flow, costs)
    assert "peak" in held.note and one_way(flow, held)
    few = blocks(4, width=32)  # a refusal looks for what would do, which takes long
    with pytest.raises(sk.NoPlanError, match="SK303"):
        Acyclic(2, memory=each // 16).assign(sk.analyze(few), sk.costs.roofline(few, "h200"))


@pytest.mark.parametrize("options", [{"n": 0}, {"n": 2, "memory": "much"}, {"n": 2, "memory": [1, 2, 3]}])
def test_bad_parameters_are_refused(options):
    with pytest.raises(sk.PolicyError, match="SK302"):
        Acyclic(**options)


def test_too_few_nodes_are_refused():
    gm = wide(20)
    with pytest.raises(sk.NoPlanError, match="SK303"):
        Acyclic(1000).assign(sk.analyze(gm), sk.costs.unit(gm))
