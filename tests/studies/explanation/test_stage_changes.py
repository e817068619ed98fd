"""Moved nodes and requests that are planned again, against plans made from scratch and brute force on small graphs."""

from __future__ import annotations

import pytest
from explainedgraphs import Costs, runs, stage_plans, towers

import splitkit as sk
from splitkit.policies import Devices, MemoryBudget, Stages
from splitkit.search.plan_figures import Scoring, StagePricing
from splitkit.studies.explanation.explain import explain, recorded_policy
from splitkit.studies.explanation.stage_explanation import StageMoves, _others
from splitkit.units import size


class Case:
    """A plan with its pricing and moves."""

    def __init__(self, gm, policy, costs):
        self.gm, self.flow, self.costs = gm, sk.analyze(gm), costs
        self.plan = sk.plan(gm, policy, costs)
        self.pricing = StagePricing.of(self.flow, self.plan, costs, recorded_policy(self.plan))
        self.figures = self.pricing.figures(self.plan)
        self.moves = StageMoves(self.pricing, self.plan)


POLICIES = {
    "plain": Stages(3),
    "links": Stages(3, links="ethernet100"),
    "step": Stages(3, schedule="1f1b", microbatches=4, links="ethernet100", memory="64KiB"),
    "written": Stages(3),
}


@pytest.fixture(scope="module", params=POLICIES)
def case(request):
    gm = towers(request.param == "written")
    return Case(gm, POLICIES[request.param], Costs(gm))


def steps(case):
    """Yield (node, part, neighbour part, nodes that move, the move)."""
    for node in case.flow.nodes:
        own = case.plan.home(node)
        for step in (-1, 1):
            move = case.moves.move(node, step)
            assert (move is None) == (not 0 <= own + step < 3)
            if move is not None:
                yield node, own, own + step, case.moves.closure(node, step), move


def test_the_figures_are_those_of_the_claim(case):
    claim = case.plan.claim
    assert case.figures.value == claim.value and case.figures.limiting == claim.limiting


@pytest.mark.parametrize("policy", [Devices(["h200", "a100"], links="pcie5"), Stages(4, schedule="zbv"), Stages(2)])
def test_the_figures_of_other_policies_are_those_of_the_claim(policy):
    gm = towers()
    found = Case(gm, policy, sk.costs.roofline(gm, "h200"))
    assert found.figures.value == pytest.approx(found.plan.claim.value, rel=1e-12)
    assert found.figures.limiting == found.plan.claim.limiting


def test_the_price_of_each_move_is_that_of_the_moved_plan_scored_from_scratch(case):
    priced = 0
    for node, own, target, nodes, move in steps(case):
        plan = case.moves.moved(nodes, own, target)
        assert runs(case.flow, {n: plan.home(n) for n in case.flow.nodes})
        assert plan.home(node) == target and move.change.startswith(f"to stage {target}")
        if not move.figures:
            assert "would be empty" in move.refusal and not [n for n in plan.places if plan.home(n) == own]
            continue
        priced += 1
        scoring = Scoring(case.pricing.request)
        scored = scoring.of(plan)
        figures = {figure.name: figure for figure in move.figures}
        assert figures["slowest stage"].second == scored.value and figures["bytes that cross"].second == scored.traffic
        assert figures["slowest stage"].first == case.figures.value
        if "step" in figures:
            assert figures["step"].second == scored.step
        assert ("a device lacks" in move.change) == (scoring.missing(scored) > 0)
        if scored.peaks:
            assert figures["fullest device"].second == max(scored.peaks)
    assert priced > 5


def test_a_move_takes_along_no_more_than_it_must(case):
    for node, _, target, nodes, _ in steps(case):
        for left in nodes:
            if left is not node and not case.moves.together.get(left):
                homes = {n: case.plan.home(n) for n in case.flow.nodes}
                assert not runs(case.flow, homes | {n: target for n in nodes if n is not left})


