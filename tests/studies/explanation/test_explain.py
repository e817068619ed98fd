"""What explanations say, of which plans, and what they refuse."""

from __future__ import annotations

import json

import pytest
import torch
from explainedgraphs import Costs, towers
from torch import nn

import splitkit as sk
from splitkit.plans.plan_file import policy_text
from splitkit.policies import Best, Budget, ByName, Devices, Expert, MinCut, Remat, RoundRobin, SplitBackward
from splitkit.policies import Stages as StagesPolicy
from splitkit.search.plan_figures import StagePricing
from splitkit.studies.explanation.explain import recorded_policy
from splitkit.units import duration


@pytest.fixture(scope="module")
def gm():
    return towers()


@pytest.fixture(scope="module")
def plan(gm):
    return sk.plan(gm, StagesPolicy(3, schedule="1f1b", microbatches=4, memory="64KiB"), Costs(gm))


def test_a_plan_says_what_limits_it(plan):
    told = plan.explain()
    text = str(told)
    for words in ("is the slowest", "The longest op", "no plan", "is the fullest", "one more device", "A step takes"):
        assert words.lower() in text.lower(), words
    assert json.loads(json.dumps(told.to_dict()))["policy"].startswith("Stages(3, schedule='1f1b'")
    assert "one more device" not in str(plan.explain(again=False))


def test_a_split_explains_its_plan(gm, plan):
    assert sk.split(gm, plan).explain("linear").to_dict() == plan.explain("linear").to_dict()


@pytest.mark.parametrize("where, words", [("x", "an input of the graph"), ("head_weight", "each part that reads it")])
def test_what_is_not_placed_says_where_it_is(plan, where, words):
    assert words in str(plan.explain(where))


@pytest.mark.parametrize("where", ["nowhere", 7, "linear_9", [1], 1, "1", torch.fx.Graph().placeholder("x")])
def test_an_unknown_place_is_refused(plan, where):
    with pytest.raises(sk.errors.PlanError, match="SK314"):
        plan.explain(where)


def test_bad_arguments_are_refused(plan):
    with pytest.raises(sk.errors.PlanError, match="SK314"):
        sk.Plan.of({}).explain()
    with pytest.raises(sk.errors.PolicyError, match="SK301"):
        plan.explain(policy="Stages(3)")
    with pytest.raises(sk.errors.CostError):
        plan.explain(costs=3)


