"""What users give that makes no sense: door x field x value -> one error of the family, which names node or field."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit import costs, policies
from splitkit.costs import Device, Link, Links
from splitkit.errors import NoPlanError, SplitError
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.policies import (
    AroundOps,
    AtMarkers,
    Best,
    Buckets,
    Budget,
    ByDevice,
    ByName,
    ByParameterBytes,
    BySupport,
    Devices,
    Expert,
    MemoryBudget,
    MinCut,
    Pipeline,
    Precompute,
    Random,
    Remat,
    RoundRobin,
    SaveAll,
    SplitBackward,
    Stages,
)  # fmt: skip
from splitkit.studies.frontier import Frontier

INF, NAN, HUGE = float("inf"), float("nan"), 10**400
NEVER = (
    NAN, -1, -1.5, -INF, 1j, np.float64("nan"), np.int64(-3), True, b"80GiB", object(), int, ["x"], [None], [NAN],
    {"a": 1}, np.zeros(3), torch.tensor(2), "80 parsecs",
)  # fmt: skip
"""No count, time, size or name of anything."""


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


class Branches(Layers):
    def forward(self, x):
        left = self.layers[1](torch.relu(self.layers[0](x)))
        return (left + torch.tanh(self.layers[2](x)) + self.layers[3](x)).sum()


@dataclass
class Case:
    """A model as a forward graph and as a joint one, with facts and prices."""

    gm: Any
    flow: Any
    prices: Any
    joint: Any
    joint_prices: Any

    @classmethod
    def of(cls, model):
        gm, joint = sk.capture(model, torch.randn(2, 4)), sk.capture_joint(model, torch.randn(2, 4))
        return cls(gm, sk.analyze(gm), costs.flops(gm), joint, costs.flops(joint.graph_module))

    @property
    def all_in_one(self):
        return sk.Plan.of(dict.fromkeys(self.flow.nodes, 0))

    def texts(self):
        return str(self.gm.graph), str(self.joint.graph_module.graph)


@pytest.fixture(scope="module", params=[Layers, Branches])
def case(request):
    return Case.of(request.param())


def placed(make):
    return lambda case, **given: make(**given).assign(case.flow, case.prices)


def halved(make):
    return lambda case, **given: make(**given).assign(case.joint.flow, case.joint_prices)


def simulated(case, **given):
    stages = given.pop("stages", [StageCosts(1.0, 1.0)] * 2)
    return sk.simulate_schedule(stages, **{"schedule": "1f1b", "microbatches": 4, **given}).memory


COUNT = (*NEVER, 0, 1.5, INF, "4", "", HUGE)
LIMIT = (*NEVER, INF, 1.5, HUGE, "-1GiB", "9" * 500)
"""Of memory, where None is no limit."""
SIZE = (*LIMIT, None)
TIME = (*NEVER, None, 0, INF, np.float32("inf"), HUGE, 1e308, "1")
SHARE = (*NEVER, None, 1.5, INF, HUGE, "0.5")
WORD = (*NEVER, 0, 1.5, INF, HUGE, "lots")
FIELDS = {
    "Stages": (placed(Stages), {"n": 2}, {
        "n": (*COUNT, None), "schedule": WORD, "memory": LIMIT, "links": WORD, "optimizer": WORD, "seconds": TIME,
        "chunk": COUNT, "tolerance": (*SHARE, None),
        "replicas": (*NEVER[:-1], None, 0, 1.5, INF, HUGE, [], [0], [1.5], "12")}),
    "Stages, 1f1b": (placed(Stages), {"n": 2, "schedule": "1f1b"}, {
        "n": (*COUNT, None), "microbatches": COUNT, "memory": LIMIT, "optimizer": WORD}),
    "Stages, tokens": (placed(Stages), {"n": 2, "objective": "throughput", "tokens": 5}, {
        "objective": WORD, "tokens": (*NEVER, None, 1.5, INF, "4", ""),
        "cache": (*NEVER, 0, 5, "layers.0", [1], {"layers.0": 1})}),
    "Devices, tokens": (placed(Devices), {"devices": ["h200", "h200"], "tokens": 5}, {
        "tokens": (*NEVER, None, 1.5, INF, "4", ""), "cache": (*NEVER, 0, 5, "layers.0", [1], {"layers.0": 1})}),
    "Devices": (placed(Devices), {"devices": ["h200", "h200"]}, {
        "devices": (*NEVER, None, [], {}, "h200", HUGE, [None], {None: "h200"}), "memory": LIMIT, "links": WORD,
        "objective": (*WORD, None), "pieces": (*NEVER, 0, 2, 1.5, INF, HUGE, "1"), "optimizer": WORD, "seconds": TIME,
        "together": (*NEVER, None, 5, "layers.*"),
        "only": (*NEVER, None, 5, "layers.*", {1: [0]}, {"layers.0": 0}, {"layers.0": []}, {"layers.0": [7]})}),
    "Devices, latency": (placed(Devices), {"devices": ["h200", "h200"], "objective": "latency"}, {
        "pieces": (*NEVER, None, 0, 1.5, INF, "1"), "seconds": TIME}),
    "MemoryBudget": (placed(MemoryBudget), {"memory": "1GiB"}, {
        "memory": SIZE, "parts": COUNT, "schedule": WORD, "optimizer": WORD}),
    "MemoryBudget, 1f1b": (placed(MemoryBudget), {"memory": "1GiB", "schedule": "1f1b"}, {"microbatches": COUNT}),
    "Expert": (placed(Expert), {"layers": 2}, {"layers": (*NEVER, None, 0, [], [0], [1.5], INF, HUGE, "layers.2")}),
    "Best": (placed(Best), {"policies": 2}, {
        "policies": (*NEVER, None, 0, [], [3], INF, HUGE, "Stages"), "memory": LIMIT, "links": WORD,
        "seconds": (*NEVER, None, HUGE, "1"), "schedule": WORD, "microbatches": COUNT, "optimizer": WORD}),
    "Buckets": (placed(Buckets), {"bytes": 100}, {"bytes": (*SIZE, 0), "first": (*LIMIT, 0)}),
    "ByParameterBytes": (placed(ByParameterBytes), {"limit": "1GiB"}, {"limit": (*SIZE, 0)}),
    "ByName": (placed(ByName), {"parts": {}}, {"parts": (*NEVER, None, 5, "layers.*", [], {1: 2})}),
    "ByDevice": (placed(ByDevice), {}, {
        "rule": (NAN, -1, None, b"cuda:0", object(), ["x"], {"a": 1}, "cuda:0", lambda node: "x", lambda node: 1.5)}),
    "BySupport": (placed(BySupport), {"rule": ["aten.relu"]}, {
        "rule": (NAN, -1, None, b"mm", [None], torch.tensor(2), object()),
        "unsupported": (*WORD, None), "min_size": (*COUNT, None)}),
    "AroundOps": (placed(AroundOps), {}, {"ops": (NAN, -1, None, b"mm", [None], torch.tensor(2), object())}),
    "AtMarkers": (placed(AtMarkers), {}, {"marker": (NAN, -1, None, [None], torch.tensor(2), {"layers.0": "x"})}),
    "Random": (placed(Random), {}, {
        "n": (*COUNT, None), "seed": (NAN, None, "x", [], 1.5, True, INF), "parent": SHARE, "copies": SHARE}),
    "RoundRobin": (placed(RoundRobin), {}, {"n": (*COUNT, None)}),
    "Budget": (halved(Budget), {"budget": "least"}, {
        "budget": (*SIZE, 1.5, "0.5"), "of": (*WORD, None),
        "candidates": (*NEVER, None, 5, [3], "SaveAll"), "price": WORD, "pool": NEVER}),
    "Budget, card": (halved(Budget), {"card": "1GiB"}, {
        "card": (*SIZE, 1.5), "optimizer": (*NEVER, 5, "lots"), "accumulate": (*NEVER[:7], None, 0, 1, "yes"),
        "reserve": (*NEVER, None, 1.5, INF, HUGE, "-1GiB"), "budget": (0, 0.5, "least"), "of": ("saved",)}),
    "Budget, offload": (halved(Budget), {"budget": "least", "of": "peak"}, {"offload": (*WORD, 0, -1.0)}),
    "Budget, host": (halved(Budget), {"budget": 10**9, "offload": 1e9}, {"host": LIMIT}),
    "Pipeline": (halved(Pipeline), {"n": 2}, {
        "n": (*COUNT, None), "schedule": (*WORD, None), "microbatches": COUNT, "memory": LIMIT, "links": WORD,
        "recompute": (*NEVER[:7], None, 0, 1, "yes"), "optimizer": WORD, "ranks": COUNT,
        "offload": (*WORD, 0, -1.0)}),
    "Pipeline, host": (halved(Pipeline), {"n": 2, "offload": 1e9}, {"host": LIMIT}),
    "Frontier, offload": (lambda case, **given: Frontier(case.joint, case.joint_prices, **given).points, {
        "of": "peak"}, {"offload": (*WORD, 0, -1.0)}),
    "Frontier, host": (lambda case, **given: Frontier(case.joint, case.joint_prices, **given), {
        "of": "peak", "offload": 1e9}, {"host": LIMIT}),
    "MinCut": (halved(MinCut), {}, {
        "price": (*NEVER, None, INF, np.float32("inf"), HUGE, 1e308, "1e11"), "size": (NAN, 5)}),
    "Remat": (halved(Remat), {}, {
        "modules": (*NEVER, None, 5, []), "keep": (NAN, -1, None, b"mm", [None], torch.tensor(2), object())}),
    "Precompute": (halved(Precompute), {}, {"base": (*NEVER, None, SaveAll)}),
    "SplitBackward": (halved(SplitBackward), {}, {
        "price": (*NEVER, INF, np.float32("inf"), HUGE, 1e308, "1e11"),
        "policy": (NAN, -1, None, 1j, b"80GiB", "SaveAll", ["x"], [None], int, SaveAll)}),
    "Frontier": (lambda case, **given: Frontier(case.joint, case.joint_prices, **given).points, {}, {
        "of": (*WORD, None), "budgets": (*COUNT, None), "price": WORD}),
    "within": (lambda case, **given: Frontier(case.joint).within(**given), {}, {"nbytes": (*NEVER, None, HUGE, "-1B")}),
    "bound": (lambda case, **given: Frontier(case.joint).bound(**given), {}, {"nbytes": (*NEVER, None, HUGE, "-1B")}),
    "less": (lambda case, **given: Frontier(case.joint).less(**given), {}, {"fraction": SHARE}),
    "sweep": (lambda case, **given: sk.sweep(case.gm, case.prices, **given), {
        "stages": [2], "microbatches": [4], "schedules": ["1f1b"]}, {
        "stages": (*NEVER, None, [], 4, [0], [1.5], [HUGE], "24"), "microbatches": (*NEVER, None, [], 4, [0], [HUGE]),
        "schedules": (*NEVER, [], "1f1b"), "memory": LIMIT, "links": WORD, "optimizer": (*WORD, None)}),
    "simulate_schedule": (simulated, {}, {
        "stages": (*NEVER, None, [], [1.0]), "schedule": (*WORD, None), "microbatches": (*COUNT, None),
        "ranks": COUNT, "links": WORD, "devices": (*NEVER, 5, "ab", ["a"])}),
    "stage_costs": (
        lambda case, plan=None, **given: sk.stage_costs(case.flow, plan or case.all_in_one, case.prices, **given), {}, {
        "plan": (NAN, -1, b"ab", [[None]], [3], "x", object()), "optimizer": WORD, "activations": (*NEVER, "x")}),
    "Link": (lambda case, **given: Link(**given), {"bandwidth": 1e9}, {
        "bandwidth": (*NEVER, None, 0, HUGE, 5e-324), "latency": (*NEVER, None, INF, HUGE, 1e308)}),
    "Links": (lambda case, **given: Links(**given), {}, {
        "between": (*WORD, 5), "inside": (*WORD, 5), "size": (*NEVER, None, 1.5), "pairs": (*NEVER, None, {0: 1})}),
    "Links.nodes": (lambda case, **given: Links.nodes(**given), {"size": 2, "inside": "nvlink4", "between": "pcie4"}, {
        "size": (*NEVER, None, 0, 1.5, INF), "inside": (*WORD, None), "between": (*WORD, None)}),
    "Links.matrix": (lambda case, **given: Links.matrix(**given), {"bandwidth": [[1, 1], [1, 1]]}, {
        "bandwidth": (*NEVER, None, [[0, 0], [0, 0]], [[1, NAN], [1, 1]]), "latency": (NAN, -1, INF, "x", HUGE),
        "devices": (*NEVER, 5, "abc", ["a"], ["a", "a"], [[], []])}),
    "Links.seconds": (lambda case, nbytes: Links.uniform(1).seconds(0, 1, nbytes), {}, {"nbytes": (*NEVER, HUGE)}),
    "Device": (lambda case, **given: Device(**{"name": "mine", "peak": {"float32": 1e12}, **given}), {
        "bandwidth": 1e9, "memory": 1}, {
        "name": (*NEVER[:-1], None, ""), "bandwidth": (*NEVER, None, 0, INF, HUGE, 5e-324),
        "peak": (*NEVER, None, {}, {"float32": NAN}, {"float32": -1}, {"float32": HUGE}, {"float3": 1}),
        "memory": (*NEVER, None, 0, 1.5, INF, "-1GiB"), "launch": (*NEVER, None, INF, HUGE, 1e308)}),
    "roofline": (lambda case, device: costs.roofline(case.gm, device), {}, {"device": (*WORD, None)}),
    "StageCosts": (lambda case, **given: StageCosts(**{"forward": 1.0, "backward_input": 1.0, **given}), {}, {
        "forward": (*NEVER, None, INF, HUGE, np.float32("inf")), "saved_bytes": (*NEVER, None, 1.5, INF, HUGE, 2**63),
        "activation_bytes": (*NEVER, None, 1.5, INF, HUGE), "unit": (NAN, None, 5)}),
    "measured": (lambda case, **given: costs.measured(case.gm, torch.randn(2, 4), **given), {}, {
        "min_run_time": (*NEVER, None, 0, INF, HUGE, "1"), "device": ("x", HUGE, "cuda:99")}),
}  # fmt: skip
"""Door: (how it is gone through, what is given besides, the bad values of each field)."""


def refused(through, *args, **given):
    """The error; fails the test for any other, and for none."""
    with pytest.raises(SplitError) as caught:
        through(*args, **given)
    assert re.fullmatch(r"SK\d{3}", caught.value.code) and caught.value.reason and caught.value.remedy
    assert len(str(caught.value)) < 2000
    return caught.value


@pytest.mark.parametrize("name", policies.__all__)
def test_every_field_of_every_policy_is_in_the_table(name):
    """A new policy, or a new field of one, is held to bad values too."""
    given = {field for door, (_, _, values) in FIELDS.items() if door.split(",")[0] == name for field in values}
    assert given == {field.name for field in fields(getattr(policies, name))}


@pytest.mark.parametrize("door", FIELDS)
def test_every_bad_value_of_every_field_is_refused(case, door):
    through, besides, fields = FIELDS[door]
    before = case.texts()
    for field, values in fields.items():
        for value in values:
            refused(through, case, **{**besides, field: value})
    assert case.texts() == before


@pytest.mark.parametrize("door", ["Stages", "MemoryBudget", "Buckets", "Random", "Link", "StageCosts", "Device"])
def test_a_refusal_names_the_field(case, door):
    through, besides, fields = FIELDS[door]
    for field, values in fields.items():
        for value in values:
            error = refused(through, case, **{**besides, field: value})
            named = (field, "schedule", "link", "1F1B")  # of schedules and links: by what they are
            assert any(word in str(error) for word in named), str(error)


class Priced:
    """Prices with one that is wrong, at one node or at all."""

    def __init__(self, base, method, value, node=None):
        self.base, self.wrong = base, (method, node, value)

    def seconds(self, node):
        return self._of("seconds", node)

    def nbytes(self, node):
        return self._of("nbytes", node)

    def flops(self, node):
        return self._of("flops", node)

    def param_bytes(self, node):
        return self._of("param_bytes", node)

    def _of(self, method, node):
        wrong, where, value = self.wrong
        if method == wrong and where in (None, node):
            if isinstance(value, Exception):
                raise value
            return value
        return getattr(self.base, method)(node)


PRICES = (
    None, "x", NAN, INF, -1, -1e-9, HUGE, 1j, True, np.float64("nan"), np.float32(-1), np.float32("inf"), np.int64(-1),
    [], object(), 1e308, torch.tensor(1.0), KeyError("a node"), TypeError("a node"),
)  # fmt: skip
FORWARD = {
    "Stages": lambda case, given: Stages(2, seconds=1).assign(case.flow, given),
    "Stages with links": lambda case, given: Stages(2, links="nvlink4", seconds=1).assign(case.flow, given),
    "Stages, 1f1b": lambda case, given: Stages(2, "1f1b", memory="1GiB", seconds=1).assign(case.flow, given),
    "Devices": lambda case, given: Devices(["h200"] * 2, links="nvlink4", seconds=1).assign(case.flow, given),
    "Devices, sets": lambda case, given: Devices(["h200"] * 2, pieces=None, seconds=1).assign(case.flow, given),
    "Devices, latency": lambda case, given: Devices(
        ["h200"] * 2, links="nvlink4", objective="latency", seconds=1
    ).assign(case.flow, given),
    "MemoryBudget": lambda case, given: MemoryBudget("1GiB", 2).assign(case.flow, given),
    "MemoryBudget, inference": lambda case, given: MemoryBudget("1GiB", 2, optimizer=None).assign(case.flow, given),
    "Best": lambda case, given: Best(2, seconds=1).assign(case.flow, given),
    "Expert": lambda case, given: Expert(2).assign(case.flow, given),
    "plan": lambda case, given: sk.plan(case.gm, Stages(2, seconds=1), given),
    "split": lambda case, given: sk.split(case.gm, Stages(2, seconds=1), costs=given),
    "stage_costs": lambda case, given: sk.stage_costs(case.flow, case.all_in_one, given),
    "report": lambda case, given: sk.report(case.gm, case.all_in_one, given),
    "sweep": lambda case, given: sk.sweep(case.gm, given, stages=[2], microbatches=[4], schedules=["1f1b"]),
    "training": lambda case, given: [costs.training(given, case.gm).seconds(node) for node in case.flow.nodes],
}
JOINT = {
    "MinCut": lambda case, given: MinCut().assign(case.joint.flow, given),
    "SplitBackward": lambda case, given: SplitBackward(policy=MinCut()).assign(case.joint.flow, given),
    "Budget": lambda case, given: Budget("least").assign(case.joint.flow, given),
    "Budget, saved": lambda case, given: Budget(0.5, of="saved").assign(case.joint.flow, given),
    "Frontier": lambda case, given: Frontier(case.joint, given).points,
    "split": lambda case, given: case.joint.split(MinCut(), given),
}
OF_BYTES = ("Stages", "Stages with links", "Devices", "Devices, latency", "plan", "report")
"""Doors that ask for the bytes of values."""


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("door", [*FORWARD, *(f"joint {name}" for name in JOINT)])
def test_prices_that_are_none_are_refused_by_the_name_of_the_node(case, door, everywhere):
    joint = door.startswith("joint ")
    through = JOINT[door.removeprefix("joint ")] if joint else FORWARD[door]
    base = case.joint_prices if joint else case.prices
    nodes = (case.joint.flow if joint else case.flow).nodes
    node = next(n for n in nodes if "layers" in str(n.meta.get("nn_module_stack")) and base.flops(n))
    before = case.texts()
    for value in PRICES:
        error = refused(through, case, Priced(base, "seconds", value, None if everywhere else node))
        assert error.code == "SK323" and "seconds" in error.reason and error.nodes[0] in error.reason
        assert everywhere or error.nodes == (node.name,)
    refused(through, case, "x")
    assert case.texts() == before


@pytest.mark.parametrize("door", OF_BYTES)
def test_bytes_that_are_none_are_refused_by_the_name_of_the_node(case, door):
    for value in (*PRICES, 1.5, 2**63):
        error = refused(FORWARD[door], case, Priced(case.prices, "nbytes", value))
        assert error.code == "SK323" and "nbytes" in error.reason and error.nodes[0] in error.reason


def test_prices_of_other_kinds_of_numbers_are_prices(case):
    """numpy's scalars, whole floats as bytes, fractions: plans are those of the same numbers in plain Python."""

    def planned(second, size):
        given = Priced(case.prices, "seconds", second)
        given.nbytes = lambda node: size
        return Stages(2, links="nvlink4", seconds=1).assign(case.flow, given)

    plain = planned(0.5, 64)
    for second, size in ((np.float32(0.5), np.int64(64)), (Fraction(1, 2), 64.0), (np.float64(0.5), np.float32(64))):
        assert planned(second, size).places == plain.places


