"""What two plans put elsewhere, and which is better at what."""

from __future__ import annotations

import json

import pytest
from explainedgraphs import Costs, towers

import splitkit as sk
from splitkit.policies import RecomputeAll, SaveAll, Stages
from splitkit.search.plan_figures import StagePricing
from splitkit.studies.explanation.explain import recorded_policy


@pytest.fixture(scope="module")
def gm():
    return towers()


@pytest.fixture(scope="module")
def three(gm):
    return sk.plan(gm, Stages(3), Costs(gm))


def test_a_plan_equals_itself(three):
    found = sk.compare_plans(three, three)
    assert found.equal and not found.moved and str(found) == "The plans are equal."


def test_names_alone_make_no_difference(gm, three):
    other = sk.Plan.of({node: "cba"[three.home(node)] for node in three})
    found = sk.compare_plans(three, other)
    assert found.equal and found.renamed == {"c": "0", "b": "1", "a": "2"}
    swapped = sk.Plan.of({node: {0: 1, 1: 0, 2: 2}[three.home(node)] for node in three})
    assert sk.compare_plans(three, swapped).equal


def test_memory_is_compared_between_parts_that_correspond(gm, three):
    other = sk.Plan.of({node: "cba"[three.home(node)] for node in three})
    memory = [one for one in sk.compare_plans(three, other).figures if one.name.startswith("memory of")]
    assert [one.name[-1] for one in memory] == ["0", "1", "2"] and all(one.first == one.second for one in memory)


def test_what_moved_is_every_node_with_another_home(gm, three):
    two = sk.plan(gm, Stages(2), Costs(gm))
    found = sk.compare_plans(three, two)
    moved = {name: (m.source, m.target) for m in found.moved for name in m.nodes}
    for node in sk.analyze(gm).nodes:
        homes = str(three.home(node)), str(two.home(node))
        assert moved.get(node.name, (homes[0],) * 2) == homes
    assert json.loads(json.dumps(found.to_dict()))["equal"] is False


def test_unlike_names_are_matched_by_what_they_hold(gm, three):
    nodes = sk.analyze(gm).nodes
    labels = {node: f"part{three.home(node)}" for node in nodes}
    last = [node for node in nodes if three.home(node) == 0][-1]
    found = sk.compare_plans(three, sk.Plan.of(labels | {last: "part1"}))
    assert [(m.source, m.target, m.nodes) for m in found.moved] == [("0", "1", (last.name,))]
    extra = sk.compare_plans(three, sk.Plan.of(labels | {last: "own"}))
    assert [m.target for m in extra.moved] == ["own (new)"]


def test_the_figures_are_those_of_each_plan(gm):
    costs = Costs(gm)
    one = sk.plan(gm, Stages(3, schedule="1f1b", microbatches=4, links="ethernet100"), costs)
    two = sk.plan(gm, Stages(3), costs)
    found = {figure.name: figure for figure in sk.compare_plans(one, two).figures}
    for at, plan in enumerate((one, two)):
        figures = StagePricing.of(sk.analyze(gm), plan, costs, recorded_policy(one)).figures(plan)
        for name, value in (
            ("slowest stage", figures.value),
            ("step", figures.step),
            ("bytes that cross", figures.traffic),
            ("fullest device", max(figures.peaks)),
            ("memory of 1", figures.peaks[1]),
        ):
            assert (found[name].first, found[name].second)[at] == value
    assert found["slowest stage"].better in ("first", "")


def test_a_second_capture_is_the_same_graph(three):
    other = towers()
    assert sk.compare_plans(three, sk.plan(other, Stages(3), Costs(other))).equal


def test_plans_of_other_graphs_are_refused(three):
    other = towers(write=True)
    with pytest.raises(sk.errors.FileError, match="SK502.*first differ"):
        sk.compare_plans(three, sk.plan(other, Stages(2)))
    with pytest.raises(sk.errors.PolicyError, match="SK301"):
        sk.compare_plans(three, 3)
    with pytest.raises(sk.errors.PlanError, match="SK314"):
        sk.compare_plans(three, sk.Plan.of({}))


def test_plans_of_training_steps_have_peak_and_recompute():
    import torch
    from torch import nn

    joint = sk.capture_joint(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.ones(2, 4), loss=torch.sum
    )
    one, two = (joint.split(policy) for policy in (SaveAll(), RecomputeAll()))
    found = {figure.name: figure for figure in sk.compare_plans(one.plan, two.plan).figures}
    for name, at in (("first", one), ("second", two)):
        profile = sk.simulate_memory(at.forward, at.backward, user_outputs=at.outputs)
        assert getattr(found["peak"], name) == profile.peak
        assert getattr(found["saved for backward"], name) == profile.saved
    assert found["saved for backward"].better == "second" and found["recompute"].better == "first"
