"""`Devices`: compared with every placement of small graphs, and each rule of the placement."""

from __future__ import annotations

from itertools import groupby, pairwise, permutations, product
from random import Random

import pytest
import torch
from campaigns import few_of_many
from placedgraphs import Deep, Prices, dags, load_of
from torch import nn

import splitkit as sk
from splitkit.policies import Devices
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.testing import assert_legal, assert_same

LINK = sk.costs.Link(1e9, 0.25)


def device_of(plan, node):
    key = plan.home(node)
    return key[0] if isinstance(key, tuple) else key


@few_of_many(12, 60, dags(nodes=5))
def test_no_sets_are_better(case):
    gm, seconds = case
    flow, costs = sk.analyze(gm), Prices(seconds)
    plan = Devices(["h100", "h100"], links=sk.costs.Links(LINK), pieces=None, seconds=1).assign(flow, costs)
    assert_legal(flow, plan)
    best = min(
        max(load_of(flow, costs, dict(zip(flow.nodes, choice, strict=True)), number, LINK) for number in range(2))
        for choice in product(range(2), repeat=len(flow.nodes))
    )
    assert plan.claim.bound <= best + 1e-6
    if all(len(places) == 1 for places in plan.values()):
        device = {n: device_of(plan, n) for n in flow.nodes}
        value = max(load_of(flow, costs, device, number, LINK) for number in range(2))
        assert value == pytest.approx(best, abs=1e-6) and plan.claim.value == pytest.approx(value, abs=1e-6)


@pytest.fixture(scope="module")
def deep():
    gm = sk.capture(Deep(), torch.randn(4096, 32))
    return gm, sk.costs.roofline(gm, "h100")


def test_a_slower_device_gets_less(deep):
    gm, costs = deep
    plan = sk.plan(gm, Devices(["a100", "h200", "l4"]), costs)
    work = {key: sum(sk.costs.roofline(gm, "h100").seconds(n) for n in plan.members(key)) for key in plan.parts}
    assert work[1] > work[0] > work.get(2, 0.0)
    rows = [
        {n: sk.costs.roofline(gm, kind).seconds(n) for n in sk.analyze(gm).nodes} for kind in ("a100", "h200", "l4")
    ]
    placing = PlacementModel(sk.analyze(gm), costs, rows)
    assert max(placing.loads(plan, (0, 1, 2), (0, 1, 2), None)) == pytest.approx(plan.claim.value)


def test_parts_of_a_mapping_run_on_its_devices(deep):
    gm, costs = deep
    plan = sk.plan(gm, Devices({"cuda:0": "h100", "cuda:1": "h100"}), costs)
    assert {key: str(part.device) for key, part in plan.parts.items()} == {"cuda:0": "cuda:0", "cuda:1": "cuda:1"}
    assert_same(gm, sk.split(gm, plan), torch.randn(4096, 32))


def test_what_goes_together_and_what_only_some_can_run(deep):
    gm, costs = deep
    policy = Devices(["h100"] * 3, together=["layers.[0-8]"], only={"layers.15": [0], "layers.1[0-3]": [1, 2]})
    plan = sk.plan(gm, policy, costs)
    from splitkit.graph.dataflow import module_path

    path = {n: module_path(n) for n in plan}
    assert len({plan.home(n) for n in plan if path[n] in {f"layers.{i}" for i in range(9)}}) == 1
    assert {plan.home(n) for n in plan if path[n] == "layers.15"} == {0}
    assert {plan.home(n) for n in plan if path[n] in {f"layers.{i}" for i in range(10, 14)}} <= {1, 2}


def test_what_no_device_can_run_is_named(deep):
    gm, costs = deep
    policy = Devices(["h100"] * 2, together=["layers.[01]"], only={"layers.0": [0], "layers.1": [1]})
    with pytest.raises(
        sk.errors.NoPlanError, match=r"SK303: Devices: no device supports all .*: linear \(layers\.0\)"
    ) as error:
        sk.plan(gm, policy, costs)
    assert "linear_1" in error.value.nodes


def test_a_cpu_among_accelerators_is_a_host():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1_000_000, 64)
            self.out = nn.Linear(64, 64)

        def forward(self, ids):
            return self.out(self.table(ids).relu()).sum()

    gm = sk.capture(Wide(), torch.zeros(8, dtype=torch.long))
    small = sk.costs.Device("small", {"float32": 10e12}, 300e9, memory=100_000_000)
    plan = sk.plan(gm, Devices([small, "cpu"]), sk.costs.flops(gm))
    embedding = next(n for n in plan if "embedding" in n.name)
    assert plan.home(embedding) == 1  # its table has 256 MB
    with pytest.raises(sk.errors.NoPlanError, match="SK303: Devices: what the parts hold does not fit") as error:
        sk.plan(gm, Devices([small, small]), sk.costs.flops(gm))
    assert 256_000_000 <= int(error.value.remedy.split()[1]) < 257_000_000


