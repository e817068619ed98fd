from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from splitkit.costs import unit
from splitkit.display import Shown
from splitkit.errors import PlanError, PolicyError
from splitkit.graph.dataflow import analyze
from splitkit.plans.parts import PARENT, Claim, Part, above_mean, evenness
from splitkit.plans.policy import Policy, as_plan
from splitkit.plans.record import Plan, module_of_plan, plan_of
from splitkit.policies import RoundRobin


def test_a_plan_is_a_mapping_home_first(chain, nodes):
    n = nodes(chain)
    plan = Plan.of({n["add"]: 0, n["mul"]: [1, 0], n["sub"]: ("cuda:0", 2)})
    assert plan[n["mul"]] == (1, 0)
    assert [plan.home(m) for m in plan] == [0, 1, ("cuda:0", 2)]
    assert plan.home(n["x"]) is PARENT
    assert plan.source(n["mul"], reader=0) == 0
    assert plan.source(n["mul"], reader="other") == 1
    assert plan.members(0) == (n["add"], n["mul"])
    assert list(plan.parts) == [0, 1, ("cuda:0", 2)]
    assert len(plan) == 3 and dict(plan) == dict(plan.places)


def test_place_gives_another_plan_and_knows_new_parts(chain, nodes):
    n = nodes(chain)
    plan = Plan.of({n["add"]: 0}, note="mine")
    other = plan.place({n["mul"]: ("new", 0)})
    assert n["mul"] not in plan
    assert other.members("new") == (n["mul"],) and other.parts["new"] == Part("new") and other.note == "mine"


@pytest.mark.parametrize("place", [(0, 0), 0, [0]])
def test_a_place_is_a_tuple_of_different_parts(chain, nodes, place):
    with pytest.raises(PlanError, match="SK205: add is placed in"):
        Plan({nodes(chain)["add"]: place})


def test_a_callback_is_called_once_a_node_in_graph_order(chain):
    calls = []

    def callback(node):
        calls.append(node.name)
        return len(calls) // 2

    flow = analyze(chain)
    plan = as_plan(callback, flow, unit(chain))
    assert calls == ["add", "mul", "sub"]
    assert [plan.home(n) for n in flow.nodes] == [0, 1, 1]


def test_mappings_by_name_or_node_leave_the_rest_in_the_parent(chain, nodes):
    flow = analyze(chain)
    by_name = as_plan({"mul": "a"}, flow, unit(chain))
    by_node = as_plan({nodes(chain)["mul"]: "a"}, flow, unit(chain))
    assert by_name == by_node
    assert by_name.home(nodes(chain)["add"]) is PARENT


def test_an_unknown_name_is_refused_with_the_nearest(chain):
    with pytest.raises(PlanError, match=r"SK204.*'mull'.*did you mean 'mul'"):
        as_plan({"mull": 0}, analyze(chain), unit(chain))


@pytest.mark.parametrize("thing", [3, "round robin", RoundRobin, None])
def test_what_is_no_policy_is_refused(chain, thing):
    with pytest.raises(PolicyError, match="SK301"):
        as_plan(thing, analyze(chain), unit(chain))


def test_a_policy_is_anything_that_assigns(chain):
    class Mine:
        def assign(self, flow, costs):
            return Plan.of(dict.fromkeys(flow.nodes, "mine"))

    assert isinstance(Mine(), Policy)
    assert list(as_plan(Mine(), analyze(chain), unit(chain)).parts) == ["mine"]


def test_parts_know_their_device():
    assert Part("a", torch.device("cuda:1")).device.index == 1


@pytest.mark.parametrize(
    "key", [{}, {0}, np.zeros(2), (0, [1]), ("a", (1, {})), torch.tensor(0), (torch.tensor(0),), [0, {}]], ids=repr
)
def test_a_callback_with_keys_that_are_none_is_refused(chain, key):
    with pytest.raises(PlanError, match="SK206: add is placed in") as caught:
        as_plan(lambda node: key, analyze(chain), unit(chain))
    assert caught.value.nodes == ("add",)


def test_nan_may_name_a_part(chain):
    nan = float("nan")
    assert list(as_plan(lambda node: nan, analyze(chain), unit(chain)).parts) == [nan]


@pytest.mark.parametrize("made", [{}, None, {"add": 0}])
def test_a_policy_that_returns_no_plan_is_refused(chain, made):
    class Broken:
        def assign(self, flow, costs):
            return made

        def __repr__(self):
            return "Broken()"

    with pytest.raises(PolicyError, match=r"SK301: the policy Broken\(\) returned (\{|None)"):
        as_plan(Broken(), analyze(chain), unit(chain))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"key": None}, "None stands for the parent"),
        ({"key": [1]}, "cannot name a part: a list"),
        ({"key": 0, "call": "chekpoint"}, "call='chekpoint'"),
        ({"key": 0, "call": ["plain"]}, r"call=\['plain'\]"),
        ({"key": 0, "device": "cuda:0"}, "device='cuda:0', which is not a torch.device"),
        ({"key": 0, "device": 0}, "device=0, which is not a torch.device"),
    ],
)
def test_parts_of_an_unknown_call_or_device_are_refused(fields, reason):
    with pytest.raises(PlanError, match=f"SK206.*{reason}"):
        Part(**fields)