def test_written_memory_keeps_nodes_together():
    gm = towers(write=True)
    told = explain(sk.plan(gm, Stages(3), Costs(gm)), "add_", costs=Costs(gm)).to_dict()
    assert any("must be in one stage with mul" in why and "writes in place" in why for why in told["reasons"])


def test_copies_of_a_node_move_with_what_reads_them():
    gm = towers()
    nodes = list(sk.analyze(gm).nodes)
    plan = sk.Plan.of({n: [0, 1] if n is nodes[0] else 0 if n in nodes[:2] else 1 for n in nodes})
    case = StageMoves(StagePricing.of(sk.analyze(gm), plan, Costs(gm)), plan)
    first = next(n for n in nodes[2:] if nodes[0] in n.all_input_nodes)
    moved = case.moved(case.closure(first, -1), 1, 0)
    assert moved.places[nodes[0]] == (0,) and moved.home(first) == 0


@pytest.mark.parametrize("head", [2.0, 6.0, 30.0])
def test_no_plan_is_faster_than_the_longest_op_or_the_bound(head):
    gm = towers()
    costs = Costs(gm, head)
    nodes = list(sk.analyze(gm).nodes)
    at = {node: min(2, i * 3 // len(nodes)) for i, node in enumerate(nodes)}
    told = explain(sk.Plan.of(at), costs=costs, again=False).to_dict()
    longest = max(nodes, key=costs.seconds)
    assert told["longest"] == {"node": longest.name, "seconds": costs.seconds(longest)}
    best = min(
        max(sum(costs.seconds(n) for n in found if found[n] == stage) for stage in range(3))
        for found in stage_plans(sk.analyze(gm), 3)
    )
    assert costs.seconds(longest) <= told["least"] <= best


def value_of(change):
    return change["figures"][0]["second"]


def test_changes_are_what_planning_again_gives():
    gm = towers()
    costs = Costs(gm)
    told = explain(sk.plan(gm, Stages(3, memory="2KiB"), costs), costs=costs).to_dict()
    found = {change["change"]: change for change in told["changes"]}
    for change, other in (
        ("one more device", Stages(4, memory="2KiB")),
        ("one device fewer", Stages(2, memory="2KiB")),
        ("10 % more memory", Stages(3, memory=int(2048 * 1.1))),
    ):
        assert value_of(found[change]) == sk.plan(gm, other, costs).claim.value
    fewer = explain(sk.plan(gm, MemoryBudget("2KiB"), costs), costs=costs).to_dict()
    assert [change["change"] for change in fewer["changes"]] == ["10 % more memory"]
    parts = next(one for one in fewer["changes"][0]["figures"] if one["name"] == "parts")
    assert parts["second"] == sk.plan(gm, MemoryBudget(int(2048 * 1.1)), costs).claim.value


def test_changes_for_ranks_with_two_stages_have_a_rank_more_or_less_and_as_many_microbatches():
    gm = towers()
    policy = Stages(4, schedule="zbv")
    plan = sk.plan(gm, policy, Costs(gm))
    pricing = StagePricing.of(sk.analyze(gm), plan, Costs(gm), policy)
    made = {change: other() for change, other in _others(pricing, plan, policy)}
    assert made == {
        "one more device": Stages(6, schedule="zbv", microbatches=8),
        "one device fewer": Stages(2, schedule="zbv", microbatches=8),
    }


def test_the_bytes_that_cross_are_told_as_bytes():
    gm = towers()
    plan = sk.plan(gm, MemoryBudget("2KiB", parts=3), Costs(gm))
    proof = f"the bytes that cross are {size(plan.claim.value)}, and that is proven. The bound comes from all cuts"
    assert proof in str(explain(plan, costs=Costs(gm), again=False)) and plan.claim.value == 64


def test_a_refused_change_says_why():
    gm = towers()
    count = len(sk.analyze(gm).nodes)
    told = explain(sk.plan(gm, Stages(count), Costs(gm)), costs=Costs(gm))
    refused = next(change for change in told.to_dict()["changes"] if change["change"] == "one more device")
    assert not refused["figures"] and str(count) in refused["refusal"] and "no plan: " in str(told)