def test_latency_is_the_makespan(deep):
    gm, costs = deep
    plan = sk.plan(gm, Devices(["h100", "h100"], objective="latency", links="nvlink4", seconds=1), costs)
    alone = sum(costs.seconds(n) for n in sk.analyze(gm).nodes)
    assert plan.claim.objective == "makespan"
    assert plan.claim.bound <= plan.claim.value <= alone * (1 + 1e-9)  # one device after the other cannot be faster


def test_two_towers_run_side_by_side():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = (nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]) for _ in range(2))

        def forward(self, x):
            return self.left(x) + self.right(x)

    gm = sk.capture(Towers(), torch.randn(4096, 512))
    costs = sk.costs.roofline(gm, "a100")
    plan = sk.plan(gm, Devices(["a100", "a100"], objective="latency", pieces=2, links="nvlink3", seconds=2), costs)
    alone = sum(costs.seconds(n) for n in sk.analyze(gm).nodes)
    assert plan.claim.value < 0.75 * alone
    assert_same(gm, sk.split(gm, plan), torch.randn(4096, 512))


def test_each_pair_of_devices_pays_its_own_link():
    links = sk.costs.Links.matrix([[0, 1e9, 1e6], [1e9, 0, 1e6], [1e6, 1e6, 0]])
    travel = TransferTimes.over(links, (0, 1, 2), training=False)
    sizes = torch.tensor([1.0, 1e6]).double().numpy()
    assert travel.seconds(sizes).tolist() == [1e-9, 1e-3]
    factors = travel.factors(sizes)
    assert factors[0, 1] == pytest.approx(1) and factors[0, 2] == pytest.approx(1000)
    assert TransferTimes.over(sk.costs.Links.preset("pcie4"), (0, 1, 2), training=True).factors(sizes) is None


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (lambda: Devices([]), "SK302", "List at least one"),
        (lambda: Devices("h100"), "SK302", "List at least one"),
        (lambda: Devices(["h101"]), "SK321", "h101"),
        (lambda: Devices(["h100"], objective="speed"), "SK302", "throughput or latency"),
        (lambda: Devices(["h100"], pieces=2), "SK302", "None for any number"),
        (lambda: Devices(["h100"], pieces=None, objective="latency"), "SK302", "whole number"),
        (lambda: Devices(["h100"], only={"a": [3]}), "SK302", "names 3"),
        (lambda: Devices(["h100"], memory=["1GiB", "2GiB"]), "SK302", "2 sizes for 1 devices"),
        (lambda: Devices(["h100"], links="wire"), "SK322", "no link is called"),
        (lambda: Devices(["h100"], seconds=-1), "SK302", "above 0"),
    ],
)
def test_bad_parameters_are_refused(make, code, text):
    with pytest.raises(sk.SplitError, match=text) as error:
        make()
    assert error.value.code == code


def test_a_pattern_that_matches_nothing_is_refused(deep):
    gm, costs = deep
    with pytest.raises(sk.errors.PolicyError, match="SK304.*'layer'"):
        sk.plan(gm, Devices(["h100"], together=["layer"]), costs)


class Linears(nn.Module):
    """A chain of linear layers of these widths."""

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("seed", [0, 5])
def test_a_chain_over_unequal_links_is_optimal(seed):
    """Two fast devices between which only ethernet runs: 1.82 times the optimum was found."""
    random = Random(seed)
    widths = [random.choice([512, 1024, 2048, 4096]) for _ in range(7)]
    with torch.device("meta"):
        gm = sk.capture(Linears(widths).bfloat16(), torch.randn(8192, widths[0], dtype=torch.bfloat16))
    nodes, kinds = list(sk.analyze(gm).nodes), [random.choice(["h100", "a100", "l4"]) for _ in range(3)]
    quick, slow = sk.costs.Link(4e11, 1e-6), sk.costs.Link(1.25e9, 2e-5)
    between = {frozenset(p): random.choice([quick, slow]) for p in ((0, 1), (0, 2), (1, 2))}
    links = sk.costs.Links(pairs={(i, j): between[frozenset((i, j))] for i, j in permutations(range(3), 2)})
    prices = [sk.costs.roofline(gm, kind) for kind in kinds]

    def load(places):
        loads = [sum(prices[d].seconds(n) for n, at in zip(nodes, places, strict=True) if at == d) for d in range(3)]
        for node, (a, b) in zip(nodes, pairwise(places), strict=False):
            if a != b:
                link = between[frozenset((a, b))]
                for end in (a, b):
                    loads[end] += link.latency + prices[0].nbytes(node) / link.bandwidth
        return max(loads)

    best = min(load(p) for p in product(range(3), repeat=6) if len([*groupby(p)]) == len(set(p)))
    plan = sk.plan(gm, Devices(kinds, links=links), prices[0])
    assert load([plan.home(n) for n in nodes]) == pytest.approx(best) == plan.claim.value
    assert plan.claim.optimal and plan.claim.bound == pytest.approx(best)
