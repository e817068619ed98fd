"""Every policy on every model of the zoo keeps every law."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import pytest
from torch.fx import Node

from splitkit.costs import unit
from splitkit.engine.split import split
from splitkit.errors import PlanError
from splitkit.graph.dataflow import analyze, module_path
from splitkit.graph.fakeruns import propagate
from splitkit.graph.sizes import missing
from splitkit.plans.parts import HOST
from splitkit.plans.policy import Policy, as_plan
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import condense, refine, relay
from splitkit.policies import (
    Acyclic,
    AroundOps,
    AtMarkers,
    Best,
    Buckets,
    ByDevice,
    ByName,
    ByParameterBytes,
    BySupport,
    Devices,
    MemoryBudget,
    Random,
    RoundRobin,
    Stages,
)
from splitkit.testing import assert_legal, assert_same, zoo
from splitkit.testing.oracle import assert_emitted_as_planned, assert_inlines

ZOO = {specimen.name: specimen for specimen in zoo()}


class Mapped:
    """A mapping by node name, refined: what a user's own policy does."""

    def assign(self, flow, costs):
        return refine(flow, as_plan({n.name: len(n.name) % 3 for n in flow.nodes}, flow, costs))


class Half:
    """Every other run of three nodes is left in the host."""

    def assign(self, flow, costs):
        return refine(flow, Plan.of({n: i // 3 % 2 for i, n in enumerate(flow.nodes) if i // 3 % 2}))


def by_letter(node: Node) -> str:
    return f"cuda:{len(node.name) % 2}"


def every_third(node: Node) -> bool:
    """A third of the nodes, spread by name."""
    return sum(map(ord, node.name)) % 3 == 0


class Once:
    """A policy that searches long: asked once for each graph."""

    def __init__(self, policy):
        self.policy, self._plans = policy, {}

    def assign(self, flow, costs):
        if flow.graph not in self._plans:
            self._plans[flow.graph] = self.policy.assign(flow, costs)
        return self._plans[flow.graph]


PLACERS: dict[str, Policy] = {
    "Stages(3, links)": Once(Stages(3, links="pcie4")),
    "Stages(2, schedule)": Once(Stages(2, schedule="1f1b", memory="1GiB", links="nvlink4")),
    "Devices": Once(Devices(["h100", "h100", "a100"], links="pcie4", seconds=0.5)),
    "Devices(pieces=None)": Once(Devices(["h100"] * 3, links="pcie4", pieces=None, seconds=0.5)),
    "Devices('latency')": Once(
        Devices({"cuda:0": "h100", "cuda:1": "l4"}, links="pcie4", objective="latency", seconds=0.5)
    ),
    "Acyclic(3, links)": Once(Acyclic(3, links="pcie4")),
    "MemoryBudget(parts=2)": Once(MemoryBudget("1GiB", parts=2)),
    "Best": Once(Best([Stages(3), RoundRobin(2), Acyclic(2)], links="nvlink4")),
}
"""Policies that need to know the sizes of values."""

POLICIES: dict[str, Policy] = {
    **{f"RoundRobin({n})": RoundRobin(n) for n in (1, 2, 3, 5)},
    **{f"Stages({n})": Stages(n) for n in (1, 2, 3, 4)},
    **PLACERS,
    **{f"Random(seed={s})": Random(4, seed=s) for s in range(6)},
    "ByDevice": ByDevice(by_letter),
    "AroundOps": AroundOps(every_third),
    "AtMarkers": AtMarkers(every_third),
    "Buckets": Buckets(200, first=50),
    "ByParameterBytes": ByParameterBytes(1344),
    "BySupport": BySupport(every_third),
    "BySupport(unsupported='parts')": BySupport(every_third, unsupported="parts", min_size=2),
    "Mapped": Mapped(),
    "Half": Half(),
}


@cache
def sized(name):
    """The graph of a specimen with ``meta["val"]`` on its nodes; one of its own, since sizes change what is done."""
    specimen = next(specimen for specimen in zoo() if specimen.name == name)
    if missing(specimen.graph.graph):
        propagate(specimen.graph, *specimen.inputs)
    return specimen.graph


def graph_for(specimen, policy):
    return sized(specimen.name) if policy in PLACERS else specimen.graph


@pytest.fixture(params=ZOO)
def specimen(request):
    return ZOO[request.param]


@pytest.mark.parametrize("parameters", ["own", "hoist"])
@pytest.mark.parametrize("policy", POLICIES)
def test_split_runs_like_the_whole(specimen, policy, parameters):
    graph = graph_for(specimen, policy)
    made = split(graph, POLICIES[policy], costs=unit(graph), parameters=parameters)
    assert_legal(made.flow, made.plan)
    assert_emitted_as_planned(made)
    assert_inlines(made)
    for inputs in filter(None, (specimen.inputs, specimen.other_inputs)):
        assert_same(graph, made, *inputs, tolerance=specimen.tolerance)


@pytest.mark.parametrize("parameters", ["own", "hoist"])
@pytest.mark.parametrize("policy", POLICIES)
def test_relayed_plans_keep_the_laws(specimen, policy, parameters):
    graph = graph_for(specimen, policy)
    flow, costs = analyze(graph), unit(graph)
    plan = POLICIES[policy].assign(flow, costs)
    if any(HOST in plan.places.get(n, (HOST,)) for n in flow.nodes):
        with pytest.raises(PlanError, match="SK209"):
            relay(flow, plan)
        return
    made = split(graph, relay(flow, plan), parameters=parameters)
    chain = list(made.subgraphs.values())
    for before, after in pairwise(chain):
        handed_by_the_host = {n for n in after.inputs if n.op == "get_attr"}
        assert set(before.outputs) == set(after.inputs) - handed_by_the_host
    assert_emitted_as_planned(made)
    assert_inlines(made)
    for inputs in filter(None, (specimen.inputs, specimen.other_inputs)):
        assert_same(graph, made, *inputs, tolerance=specimen.tolerance)


@pytest.mark.parametrize("policy", ["Stages(3)", "Random(seed=1)", "Half", "BySupport"])
def test_lazy_splits_keep_the_laws(specimen, policy):
    made = split(specimen.graph, POLICIES[policy], costs=unit(specimen.graph), lazy=True)
    assert_emitted_as_planned(made)
    assert_inlines(made)
    assert_same(specimen.graph, made, *specimen.inputs, tolerance=specimen.tolerance)


@pytest.mark.parametrize("labels", [2, 3, 5])
def test_joined_cycles_keep_the_laws(specimen, labels):
    flow = analyze(specimen.graph)
    plan = condense(flow, Plan.of({n: i % labels for i, n in enumerate(flow.nodes)}))
    assert_legal(flow, plan)
    made = split(specimen.graph, plan)
    assert_emitted_as_planned(made)
    assert_same(specimen.graph, made, *specimen.inputs, tolerance=specimen.tolerance)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_input_graph_is_left_as_it_was(specimen, policy):
    graph = graph_for(specimen, policy)
    before = _picture(graph)
    split(graph, POLICIES[policy], costs=unit(graph))
    assert _picture(graph) == before


def _picture(gm):
    nodes = [(n, n.name, n.op, n.target, n.args, n.kwargs, list(n.users), dict(n.meta)) for n in gm.graph.nodes]
    fields = {n: sorted(_fields(n)) for n in gm.graph.nodes}
    attributes = {name: sorted(module.__dict__) for name, module in gm.named_modules()}
    return gm.code, [repr(entry) for entry in nodes], attributes, fields, list(gm.state_dict())


def _fields(node):
    return [name for name in dir(node) if not name.startswith("__")]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_graph_and_policy_give_the_same_plan(specimen, policy):
    graph = graph_for(specimen, policy)
    flow, again = analyze(graph), analyze(graph)
    costs = unit(graph)
    made = PLACERS[policy].policy if policy in PLACERS else POLICIES[policy]
    first, second = made.assign(flow, costs), made.assign(again, costs)
    assert json.dumps(first.to_dict()) == json.dumps(second.to_dict())
    assert Plan.from_dict(graph.graph, first.to_dict()) == first


def test_by_name_on_module_paths():
    specimen = ZOO["tied language model, exported"]
    policy = ByName({"embedding": "first", "blocks.[01]": "first", "blocks.2": "second"})
    made = split(specimen.graph, policy)
    assert list(made.parts) == ["first", "second"]
    assert {module_path(n).split(".")[0] for n in made.subgraphs["second"].nodes if n.op != "get_attr"} == {"blocks"}
    assert_same(specimen.graph, made, *specimen.inputs)
