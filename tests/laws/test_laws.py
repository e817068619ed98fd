"""Every policy on every model of the zoo keeps every law; of training steps see ``test_joint_laws.py``."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import pytest
from campaigns import some_of_all
from lawtables import (
    JOINT_LAWS,
    LAWS,
    LIKE_ANOTHER,
    PLACERS,
    STAGED_LAWS,
    asked,
    policies_in,
    policies_there_are,
    sized,
    written,
)
from splitlaws import assert_emitted_as_planned, assert_inlines
from zoographs import specimens

from splitkit.costs import unit
from splitkit.engine.split import split
from splitkit.errors import PlanError
from splitkit.graph.dataflow import analyze, module_path
from splitkit.plans.parts import PARENT
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import condense, relay
from splitkit.policies import ByName
from splitkit.testing import assert_legal, assert_same

ZOO = specimens()
_PLANS = {}


def graph_for(specimen, policy):
    return sized(specimen.name) if policy in PLACERS else specimen.graph


@cache
def facts(graph):
    """What is asked of a graph once, for all policies; `test_the_same_plan_again` asks each anew."""
    return analyze(graph)


def planned(specimen, policy):
    """The plan of a policy, which is asked once for each graph; None where it says that there is none."""
    if (specimen.name, policy) not in _PLANS:
        flow = facts(graph_for(specimen, policy))
        _PLANS[specimen.name, policy] = asked(LAWS[policy], flow, unit(flow))
    return _PLANS[specimen.name, policy]


def test_the_tables_name_every_policy():
    assert policies_in(LAWS) | policies_in(JOINT_LAWS) | policies_in(STAGED_LAWS) == policies_there_are()
    assert not policies_in(LAWS) & policies_in(JOINT_LAWS | STAGED_LAWS)


PAIRS = list(some_of_all(ZOO, LAWS, [policy for policy in LAWS if policy not in {*LIKE_ANOTHER, *PLACERS}], turns=3))
"""Each graph with three of the policies that search long or are like another, in turn; the others are a campaign."""


@pytest.mark.parametrize("policy", LAWS)
def test_every_policy_applies_to_a_few_models(policy):
    tried = [pair.values[0] for pair in PAIRS if pair.values[1] == policy and not pair.marks]
    applied = [name for name in tried if planned(ZOO[name], policy)]
    assert len(applied) >= (2 if policy in ("ByName(blocks)", "Expert(2)", "Expert(modules)") else len(tried)) >= 2


@pytest.fixture(params=ZOO)
def specimen(request):
    return ZOO[request.param]


def thirds(pairs, first):
    """A third of the pairs, from that one on; the others as a campaign."""
    return [
        pytest.param(*pair.values, marks=pair.marks if number % 3 == first else pytest.mark.campaign)
        for number, pair in enumerate(pairs)
    ]


def of_pairs_and_parameters(pairs, first):
    """Each pair with one of both ways to hold parameters, in turn from the first on; with the other as a campaign."""

    def case(number, pair, way):
        now = way == ("own", "hoist")[(first + sum(divmod(number, len(LAWS)))) % 2]
        return pytest.param(*pair.values, way, marks=pair.marks if now else pytest.mark.campaign)

    cases = [case(number, pair, way) for number, pair in enumerate(pairs) for way in ("own", "hoist")]
    return pytest.mark.parametrize(("specimen", "policy", "parameters"), cases, indirect=["specimen"])


@of_pairs_and_parameters(PAIRS, first=0)
def test_split_runs_like_the_whole(specimen, policy, parameters):
    graph, plan = graph_for(specimen, policy), planned(specimen, policy)
    if plan is None:
        return
    made = split(graph, plan, parameters=parameters)
    assert_legal(made.flow, made.plan)
    assert_emitted_as_planned(made)
    assert_inlines(made)
    for inputs in filter(None, (specimen.inputs, specimen.other_inputs)):
        assert_same(graph, made, *inputs, tolerance=specimen.tolerance)


@of_pairs_and_parameters(thirds(PAIRS, 0), first=1)
def test_relayed_plans_keep_the_laws(specimen, policy, parameters):
    graph = graph_for(specimen, policy)
    flow, plan = analyze(graph), planned(specimen, policy)
    if plan is None:
        return
    if any(PARENT in plan.places.get(n, (PARENT,)) for n in flow.nodes):
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


@pytest.mark.parametrize(
    ("specimen", "policy"),
    some_of_all(ZOO, ["Stages(3)", "Random(seed=1)", "Half", "BySupport"], ["Random(seed=1)"]),
    indirect=["specimen"],
)
def test_lazy_splits_keep_the_laws(specimen, policy):
    made = split(specimen.graph, LAWS[policy], costs=unit(specimen.graph), lazy=True)
    assert_emitted_as_planned(made)
    assert_inlines(made)
    assert_same(specimen.graph, made, *specimen.inputs, tolerance=specimen.tolerance)


@pytest.mark.parametrize(("specimen", "labels"), some_of_all(ZOO, [2, 3, 5], [3]), indirect=["specimen"])
def test_joined_cycles_keep_the_laws(specimen, labels):
    flow = analyze(specimen.graph)
    plan = condense(flow, Plan.of({n: i % labels for i, n in enumerate(flow.nodes)}))
    assert_legal(flow, plan)
    made = split(specimen.graph, plan)
    assert_emitted_as_planned(made)
    assert_same(specimen.graph, made, *specimen.inputs, tolerance=specimen.tolerance)


@pytest.mark.parametrize(("specimen", "policy"), thirds(PAIRS, 1), indirect=["specimen"])
def test_the_same_plan_again_from_a_graph_that_is_left_as_it_was(specimen, policy):
    graph, plan = graph_for(specimen, policy), planned(specimen, policy)
    if specimen.name == "key-value cache":  # once it has run, a view of its buffer takes part in autograd
        plan = asked(LAWS[policy], analyze(graph), unit(graph))
    before = picture(graph)
    again = asked(LAWS[policy], analyze(graph), unit(graph))
    if plan is None:
        assert again is None
    else:
        assert written(plan) == written(again)
        assert Plan.from_dict(graph.graph, json.loads(written(plan))) == plan
        split(graph, again)
    assert picture(graph) == before


def picture(gm):
    nodes = [(n, n.name, n.op, n.target, n.args, n.kwargs, list(n.users), dict(n.meta)) for n in gm.graph.nodes]
    fields = {n: sorted(_fields(n)) for n in gm.graph.nodes}
    attributes = {name: sorted(module.__dict__) for name, module in gm.named_modules()}
    return gm.code, [repr(entry) for entry in nodes], attributes, fields, list(gm.state_dict())


def _fields(node):
    return [name for name in dir(node) if not name.startswith("__")]


def test_by_name_on_module_paths():
    specimen = ZOO["tied language model, exported"]
    policy = ByName({"embedding": "first", "blocks.[01]": "first", "blocks.2": "second"})
    made = split(specimen.graph, policy)
    assert list(made.parts) == ["first", "second"]
    assert {module_path(n).split(".")[0] for n in made.subgraphs["second"].nodes if n.op != "get_attr"} == {"blocks"}
    assert_same(specimen.graph, made, *specimen.inputs)
