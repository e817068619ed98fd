"""A plan knows its prices: what is recorded prices every node as the costs did, in this process and in others."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example
from keptfacts import kept_facts  # noqa: F401
from smallnets import loss_or_sum
from torch import fx, nn
from zoographs import specimens

import splitkit as sk
from splitkit import costs
from splitkit.costs.links import links_of
from splitkit.costs.recorded import PriceTable, costs_of, record_of
from splitkit.errors import CostError, FileError, PlanWarning
from splitkit.graph.node_values import nodes_without_values
from splitkit.policies import Budget, ByName, MinCut, Stages
from splitkit.prices import includes_backward, unit_of
from splitkit.studies.explanation.explain import recorded_policy
from splitkit.testing import models

MINE = costs.Device("mine <b>", {"float32": 3e12, "float8": 7.5e13}, 1.1e11, 7 * 2**30, 1.7e-6, "a data sheet")


@dataclass(frozen=True)
class Own:
    """Costs of a user: the price is the length of the name, with a third of it for forward."""

    unit: str = "s"

    def seconds(self, node):
        return len(node.name) / 3 * 1e-6 if node.op.startswith("call") else 0

    def backward(self, node):
        return 2.0 if node.op.startswith("call") else 0.0

    def flops(self, node):
        return 1.0

    def nbytes(self, node):
        return 4

    def param_bytes(self, node):
        return 0


def small(layers=1):
    example, graph = captured_example("gpt2", layers=layers, width=32, heads=2, vocab=64, seq=8)
    return graph, example


@pytest.fixture(scope="module")
def gpt2():
    return small()


def measured(gm, example, **more):
    return costs.measured(gm, dict(example.kwargs) or example.args, min_run_time=1e-4, **more)


EVERY = {
    "flops": lambda gm, _: costs.flops(gm),
    "unit": lambda gm, _: costs.unit(gm),
    "roofline": lambda gm, _: costs.roofline(gm, "h100"),
    "tf32": lambda gm, _: costs.roofline(gm, MINE, tf32=True),
    "fused": lambda gm, _: costs.fused(gm, "a100"),
    "training flops": lambda gm, _: costs.training(costs.flops(gm)),
    "training roofline": lambda gm, _: costs.training(costs.roofline(gm, MINE)),
    "training fused": lambda gm, _: costs.training(costs.fused(gm, "h100", tf32=True)),
    "measured": lambda gm, example: measured(gm, example),
    "training measured": lambda gm, example: costs.training(measured(gm, example)),
    "measured steps": lambda gm, example: measured(gm, example, backward=True),
    "own": lambda gm, _: Own(),
    "own unit": lambda gm, _: Own("joules"),
}


def through_a_file(plan, graph):
    return sk.Plan.from_dict(graph, json.loads(json.dumps(plan.to_dict())))


def assert_same_prices(found, wanted, graph):
    assert unit_of(found) == unit_of(wanted) and includes_backward(found) == includes_backward(wanted)
    for node in graph.nodes:
        assert found.seconds(node) == wanted.seconds(node), node
        if includes_backward(wanted):
            assert found.backward(node) == wanted.backward(node), node


FIRST = ["flops", "unit", "training roofline", "training fused", "measured steps", "own"]


@pytest.mark.parametrize("name", these_first(FIRST, [name for name in EVERY if name not in FIRST]))
def test_prices_survive_a_file_exactly(gpt2, name):
    gm, example = gpt2
    wanted = EVERY[name](gm, example)
    plan = sk.plan(gm, Stages(2), wanted)
    again = through_a_file(plan, gm.graph)
    assert costs_of(plan.prices, gm) is wanted
    assert again.prices == plan.prices and again.prices.live is None
    found = costs_of(again.prices, gm)
    assert found is not wanted
    assert_same_prices(found, wanted, gm.graph)
    if name in ("flops", "training roofline", "training fused"):  # the stages of others cost what their nodes cost
        flow = sk.analyze(gm)
        assert sk.stage_costs(flow, again) == sk.stage_costs(flow, plan) == sk.stage_costs(flow, plan, wanted)


@pytest.mark.parametrize("name", sorted(specimens()))
def test_every_specimen_is_priced_as_before(name):
    gm = specimens()[name].graph
    kinds = [costs.unit(gm), Own()]
    if not nodes_without_values(gm.graph):
        kinds += [costs.flops(gm), costs.roofline(gm, "h100"), costs.training(costs.fused(gm, MINE))]
    for wanted in kinds:
        plan = replace(sk.Plan.of({}), prices=record_of(wanted, gm))
        made = {**plan.to_dict(), "places": {}}
        found = costs_of(sk.Plan.from_dict(gm.graph, json.loads(json.dumps(made))).prices, gm)
        assert_same_prices(found, wanted, gm.graph)


def test_a_device_of_the_user_comes_back(gpt2):
    gm, _ = gpt2
    again = through_a_file(sk.plan(gm, Stages(2), costs.roofline(gm, MINE, tf32=True)), gm.graph)
    found = costs_of(again.prices, gm)
    assert found.device == MINE and found.tf32 and found.note == again.prices.name == "roofline of mine <b>"


def test_the_record_says_what_people_read(gpt2):
    gm, example = gpt2
    names = {name: sk.plan(gm, Stages(2), EVERY[name](gm, example)).prices for name in ("flops", "unit", "own")}
    assert [(r.name, r.unit, r.kind) for r in names.values()] == [
        ("FLOPs", "TFLOP", "flops"),
        ("nodes", "nodes", "unit"),
        ("Own", "s", "table"),
    ]
    priced = costs.training(costs.roofline(gm, "h100"))
    assert sk.plan(gm, Stages(2), priced).prices.name == "roofline of h100, backward op by op" == priced.note


def plain():
    """A graph without transformers, which another process need not import."""
    torch.manual_seed(0)
    example = models.Example(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), (torch.ones(2, 8),), {})
    return sk.capture(example.model, *example.args, how="symbolic_trace"), example


@pytest.mark.campaign
def test_another_process_prices_alike(tmp_path):
    (gm, example), names, wanted = plain(), ("training roofline", "measured steps"), []
    for number, name in enumerate(names):
        plan = sk.plan(gm, Stages(2), EVERY[name](gm, example))
        plan.save(tmp_path / f"{number}.json")
        wanted.append([stage.forward.hex() for stage in sk.stage_costs(sk.analyze(gm), plan)])
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
import torch
import splitkit as sk
from splitkit.studies.explanation.explain import recorded_policy
from splitkit.testing import models
from torch import nn
{inspect.getsource(plain)}
gm, _ = plain()
plans = [sk.Plan.load(f"{{number}}.json", gm.graph) for number in range({len(names)})]
print([[stage.forward.hex() for stage in sk.stage_costs(sk.analyze(gm), plan)] for plan in plans])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout.strip() == repr(wanted), found.stderr


class Two(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x, y):
        if self.first:
            a, b = torch.sin(x), torch.exp(y)
        else:
            b, a = torch.exp(y), torch.sin(x)
        return a @ b


def test_a_table_follows_nodes_that_have_other_names():
    x = torch.ones(4, 4)
    one = sk.capture(Two(True), x, x)
    other = sk.capture(Two(True), x, x)
    for node in other.graph.nodes:
        if node.op == "call_function":
            node.name = f"another_{node.name}"
    again = through_a_file(sk.plan(one, Stages(2), Own()), other.graph)
    found = costs_of(again.prices, other)
    for node, was in zip(other.graph.nodes, one.graph.nodes, strict=True):
        assert found.seconds(node) == Own().seconds(was)


def test_a_table_is_not_used_for_other_sizes_and_a_device_is():
    def caught(size):
        return sk.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(size, 4))

    one, other = caught(2), caught(3)
    for priced, kept in ((Own(), False), (costs.roofline(one, "h100"), True)):
        with pytest.warns(PlanWarning, match="SK509"):
            again = through_a_file(sk.plan(one, Stages(2), priced), other.graph)
        assert (again.prices is not None) == kept


def test_a_plan_that_no_policy_made_has_no_prices(gpt2):
    gm, _ = gpt2
    labels = dict.fromkeys(sk.analyze(gm).nodes, 0)
    assert sk.Plan.of(labels).prices is None and sk.plan(gm, labels).prices is None
    assert sk.split(gm, lambda node: 0).plan.prices is None
    assert "prices" not in sk.Plan.of(labels).to_dict()
    assert sk.plan(gm, labels, costs.roofline(gm, "h100")).prices.name == "roofline of h100"


def test_edits_of_a_plan_and_its_split_keep_the_prices(gpt2):
    gm, _ = gpt2
    priced = costs.roofline(gm, "h100")
    plan = sk.plan(gm, Stages(2), priced)
    node = next(iter(plan))
    assert plan.place({node: plan[node]}).prices is plan.prices
    assert sk.split(gm, plan).plan.prices is plan.prices
    assert sk.split(gm, Stages(2), costs=priced).plan.prices == plan.prices
    assert sk.split(gm, plan, costs=costs.unit(gm)).plan.prices is plan.prices
    assert sk.sweep(gm, priced, stages=[2], microbatches=[2]).rows[0].plan.prices == plan.prices


def test_the_links_of_a_policy_are_recorded(gpt2):
    gm, _ = gpt2
    plan = sk.plan(gm, Stages(2, links="nvlink4"), costs.roofline(gm, "h100"))
    assert through_a_file(plan, gm.graph).request.links == "nvlink4"
    for links in (
        costs.Links.uniform(1e9),
        costs.Links.nodes(2, "nvlink4", "ethernet100"),
        costs.Links.matrix([[0, 1e9], [2e9, 0]]),
    ):
        own = through_a_file(sk.plan(gm, Stages(2, links=links), costs.roofline(gm, "h100")), gm.graph)
        assert links_of(own.request.links) == links and recorded_policy(own).links == links


def test_joint_plans_know_their_prices():
    joint = sk.capture_joint(
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.ones(2, 8), loss=loss_or_sum
    )
    gm = joint.graph_module
    for priced in (costs.roofline(gm, "h100"), Own()):
        plan = joint.split(MinCut(), priced).plan
        again = through_a_file(plan, gm.graph)
        assert again.prices == plan.prices and costs_of(plan.prices, gm) is priced
        assert_same_prices(costs_of(again.prices, gm), priced, gm.graph)
    assert joint.split(MinCut()).plan.prices.kind == "flops"
    assert joint.split(Budget(0.5, price="fused"), costs.roofline(gm, "h100")).plan.prices.kind == "fused"
    frontier = sk.Frontier(joint, costs.roofline(gm, "h100"))
    assert frontier.points[0].pair.plan.prices.name == "roofline of h100"


class Counting(Own):
    asked = 0

    def seconds(self, node):
        type(self).asked += 1
        return super().seconds(node)


def test_nobody_is_asked_for_prices_before_a_plan_is_written(gpt2):
    gm, _ = gpt2
    plan = sk.plan(gm, ByName({"*": 0}), Counting())
    assert plan.prices.table is not None and repr(plan) and str(plan) and Counting.asked == 0
    plan.to_dict()
    asked = Counting.asked
    plan.to_dict()
    assert asked == Counting.asked <= len(gm.graph.nodes)


def test_a_node_that_costs_refuse_has_no_recorded_price(gpt2):
    gm, _ = gpt2

    class Partial(Own):
        def seconds(self, node):
            if node.name == last.name:
                raise ValueError("no idea")
            return super().seconds(node)

    last = [node for node in gm.graph.nodes if node.op == "call_function"][-1]
    again = through_a_file(sk.plan(gm, ByName({"*": 0}), Partial()), gm.graph)
    found = costs_of(again.prices, gm)
    assert isinstance(found, PriceTable) and last.name not in again.prices.table
    with pytest.raises(CostError, match=f"SK325.*{last.name}"):
        found.seconds(last)


def test_costs_of_another_graph_are_recorded_as_a_table(gpt2):
    gm, _ = gpt2
    other, _ = small()
    assert record_of(costs.roofline(other, "h100"), gm).kind == "table"


def test_a_record_is_pickled_without_the_costs(gpt2):
    gm, _ = gpt2
    record = sk.plan(gm, Stages(2), Own()).prices
    again = pickle.loads(pickle.dumps(record))
    assert again == record and again.live is None and type(again.table) is dict


def test_names_of_own_costs_stay_printable_and_short(gpt2):
    gm, _ = gpt2

    class Odd(Own):
        note = "\x1b[31m" + "x" * 1000

    again = through_a_file(sk.plan(gm, ByName({"*": 0}), Odd()), gm.graph)
    assert again.prices.name.isprintable() and len(again.prices.name) == 200


def test_a_device_that_makes_no_sense_is_damage(gpt2):
    gm, _ = gpt2
    data = sk.plan(gm, Stages(2), costs.roofline(gm, MINE)).to_dict()
    data["prices"]["device"]["peak"] = {"float33": 1.0}
    plan = sk.Plan.from_dict(gm.graph, data)
    with pytest.raises(FileError, match="SK501.*prices.device"):
        costs_of(plan.prices, gm)


def test_without_a_record_the_default_prices_hold(gpt2):
    gm, _ = gpt2
    assert costs_of(None, gm) == costs.flops(gm)
    assert isinstance(costs_of(None, fx.symbolic_trace(nn.ReLU())), costs.Unit)