UNREACHED = (
    Links(), Links(pairs={(0, 1): Link(1e9)}), Links(pairs={("a", "b"): Link(1e9)}), Links(inside=Link(1e9), size=1),
)  # fmt: skip


@pytest.mark.parametrize("links", UNREACHED)
@pytest.mark.parametrize(
    "make",
    [
        lambda links: Stages(2, links=links),
        lambda links: Stages(2, "1f1b", links=links),
        lambda links: Best(2, links=links),
        lambda links: Devices(["h200", "h200"], links=links),
        lambda links: Devices(["h200", "h200"], links=links, objective="latency"),
    ],
)
def test_links_that_reach_not_all_devices_are_refused_by_the_names_of_two(case, make, links):
    error = refused(make(links).assign, case.flow, case.prices)
    assert error.code == "SK322" and "link from" in error.reason


def test_times_of_links_of_ones_own_are_checked():
    class Slow:
        def __init__(self, value):
            self.value = value

        def seconds(self, source, target, nbytes):
            return self.value

    for value in (*NEVER, None, INF, HUGE):
        error = refused(simulated, None, links=Slow(value))
        assert error.code == "SK322" and "from 0 to 1" in error.reason
    assert simulated(None, links=Slow(np.float32(1.0))) == simulated(None, links=Slow(1.0))


@pytest.mark.parametrize(("objective", "remedy"), [("throughput", "pieces=None"), ("latency", "pieces=2")])
def test_only_that_one_piece_a_device_cannot_keep_names_the_way_out(objective, remedy):
    case = Case.of(Layers())
    only = {"layers.0": [0], "layers.1": [1], "layers.2": [0]}
    policy = Devices(["h200", "h200"], only=only, objective=objective, links="nvlink4", seconds=1)
    error = refused(policy.assign, case.flow, case.prices)
    assert isinstance(error, NoPlanError) and "only" in error.reason and remedy in error.remedy
    assert "linear_1" in error.nodes
    free = Devices(
        ["h200", "h200"], only=only, objective=objective, links="nvlink4", seconds=1,
        pieces=None if objective == "throughput" else 2,
    )  # fmt: skip
    assert free.assign(case.flow, case.prices)