def test_plans_of_other_origin_say_how_they_differ_from_stages(gm):
    by_hand = sk.plan(gm, RoundRobin(2), on_cycle="refine")
    told = by_hand.explain().to_dict()
    found = {figure["name"]: figure for figure in told["changes"][0]["figures"]}
    stages = sk.plan(gm, StagesPolicy(2)).claim.value
    assert told["changes"][0]["change"] == "Stages(2)" and found["slowest stage"]["second"] == stages
    assert told["least"] <= stages <= told["figures"]["bottleneck"] or stages == pytest.approx(
        told["figures"]["bottleneck"]
    )
    nodes = sk.analyze(gm).nodes
    half = sk.plan(gm, {node.name: 0 for node in nodes[: len(nodes) // 2]})
    assert "the parent runs some nodes itself" in str(half.explain())
    assert "gives it no part" in str(half.explain(nodes[-1]))


def test_devices_that_differ_are_told_in_seconds(gm):
    plan = sk.plan(gm, Devices(["h200", "a100"], objective="latency", links="nvlink4"))
    told = plan.explain()
    data = told.to_dict()
    assert data["unit"] == "s" and "Moves are not priced" in str(plan.explain("linear"))
    fewer = next(change for change in data["changes"] if change["change"] == "one device fewer")
    alone = sk.plan(gm, Devices(["h200"], objective="latency"), sk.costs.roofline(gm, "h200"))
    sample = fewer["figures"][0]
    assert (sample["name"], sample["unit"]) == ("makespan", "s")
    assert sample["first"] == plan.claim.value and sample["second"] == pytest.approx(alone.claim.value)
    assert "a sample takes" in str(told)


def test_devices_that_are_alike_after_a_change_have_the_prices_of_their_kind(gm):
    plan = sk.plan(gm, Devices(["a100", "h200"], objective="throughput", links="nvlink4"))
    fewer = next(one for one in plan.explain().to_dict()["changes"] if one["change"] == "one device fewer")
    alone = sk.plan(gm, Devices(["a100"], objective="throughput"), sk.costs.roofline(gm, "a100"))
    assert fewer["figures"][0]["name"] == "slowest stage"
    assert fewer["figures"][0]["second"] == pytest.approx(alone.claim.value, rel=1e-9)


def test_a_graph_without_sizes_is_explained_without_memory():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    told = sk.plan(traced, StagesPolicy(2)).explain()
    assert not told.to_dict()["memory"] and "Memory is not known: the graph has no sizes" in str(told)


def test_replicas_and_tokens_are_explained_without_moves(gm):
    several = sk.plan(gm, StagesPolicy(2, replicas=(1, 2)))
    assert "Moves are not priced" in str(several.explain("linear")) and "planned again" in str(several.explain())


def test_the_transfers_of_the_slowest_stage_are_told(gm):
    plan, costs = sk.plan(gm, StagesPolicy(3, links="ethernet100"), Costs(gm)), Costs(gm)
    told = plan.explain(again=False)
    figures = StagePricing.of(sk.analyze(gm), plan, costs).figures(plan)
    sent = figures.value - figures.work[figures.limiting]
    assert sent > 0 and f"of which {duration(sent)} are transfers" in str(told)


def test_a_plan_for_tokens_holds_the_cache_of_its_nodes(gm):
    cache = {"linear": 100, "linear_1": 28, "linear_2": 64}
    plan = sk.plan(gm, StagesPolicy(2, objective="tokens", memory="64KiB", cache=cache))
    parts = {node.name: plan.home(node) for node in sk.analyze(gm).nodes}
    held = [sum(n for name, n in cache.items() if parts[name] == part) * int(plan.claim.value) for part in (0, 1)]
    assert [one["cache"] for one in plan.explain(again=False).to_dict()["memory"]] == held


def test_names_of_the_model_are_escaped():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<b>&", nn.Sequential(nn.Linear(2, 2), nn.Tanh()))

        def forward(self, x):
            return getattr(self, "<b>&")(x)

    odd = sk.capture(Odd(), torch.ones(1, 2))
    made = sk.plan(odd, StagesPolicy(2))
    for told in (made.explain(), made.explain("linear"), sk.compare_plans(made, sk.plan(odd, StagesPolicy(1)))):
        bundle = told._repr_mimebundle_()
        assert "<b>&" in bundle["text/plain"] and "&lt;b&gt;&amp;" in bundle["text/html"]
        assert "<b>" not in bundle["text/html"]


POLICIES = [
    StagesPolicy(4),
    StagesPolicy(2, "1f1b", 8, memory=["1GiB", "2GiB"], links="nvlink4"),
    StagesPolicy(3, memory="1GiB"),
    Best([StagesPolicy(3), Expert(3)]),
    Budget("2GiB"),
    Budget(card="24GiB", optimizer="adamw"),
    ByName({"layers.*": 1}),
    Devices({"cuda:0": "h200"}, links="pcie5"),
    Expert([2, 1]),
    MinCut(price=3.0),
    Remat(["aten.mm"], modules="layers.*"),
    RoundRobin(3),
    SplitBackward(policy=MinCut()),
]


@pytest.mark.parametrize("policy", POLICIES, ids=policy_text)
def test_a_policy_is_made_again_from_its_text(policy):
    made = recorded_policy(sk.Plan({}, policy=policy_text(policy)))
    assert type(made) is type(policy) and policy_text(made) == policy_text(policy)


@pytest.mark.parametrize(
    "text", ["", "Stages(", "Stages(0)", "print('x')", "__import__('os').system('x')", "Stages(n=open('x'))", "Plan()"]
)
def test_no_code_runs_for_a_text(text):
    assert recorded_policy(sk.Plan({}, policy=text)) is None


def test_a_plan_file_keeps_the_policy(gm, plan, tmp_path):
    plan.save(str(tmp_path / "plan.json"))
    loaded = sk.Plan.load(str(tmp_path / "plan.json"), gm.graph)
    assert loaded.policy == plan.policy and loaded == plan
    assert "policy" not in sk.plan(gm, lambda node: 0).to_dict()
    for bad in (3, "a\nb", "x" * 3000):
        with pytest.raises(sk.errors.FileError, match="SK501"):
            sk.Plan.from_dict(gm.graph, plan.to_dict() | {"policy": bad})


def test_an_explanation_is_the_same_twice(plan):
    assert str(plan.explain("linear")) == str(plan.explain("linear"))
