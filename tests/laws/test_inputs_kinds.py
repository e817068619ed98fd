"""Public functions take a graph, a split or its facts alike, and refuse other objects with a code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import PolicyError
from splitkit.plans.rewrite import condense


def test_a_graph_a_split_and_its_facts_are_taken_alike():
    gm = sk.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4))
    split = sk.split(gm, sk.policies.Stages(2))
    costs, flow = sk.costs.flops(gm), sk.analyze(gm)
    for given, plan in ((gm, split.plan), (split, split), (flow, split)):
        assert sk.stage_costs(given, plan, costs) == sk.stage_costs(flow, split.plan, costs)
        assert sk.extend.refine(given, plan).places == sk.extend.refine(flow, split.plan).places
        assert sk.extend.prune(given, plan).places == sk.extend.prune(flow, split.plan).places
        assert sk.extend.merge(given, plan, 0, 1).parts.keys() == {0}
        assert str(sk.report(given, plan)) == str(sk.report(gm, split.plan)) == str(sk.report(split))


@pytest.mark.parametrize("wrong", ["module", "graph", "tensor", "none", "text", "class", "exported", "joint"])
def test_other_objects_than_the_wanted_ones_are_refused_with_a_code(wrong):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4)
    gm = sk.capture(model, x)
    flow, costs, stages = sk.analyze(gm), sk.costs.flops(gm), sk.policies.Stages(2)
    plan = sk.plan(gm, stages)
    given = {
        "module": model,
        "graph": gm.graph,
        "tensor": x,
        "none": None,
        "text": "gpt2",
        "class": sk.policies.Stages,
        "exported": torch.export.export(model, (x,)),
        "joint": sk.capture_joint(model, x, loss=torch.sum),
    }[wrong]
    calls = {
        "SK101": [
            lambda: sk.inline(given),
            lambda: sk.simulate_memory(given),
            *(() if wrong == "joint" else (lambda: sk.sweep(given, costs),)),
            lambda: sk.costs.default(given),
            *(() if wrong == "joint" else (lambda: sk.stage_costs(given, plan, costs), lambda: sk.report(given, plan))),
            *(() if wrong == "joint" else (lambda: sk.extend.refine(given, plan), lambda: condense(given, plan))),
            *(() if wrong in ("module", "class", "exported") else (lambda: sk.measure_memory(given, x),)),
        ],
        "SK205": [lambda: sk.Plan.of(given)],
        "SK301": [
            lambda: sk.split(gm, given),
            *(() if wrong == "text" else (lambda: sk.backend(given), lambda: sk.apply(model, given, x))),
            lambda: sk.extend.relay(flow, given),
            *(() if wrong == "none" else (lambda: sk.report(gm, given),)),
            *(() if wrong == "none" else (lambda: sk.stage_costs(flow, given, costs),)),
        ],
        "SK302": [lambda: sk.backend(given), lambda: sk.apply(model, given, x)] if wrong == "text" else [],  # a budget
        "SK323": []
        if wrong == "none"  # then the prices of the plan count
        else [lambda: sk.stage_costs(flow, plan, given), lambda: sk.split(gm, stages, costs=given)],
        "SK330": [lambda: sk.simulate_schedule(given, "1f1b", 2)],
        "SK401": [] if wrong == "module" else [lambda: sk.apply(given, sk.policies.SaveAll(), x)],
    }
    for code, wanted in calls.items():
        for call in wanted:
            with pytest.raises(sk.SplitError) as caught:
                call()
            assert caught.value.code == code, caught.value


def test_the_refusal_of_a_split_as_a_policy_names_its_plan():
    gm = sk.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    split = sk.split(gm, sk.policies.Stages(2))
    with pytest.raises(PolicyError, match="SK301.*its plan is one"):
        sk.split(gm, split)
    with pytest.raises(sk.SplitError, match=r"SK323[\s\S]*roofline"):
        sk.backend(sk.policies.SaveAll(), costs=sk.costs.flops(gm))
