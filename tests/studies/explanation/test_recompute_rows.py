"""Why values are saved or recomputed: each price, and each choice that is forced, against plans made from scratch."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.engine.pair import divide
from splitkit.policies import Budget, MinCut, Pipeline, RecomputeAll, Remat, SaveAll
from splitkit.studies.explanation.recompute_explanation import AGAIN, SAVED, choices_of, explain_recompute
from splitkit.training.flow import BACKWARD, FORWARD
from splitkit.units import size


class Net(nn.Module):
    """Equal layers with a random op and a chain of pointwise ops; it returns an activation as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(layer(x).sin().exp().tanh())
        return {"loss": x.square().sum(), "last": x}


@pytest.fixture(scope="module")
def joint():
    torch.manual_seed(0)
    return sk.capture_joint(Net(), torch.ones(4, 8))


POLICIES = {
    "save": SaveAll(),
    "all": RecomputeAll(),
    "cut": MinCut(price=1e9),
    "some": Remat(keep=["aten.sin", "aten.native_dropout"]),
    "peak": Budget(0.5),
}


@pytest.fixture(scope="module", params=POLICIES)
def choices(request, joint):
    costs = sk.costs.roofline(joint.graph_module, "a100")
    plan = joint.split(POLICIES[request.param], costs).plan
    return choices_of(joint.flow, plan, costs)[0]


def measured(flow, plan, costs):
    """Peak and saved bytes by the simulator of modules, and the recompute time."""
    pair = divide(flow, plan, costs)
    profile = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    twice = [n for n in flow.nodes if {FORWARD, BACKWARD} <= set(pair.plan.places[n])]
    return profile.peak, profile.saved, twice


def test_the_plan_is_the_one_that_was_given(choices, joint):
    costs = sk.costs.roofline(joint.graph_module, "a100")
    peak, saved, _ = measured(joint.flow, choices.plan, costs)
    assert (choices.seen.peak, choices.seen.saved) == (peak, saved)


