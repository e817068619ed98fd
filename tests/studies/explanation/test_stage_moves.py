"""Moves, forced places and useless stages, against brute force on small graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from explainedgraphs import Costs, runs, stage_plans, towers

import splitkit as sk
from splitkit.policies import Devices, MemoryBudget, Stages
from splitkit.search.plan_figures import StagePricing
from splitkit.search.scoring import Scoring
from splitkit.studies.explanation.explain import explain
from splitkit.studies.explanation.longest_op import longest_op
from splitkit.studies.explanation.node_explanation import explain_node
from splitkit.studies.explanation.plan_variants import _others
from splitkit.studies.explanation.recorded_policy import recorded_policy
from splitkit.studies.explanation.stage_explanation import moves_of


class Case:
    """A plan with its pricing and moves."""

    def __init__(self, gm, policy, costs):
        self.gm, self.flow, self.costs = gm, sk.analyze(gm), costs
        self.plan = sk.plan(gm, policy, costs)
        self.pricing = StagePricing.of(self.flow, self.plan, costs, recorded_policy(self.plan))
        self.figures = self.pricing.figures(self.plan)
        self.moves = moves_of(self.pricing, self.plan, self.figures)


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
    own, moved = case.plan, 0
    for node in case.flow.nodes:
        for step in (-1, 1):
            move = case.moves.move(node, step)
            if move is None:
                continue
            moved += 1
            by_name = {n.name: n for n in case.flow.nodes}
            plan = own.place({by_name[name]: (move.target,) for name in move.nodes})
            assert runs(case.flow, {n: plan.home(n) for n in case.flow.nodes})
            assert node.name in move.nodes and move.target == own.home(node) + step
            scored = Scoring(case.pricing.request).of(plan)  # another implementation, by which policies compete
            assert move.after.value == scored.load and move.after.traffic == scored.traffic
            assert (move.after.step or 0.0) == scored.step and move.excess == scored.missing
            if scored.peak:
                assert max(move.after.peaks) == scored.peak
    assert moved > 5


def test_a_move_takes_along_no_more_than_it_must(case):
    for node in case.flow.nodes:
        for step in (-1, 1):
            move = case.moves.move(node, step)
            for name in () if move is None else move.nodes:
                left = next(n for n in case.flow.nodes if n.name == name)
                if left is node or case.moves.together.get(left):
                    continue
                homes = {n: case.plan.home(n) for n in case.flow.nodes}
                homes |= {n: move.target for n in case.flow.nodes if n.name in move.nodes and n is not left}
                assert not runs(case.flow, homes)


def test_the_best_move_is_the_best_shift_of_a_border(case):
    found, best = case.moves.found, []
    for at, key in enumerate(case.moves.keys):
        own = case.moves.members[key]
        for step in (1, -1):
            if 0 <= at + step < len(case.moves.keys):
                for count in range(1, len(own)):
                    nodes = case.moves.closure(own[-count:] if step > 0 else own[:count], step)
                    if len(nodes) < len(own):
                        best.append(case.moves.priced(nodes, case.moves.keys[at + step]))
    ranked = [case.moves._rank(move) for move in best if move.matters]
    assert case.moves._rank(found[0]) == min(ranked)


def test_allowed_parts_are_those_in_which_the_plan_runs(case):
    homes = {n: case.plan.home(n) for n in case.flow.nodes}
    for node in case.flow.nodes:
        told = explain_node(case.pricing, case.moves, node)
        legal = [part for part in case.moves.keys if runs(case.flow, homes | {node: part})]
        if case.moves.together.get(node):
            assert list(told.allowed) == [homes[node]]
        else:
            assert list(told.allowed) == legal
            assert any("order forces it" in why for why in told.reasons) == (len(legal) == 1)


def test_written_memory_keeps_nodes_together():
    gm = towers(write=True)
    plan = sk.plan(gm, Stages(3), Costs(gm))
    told = explain(plan, "add_", costs=Costs(gm))
    assert any("must be in one stage with mul" in why and "writes in place" in why for why in told.reasons)


def test_no_plan_as_fast_has_a_node_elsewhere():
    gm = towers()
    costs = Costs(gm)
    found = Case(gm, Stages(3), costs)
    told = {node: explain_node(found.pricing, found.moves, node) for node in found.flow.nodes}
    where = {node: set() for node in found.flow.nodes}
    seconds = {node: costs.seconds(node) for node in found.flow.nodes}
    for at in stage_plans(found.flow, 3):
        loads = [0.0] * 3
        for node, stage in at.items():
            loads[stage] += seconds[node]
        if max(loads) <= found.figures.value:
            for node, stage in at.items():
                where[node].add(stage)
    assert any(len(stages) == 1 for stages in where.values())
    for node, stages in where.items():
        low, high = told[node].fast
        assert low <= min(stages) and max(stages) <= high


@pytest.mark.parametrize("head", [2.0, 6.0, 30.0])
def test_more_stages_are_useless_from_where_it_says(head):
    gm = towers()
    costs = Costs(gm, head)
    case = Case(gm, Stages(2, tolerance=0), costs)
    op = longest_op(case.pricing, case.figures)
    longest = max(case.flow.nodes, key=costs.seconds)
    assert op.node == longest.name and op.seconds == costs.seconds(longest)
    values = {n: sk.plan(gm, Stages(n, tolerance=0), costs).claim for n in range(1, len(case.flow.nodes) + 1)}
    for n, claim in values.items():
        assert claim.value >= op.seconds
        if n < op.least:
            assert claim.bound > op.seconds
        if n >= op.enough:
            assert claim.value == op.seconds


def test_over_links_no_number_is_called_enough():
    gm = towers()
    case = Case(gm, Stages(2, links="ethernet100"), Costs(gm))
    assert longest_op(case.pricing, case.figures).enough is None


def test_variants_are_what_planning_again_gives():
    gm = towers()
    costs = Costs(gm)
    policy = Stages(3, memory="2KiB")
    told = explain(sk.plan(gm, policy, costs), costs=costs)
    found = {variant.change: variant for variant in told.variants}
    for change, other in (
        ("one more device", Stages(4, memory="2KiB")),
        ("one device fewer", Stages(2, memory="2KiB")),
        ("10 % more memory", Stages(3, memory=int(2048 * 1.1))),
    ):
        assert found[change].value == sk.plan(gm, other, costs).claim.value
    fewer = explain(sk.plan(gm, MemoryBudget("2KiB"), costs), costs=costs).variants
    assert [variant.change for variant in fewer] == ["10 % more memory"]


def test_variants_of_ranks_with_two_stages_have_a_rank_more_or_less_and_as_many_microbatches():
    gm = towers()
    policy = Stages(4, schedule="zbv")
    pricing = StagePricing.of(sk.analyze(gm), sk.Plan.of({}), Costs(gm), policy)
    made = {change: other() for change, other in _others(pricing, policy, 4)}
    assert made == {
        "one more device": Stages(6, schedule="zbv", microbatches=8),
        "one device fewer": Stages(2, schedule="zbv", microbatches=8),
    }


def test_a_move_that_does_not_fit_comes_last(case):
    found = case.moves.found
    assert case.moves._rank(replace(found[0], excess=1)) > max(map(case.moves._rank, found))


def test_a_refused_variant_says_why():
    gm = towers()
    count = len(sk.analyze(gm).nodes)
    told = explain(sk.plan(gm, Stages(count), Costs(gm)), costs=Costs(gm))
    refused = next(variant for variant in told.variants if variant.change == "one more device")
    assert refused.value is None and str(count) in refused.refusal and "no plan: " in str(told)
