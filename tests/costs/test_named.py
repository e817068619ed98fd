"""Prices that a policy asks for by name."""

from __future__ import annotations

import pytest
import torch
from jointmodels import step_of
from torch import nn

import splitkit
from splitkit import costs
from splitkit.costs import Device, Flops, Fused
from splitkit.costs.named import by_inductor, device_of, known_device, priced
from splitkit.errors import GraphError, NoPlanError, PolicyError
from splitkit.frontends.joint_capture import capture_joint
from splitkit.policies import Budget, MinCut
from splitkit.studies.frontier import Frontier
from splitkit.training.choices import savings

MINE = Device("mine", {"float32": 1e12}, 1e11, 1, launch=1e-6)


class Block(nn.Module):
    """Chains between two products."""

    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.up(x)
        y = y * torch.sigmoid(1.7 * y) + torch.sin(y) * torch.cos(y)
        return self.down(y).tanh().exp().sum()


@pytest.fixture(scope="module")
def joint():
    return capture_joint(Block(), torch.randn(128, 64))


def recomputed(pair):
    return {node.name for node, keys in pair.plan.items() if len(keys) == 2}


def test_the_device_is_that_of_the_costs(joint):
    gm = joint.graph_module
    for given in (costs.roofline(gm, MINE, tf32=True), costs.roofline(gm, MINE)):
        found = priced(joint.flow, given, "fused")
        assert isinstance(found, Fused) and found.device == MINE and found.tf32 == given.tf32
    fused = costs.fused(gm, MINE)
    assert priced(joint.flow, fused, "fused") is fused
    assert priced(joint.flow, given, None) is given


DRIVER_NAMES = {
    "NVIDIA H200": "h200",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA RTX A6000": "a6000",
    "Tesla V100-SXM2-32GB": "v100",
    "Tesla T4": "t4",
    "AMD Instinct MI300X": "mi300x",
    "NVIDIA GeForce RTX 3060 Ti": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA A10G": None,
    "NVIDIA P40": None,
}


@pytest.mark.parametrize(("name", "known"), DRIVER_NAMES.items())
def test_a_gpu_is_known_by_the_name_that_its_driver_gives(name, known):
    assert known_device(name) == known


def test_else_the_device_is_where_the_values_live(joint, monkeypatch):
    found = priced(joint.flow, costs.flops(joint.graph_module), "fused")
    assert isinstance(found, Fused) and found.device.name == "cpu"
    far = splitkit.capture(nn.Linear(4, 4), torch.randn(2, 4))
    for node in far.graph.nodes:
        if "val" in node.meta and isinstance(node.meta["val"], torch.Tensor):
            node.meta["val"] = node.meta["val"].to("meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(far) == "a100"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, known in (("NVIDIA H200", "h200"), ("NVIDIA P40", "a100")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert device_of(far) == known


def test_rounded_products_follow_torch(joint):
    before = torch.get_float32_matmul_precision()
    try:
        for precision, rounds in (("high", True), ("highest", False)):
            torch.set_float32_matmul_precision(precision)
            assert by_inductor(joint.graph_module).tf32 == rounds
    finally:
        torch.set_float32_matmul_precision(before)


def test_min_cut(joint):
    gm = joint.graph_module
    fused, plain = (joint.split(MinCut(price=p), costs.roofline(gm, MINE)) for p in ("fused", 1e11))
    assert recomputed(fused) == recomputed(joint.split(MinCut(), costs.fused(gm, MINE)))
    assert recomputed(fused) > recomputed(plain)


def test_budget(joint):
    prices = costs.fused(joint.graph_module, MINE)
    seconds = []
    for price in (None, "fused"):
        pair = joint.split(Budget(0.5, of="saved", price=price), costs.roofline(joint.graph_module, MINE))
        seconds.append(sum(prices.seconds(n) for n, keys in pair.plan.items() if len(keys) == 2))
    assert seconds[1] < seconds[0]


def test_frontier(joint):
    given = costs.roofline(joint.graph_module, MINE)
    fused, plain = Frontier(joint, given, price="fused"), Frontier(joint, given)
    assert fused.to_dict() == Frontier(joint, costs.fused(joint.graph_module, MINE)).to_dict()
    assert fused.points[-1].saved < plain.points[-1].saved  # what costs nothing to compute again is not saved
    assert fused.points[0].seconds < plain.points[0].seconds


def test_names_that_are_none(joint):
    for make in (MinCut, Budget, Frontier):
        args = {MinCut: (), Budget: (0.5,), Frontier: (joint,)}[make]
        with pytest.raises(PolicyError, match=r"SK302.*price='unfused'"):
            make(*args, price="unfused")
    with pytest.raises(PolicyError, match="SK302"):
        MinCut(price=-1.0)


def test_sizes_are_needed():
    joint = capture_joint(Block(), torch.randn(8, 64))
    problem = joint.flow
    for node in joint.graph_module.graph.nodes:
        node.meta.pop("val", None)
    with pytest.raises(GraphError, match="SK102"):
        priced(problem, costs.unit(joint.graph_module), "fused")
    assert isinstance(by_inductor(joint.graph_module), costs.Unit)


def test_inductor_plans_at_fused_prices():
    seen = []

    class Watch:
        """Sees the prices; nothing is compiled, as it gives no plan."""

        def assign(self, flow, given):
            seen.append(given)
            raise NoPlanError("SK303", "seen", "None.")

    doors = [splitkit.backend(Watch(), inner) for inner in ("eager", "inductor")]
    for door in (*doors, splitkit.backend(Watch(), "inductor", costs=costs.unit)):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="seen"):
            torch.compile(Block(8), backend=door)(torch.randn(4, 8))
    assert [type(given) for given in seen] == [Flops, Fused, costs.Unit]
    assert all(given.seconds(node) >= 0 for given in seen for node in given.gm.graph.nodes)


def test_fused_plans_are_the_better_ones_where_kernels_fuse():
    """GPT-2 without dropout: at equal saved bytes backward takes no longer by the kernels of the pair that is made."""
    joint, _ = step_of(2)
    given = costs.roofline(joint.graph_module, MINE)
    taken = []
    for price in (None, "fused"):
        pair = joint.split(Budget(0.65, of="saved", price=price), given)
        prices = costs.fused(pair.backward, MINE)
        taken.append(sum(map(prices.seconds, pair.backward.graph.nodes)))
    assert len(savings(joint.flow, given).ops) > 50 and taken[1] < taken[0]