def test_each_price_is_that_of_the_plan_made_from_scratch(choices, joint):
    costs, priced = sk.costs.roofline(joint.graph_module, "a100"), 0
    paid = dict(zip(choices.problem.ops, choices.problem.price.tolist(), strict=True))
    before = measured(joint.flow, choices.plan, costs)
    for nodes in choices.groups:
        row, node = choices.row(nodes), nodes[len(nodes) // 2]
        if row.seconds is None:
            continue
        priced += 1
        peak, saved, twice = measured(joint.flow, choices.other(node).choice.plan(), costs)
        change = sum(paid.get(n, 0.0) for n in twice) - sum(paid.get(n, 0.0) for n in before[2])
        assert row.peak_change == peak - before[0] and row.saved_change == saved - before[1]
        assert row.seconds == pytest.approx(change if row.decision == SAVED else -change, abs=1e-15)
    assert priced or all(choices.forced(nodes[0]) for nodes in choices.groups)


def test_what_is_forced_has_no_other_choice(choices, joint):
    costs, forced = sk.costs.roofline(joint.graph_module, "a100"), 0
    for node in choices.saved:
        producer, why = joint.flow.producer(node), choices.forced(node)
        if node.op == "placeholder" or not choices.nbytes(node):
            continue
        # recompute it and all that is not saved before it, as far as the graph goes
        plan, stack = choices.plan, [producer]
        while stack:
            op = stack.pop()
            if BACKWARD not in plan.places[op]:
                plan = plan.place({op: (*plan.places[op], BACKWARD)})
                reads = (r for r in op.all_input_nodes if r not in choices.saved or joint.flow.producer(r) is producer)
                stack += [joint.flow.producer(r) for r in reads if joint.flow.is_placeable(joint.flow.producer(r))]
        if why:
            forced += 1
            assert "random" in why
            with pytest.raises(sk.errors.PlanError, match="SK202"):
                divide(joint.flow, plan, costs)
        else:
            divide(joint.flow, plan, costs)
    assert forced


def test_equal_layers_are_one_row(joint):
    costs = sk.costs.roofline(joint.graph_module, "a100")
    plan = joint.split(SaveAll(), costs).plan
    rows = choices_of(joint.flow, plan, costs)[0].rows
    assert sum(len(row.nodes) for row in rows) > len(rows)
    saved = explain_recompute(joint.flow, plan, SaveAll(), costs, again=False).to_dict()["saved"]
    assert sum(row.nbytes * len(row.nodes) for row in rows) == saved


def test_rates_and_prices_agree_with_the_cut(joint):
    """Of an exact minimum cut, no recompute is dearer than the price, and none that it leaves out is cheaper."""
    costs = sk.costs.roofline(joint.graph_module, "a100")
    for price in (1e8, 1e9, 1e10, 1e12):
        plan = joint.split(MinCut(price=price), costs).plan
        rows = [row for row in choices_of(joint.flow, plan, costs)[0].rows if row.rate is not None]
        assert all(row.rate <= 1 / price * (1 + 1e-9) for row in rows if row.decision == AGAIN)
        assert all(row.rate >= 1 / price * (1 - 1e-9) for row in rows if row.decision == SAVED)
        saved = any(row.decision == SAVED for row in rows)
        assert not saved or "more expensive than the price" in " ".join(str(plan.explain(again=False)).split())


def test_the_peak_is_filled_by_what_the_simulator_sees(joint):
    costs = sk.costs.roofline(joint.graph_module, "a100")
    plan = joint.split(SaveAll(), costs).plan
    told = plan.explain()
    peak, saved, _ = measured(joint.flow, plan, costs)
    data = json.loads(json.dumps(told.to_dict()))
    assert (data["peak"], data["saved"]) == (peak, saved)
    assert f"The peak is at least {size(peak)}, in " in str(told) and "of saved values" in str(told)


def test_other_budgets_are_planned_again(joint):
    costs = sk.costs.roofline(joint.graph_module, "a100")
    whole = joint.split(Budget(1.0), costs).plan
    data = whole.explain(costs=costs).to_dict()
    for change, factor in zip(data["changes"], (0.9, 1.1), strict=True):
        budget = int(data["peak"] * factor)
        assert size(budget) in change["change"]
        try:
            plan = joint.split(Budget(budget), costs).plan
        except sk.errors.NoPlanError as error:
            assert not change["figures"] and error.reason.startswith(change["refusal"])
            continue
        figures = {figure["name"]: figure for figure in change["figures"]}
        assert figures["peak"]["second"] == measured(joint.flow, plan, costs)[0] <= budget
        assert figures["peak"]["first"] == data["peak"]
    saved = joint.split(SaveAll(), costs).plan.explain(costs=costs).to_dict()
    frontier = sk.Frontier(joint, costs)
    for change, factor in zip(saved["changes"], (0.9, 1.1), strict=True):
        figures = {figure["name"]: figure for figure in change["figures"]}
        assert figures["recompute"]["second"] == pytest.approx(frontier.within(int(saved["saved"] * factor)).seconds)


def test_a_node_says_what_becomes_of_it(joint):
    costs = sk.costs.roofline(joint.graph_module, "a100")
    plan = joint.split(POLICIES["some"], costs).plan
    assert "Backward computes it again" in str(plan.explain("tanh"))
    assert "draws random numbers" in str(plan.explain("native_dropout"))
    assert "an input" in str(plan.explain("primals_1"))
    for name in ("forward", "nowhere"):
        with pytest.raises(sk.errors.PlanError, match="SK314"):
            plan.explain(name)


def test_stages_have_rows_of_their_own(joint):
    costs = sk.costs.roofline(joint.graph_module, "a100")
    step = joint.split(Pipeline(2), costs)
    told = step.plan.explain()
    data = told.to_dict()
    assert {stage for row in data["rows"] for stage in row["stages"]} == {0, 1} and data["peak"] is None
    assert {row["decision"] for row in data["rows"]} <= {SAVED, AGAIN} and "stage" in str(told)
    other = joint.split(Pipeline(2, recompute=False), costs)
    assert sk.compare_plans(step.plan, other.plan).figures
    with pytest.raises(sk.errors.PlanError, match="SK316"):
        sk.compare_plans(step.plan, joint.split(SaveAll(), costs).plan)


class Attends(nn.Module):
    """Attention of one head over eight tokens, with dropout."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 24)

    def forward(self, x):
        query, key, value = self.wide(x).unsqueeze(1).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5).square().sum()


def test_what_attention_of_a_cpu_keeps_is_said_to_be_at_most_for_a_device_with_a_kernel():
    joint, scores = sk.capture_joint(Attends(), torch.ones(2, 8, 8)), 2 * 8 * 8 * 4
    for device in ("h100", "cpu"):
        plan = joint.split(SaveAll(), sk.costs.roofline(joint.graph_module, device)).plan
        told = plan.explain(again=False)
        inside, saved = (told.to_dict()[name] for name in ("inside_attention", "saved"))
        # the softmax, and what dropout leaves of it, in float32; and its mask of bools
        assert 2 * scores + scores // 4 <= inside <= saved if device == "h100" else inside == 0
        assert (f"{size(inside)} of it lie inside attention" in str(told)) == (device == "h100")
        assert ("Attention counts as a CPU computes it" in plan.note) == (device == "h100")


@pytest.mark.campaign
@pytest.mark.parametrize("policy", [SaveAll(), Budget(0.5), Pipeline(1, "gpipe", microbatches=2)], ids=repr)
def test_every_reader_of_such_a_plan_says_at_most_by_its_note(policy, tmp_path):
    joint = sk.capture_joint(Attends(), torch.ones(2, 8, 8))
    for device in ("h100", "cpu"):
        made = joint.split(policy, sk.costs.roofline(joint.graph_module, device))
        made.plan.save(tmp_path / "plan.json")
        again = sk.Plan.load(tmp_path / "plan.json", joint.graph_module.graph)
        made.to_html(tmp_path / "page.html")
        texts = [made.plan.note, again.note, (tmp_path / "page.html").read_text(), str(sk.compare_plans(again, again))]
        said = ["Attention counts as a CPU computes it" in " ".join(t.split()) for t in texts]
        assert said == [device == "h100"] * 3 + said[3:]
        assert joint.split(again).plan.note == again.note  # said once, however often the plan is used
