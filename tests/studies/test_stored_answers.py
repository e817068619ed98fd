"""What explanations, comparisons, frontiers and sweeps of two small models say, whole, as it is stored."""

from __future__ import annotations

from itertools import pairwise

import pytest
from storedmodels import chain, joint
from storedtexts import as_lines, assert_stored

import splitkit as sk
from splitkit import costs
from splitkit.errors import SplitError
from splitkit.policies import Budget, Devices, MemoryBudget, MinCut, Pipeline, RecomputeAll, SaveAll, Stages

SLOW = costs.Links.uniform(1e9, 1e-6)
PLANS = {
    "stages": Stages(3),
    "stages slow": Stages(2, links=SLOW, schedule="1f1b", microbatches=4),
    "stages memory": Stages(3, memory="60KiB", schedule="1f1b", microbatches=4, optimizer="sgd"),
    "stages replicas": Stages(4, replicas=(1, 2), links="nvlink4"),
    "devices": Devices(["h100", "l4"], links=SLOW, memory="24KiB"),
    "budget": MemoryBudget("44KiB"),
    "no policy": lambda node: int(node.name in ("layer_norm_1", "linear_3", "relu_1", "linear_4", "add_1", "linear_5")),
}


def told(ask):
    """Text and data of an answer, or the text of the refusal."""
    try:
        answer = ask()
    except SplitError as error:
        return f"{error}\n"
    return f"{answer}\n{as_lines(answer.to_dict())}"


@pytest.mark.parametrize("name", PLANS)
def test_why_a_plan_is_as_it_is(name):
    gm, flow, prices = chain()
    plan = sk.plan(gm, PLANS[name], prices)
    again = name == "stages"
    texts = [told(lambda: plan.explain(costs=prices, again=again))]
    texts += [told(lambda node=node: plan.explain(node, costs=prices)) for node in flow.nodes[::4]]
    assert_stored(f"studies/explained {name}.txt", "\n".join(texts))


CHOICES = {
    "save all": SaveAll(),
    "recompute all": RecomputeAll(),
    "half": Budget(0.5, "saved"),
    "peak": Budget(0.8, "peak"),
    "cut": MinCut(),
    "pipeline": Pipeline(2, "1f1b", microbatches=4, memory="40KiB"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_why_a_training_step_is_as_it_is(name):
    _, flow, prices = joint(32)
    plan = CHOICES[name].assign(flow, prices)
    texts = [told(lambda: plan.explain(costs=prices, policy=CHOICES[name], again=name == "half"))]
    texts += [told(lambda node=node: plan.explain(node, costs=prices)) for node in flow.nodes[::6]]
    assert_stored(f"studies/recompute {name}.txt", "\n".join(texts))


def test_what_two_plans_put_elsewhere():
    gm, _, prices = chain()
    plans = {name: sk.plan(gm, policy, prices) for name, policy in PLANS.items() if name != "stages replicas"}
    texts = [f"{a} and {b}: {told(lambda a=a, b=b: sk.compare_plans(plans[a], plans[b]))}" for a, b in pairs(plans)]
    _, flow, prices = joint(32)
    steps = {name: CHOICES[name].assign(flow, prices) for name in ("save all", "half", "peak")}
    texts += [f"{a} and {b}: {told(lambda a=a, b=b: sk.compare_plans(steps[a], steps[b]))}" for a, b in pairs(steps)]
    assert_stored("studies/compared.txt", "\n".join(texts))


def pairs(plans):
    return list(pairwise(plans))


@pytest.mark.parametrize(
    "options", [{}, {"of": "peak"}, {"of": "peak", "offload": 1e12}], ids=["saved", "peak", "offload"]
)
def test_points_of_a_frontier(options):
    found, _, prices = joint(32)
    frontier = sk.Frontier(found, prices, **options)
    texts = [str(frontier), as_lines(frontier.to_dict(True))]
    for bytes_of in (frontier.points[0], frontier.points[-1]):
        limit = bytes_of.saved if not options else bytes_of.peak
        texts += [
            as_lines(frontier.within(limit).to_dict(True)),
            told_refusal(lambda limit=limit: frontier.within(limit // 2)),
        ]
    texts += [told_refusal(lambda: frontier.less(0.1)), told_refusal(lambda: frontier.within("much"))]
    assert_stored(f"studies/frontier {''.join(map(str, options.values()))}.txt", "\n".join(texts) + "\n")


def told_refusal(ask):
    try:
        return as_lines(ask().to_dict(True))
    except SplitError as error:
        return str(error)


@pytest.mark.campaign
def test_rows_of_a_sweep():
    gm, _, prices = chain()
    rows = sk.sweep(
        gm, prices, stages=(2, 4), microbatches=(2, 4), schedules=("1f1b", "zbv"), memory="60KiB",
        links=SLOW,
    )  # fmt: skip
    texts = [str(rows), *map(as_lines, rows.to_dict()["rows"])]
    assert_stored("studies/sweep.txt", "\n".join(texts) + "\n")


def test_rows_of_a_sweep_of_a_training_step():
    found, _, prices = joint(32)
    rows = sk.sweep(found, prices, stages=(2,), microbatches=(2, 4), schedules=("1f1b",), memory="40KiB")
    assert_stored("studies/sweep joint.txt", "\n".join([str(rows), *map(as_lines, rows.to_dict()["rows"])]))