def test_a_plan_whose_nodes_moved_makes_no_claim(chain, nodes):
    n = nodes(chain)
    claim = Claim("bottleneck", 2.0, 2.0, "by hand", 0)
    plan = replace(Plan.of({n["add"]: 0, n["mul"]: 1}), claim=claim)
    assert plan.place({n["mul"]: (0,)}).claim is None and plan.claim is claim


def test_a_plan_is_asked_for(chain):
    plan = Plan.of(dict.fromkeys(analyze(chain).nodes, 0))
    assert plan_of(plan) is plan and plan_of(SimpleNamespace(plan=plan)) is plan
    for given, kind in (({}, "a dict"), (Plan, "the class Plan"), (SimpleNamespace(plan=3), "a SimpleNamespace")):
        with pytest.raises(PolicyError, match=f"SK301: expected a plan, not {kind}"):
            plan_of(given)


def test_a_printed_plan_says_how_many_nodes_each_part_has(chain, nodes):
    n = nodes(chain)
    plan = Plan({n["add"]: (0,), n["mul"]: (0, 1)}, {1: Part(1, torch.device("cpu"), replicas=2)}, note="by hand")
    assert str(plan).splitlines() == [
        "Plan of 2 nodes in 2 parts: by hand", "  1: 1 nodes on cpu, 2 replicas", "  0: 2 nodes"
    ]  # fmt: skip


def test_a_claim_says_what_is_proven():
    def said(bound, **more):
        claim = Claim("bottleneck", 2.0, bound, "a search", 3)
        return str(replace(claim, **more))

    assert said(2.0) == said(2.0 - 1e-9) == "Slowest: stage 3. No plan is faster"
    assert said(1.99) == "Slowest: stage 3. No plan is more than 0.5 % faster"
    assert said(1.9898) == "Slowest: stage 3. No plan is more than 0.6 % faster", "rounded up, so that it stays true"
    assert said(0.0) == "Slowest: stage 3. How much better a plan could be is not known"
    assert said(1.0, limiting=("cuda:1", 0), objective="makespan").startswith("Busiest: cuda:1 0. No plan is more than")
    assert said(2.5, objective="tokens") == "Tightest: stage 3. No plan has room for more than 25 % more tokens"
    assert said(2.0, objective="parts") == "Fullest: part 3. No plan has fewer parts"
    assert said(1.0, objective="traffic") == "Fullest: part 3. No plan sends more than 50 % fewer bytes"
    assert said(2.0, objective="recompute and waiting") == "Limit: part 3. No plan has less recompute and waiting"
    told = Claim("bottleneck", 2.0, 2.0, "", 1).told("2 s", above_mean(2.0, 1.98))
    assert told == "Slowest: stage 1, 2 s, 1 % above the mean. No plan is faster"
    assert Claim("parts", 0.0, 0.0, "nothing", 0).gap == 0.0 and not Claim("parts", 2.0, 1.0, "", 0).optimal


def test_evenness_is_jains_index():
    assert evenness([3.0, 3.0, 3.0]) == pytest.approx(1) and evenness([0, 5.0, 0, 0]) == pytest.approx(1 / 4)
    assert evenness([1.0, 3.0]) == pytest.approx(16 / 20) and evenness([]) == evenness([0.0]) == 1.0


def test_any_hashable_that_equals_itself_alone_is_a_key(chain, nodes):
    class Key:
        """Equal to itself alone, as objects are; it cannot be iterated."""

    keys = [Key(), frozenset([1]), ("a", Key())]
    n = nodes(chain)
    assert list(Plan.of(dict(zip((n["add"], n["mul"], n["sub"]), keys, strict=True))).parts) == keys


@pytest.mark.parametrize("replicas", [0, -1, 1.5, True, "2", 10**30])
def test_replicas_are_a_number_of_devices(replicas):
    with pytest.raises(PlanError, match="SK206.*replicas"):
        Part(0, replicas=replicas)


def test_what_runs_a_model_is_no_callback_of_nodes(chain):
    class Runs:
        plan = Plan({})

        def __call__(self, node):
            return 0

    for given in (Runs(), chain):
        with pytest.raises(PolicyError, match="SK301"):
            as_plan(given, analyze(chain), unit(chain))


def test_the_module_of_a_plan_is_the_one_whose_graph_it_places(chain, nodes):
    plan = Plan.of({nodes(chain)["add"]: 0})
    assert module_of_plan(plan) is chain and module_of_plan(Plan.of({})) is None
    chain.graph = torch.fx.Graph()
    assert module_of_plan(plan) is None  # the module has another graph now


class Drawer:
    """Notes what it is asked for."""

    def __getattr__(self, what):
        return lambda shown, **options: f"{what}: {options}"


def test_the_options_of_pictures_reach_the_drawer(chain, nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(Shown, "drawer", staticmethod(Drawer))
    plan, path = Plan.of({nodes(chain)["add"]: 0}), tmp_path / "plan"
    given = {"costs": 1, "optimizer": "sgd", "memory": 2, "run": 3, "measured": 4, "beside": 5, "title": "mine"}
    unsaid = dict.fromkeys(given) | {"optimizer": "planned", "title": ""}
    for options in (given, {}):
        told = str(unsaid | options)
        for write in (plan.to_html, plan.to_svg):
            write(path, **options)
            assert path.read_text() == f"{write.__name__.removeprefix('to_')}: {told}"
        shown = plan.view(height=7, **options)
        assert shown == f"view: {{'height': 7, 'live': False, {told[1:]}"
