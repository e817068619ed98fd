"""`Best`: several policies, measured alike."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

import pytest
import torch
from policygraphs import graph
from torch import fx, nn

import splitkit as sk
from splitkit.costs import Link, Links
from splitkit.errors import CostError, NoPlanError, PolicyError, ScheduleError
from splitkit.plans.parts import Claim
from splitkit.plans.record import Plan
from splitkit.policies import Best, Expert, RoundRobin, Stages
from splitkit.policies import best as module
from splitkit.search.plan_figures import Scoring
from splitkit.search.request import StageRequest
from splitkit.testing import assert_legal


@dataclass(frozen=True)
class Table:
    """Costs with seconds by node name, and 10 bytes per node."""

    seconds_of: dict

    def seconds(self, node):
        return self.seconds_of.get(node.name, 0.0)

    def flops(self, node):
        return 0.0

    def nbytes(self, node):
        return 10

    def param_bytes(self, node):
        return 0


@dataclass(frozen=True)
class Given:
    """A plan from one label per node, perhaps with a claim."""

    labels: tuple
    claim: Claim | None = None

    def assign(self, flow, costs):
        return replace(Plan.of(dict(zip(flow.nodes, self.labels, strict=True))), claim=self.claim)


@dataclass(frozen=True)
class Never:
    reason: str = "never"

    def assign(self, flow, costs):
        raise NoPlanError("SK303", self.reason, "Do not ask.")


CHAIN = graph(torch.sin, torch.cos, torch.exp, torch.abs)
TIMES = Table({"sin": 1.0, "cos": 2.0, "exp": 3.0, "abs_1": 4.0})
WIRE = Links.uniform(bandwidth=10.0, latency=1.0)  # 2 seconds for a value


def best(policies, costs=TIMES, gm=CHAIN, **options):
    """Return the winner's plan after checking that it is legal."""
    flow = sk.analyze(gm)
    plan = Best(policies, **options).assign(flow, costs)
    assert_legal(flow, plan)
    return plan


def labels(plan):
    return [plan.home(n) for n in plan]


def test_the_least_load_wins_and_the_note_lists_all():
    plan = best([Given((0, 1, 1, 1)), Given((0, 0, 0, 1)), lambda node: int(node.name in ("exp", "abs_1"))])
    assert labels(plan) == [0, 0, 0, 1]
    assert plan.claim.value == 6 and plan.claim.objective == "bottleneck" and plan.claim.limiting == 0
    assert "Given((0, 1, 1, 1)): 9 s; Given((0, 0, 0, 1)): 6 s; <lambda>: 7 s" in plan.note
    assert plan.claim.bound == pytest.approx(5), "half of the work"


def test_loads_are_work_and_each_value_once_for_each_part():
    made = fx.Graph()
    x = made.placeholder("x")
    a = made.call_function(torch.sin, (x,))
    b, c, d = (made.call_function(op, (a,)) for op in (torch.cos, torch.exp, torch.abs))
    made.output((b, c, d))
    gm = fx.GraphModule(nn.Module(), made)
    flow = sk.analyze(gm)
    scoring = Scoring(StageRequest(None, flow, TIMES, links=WIRE))
    score = scoring.of(Plan.of(dict(zip(flow.nodes, (0, 1, 1, 2), strict=True))))
    assert (score.value, score.limiting, len(score.loads)) == (7.0, 1, 3), (
        "5 of work, 2 to receive one value, twice read"
    )
    assert score.traffic == 20
    copied = Plan.of(dict(zip(flow.nodes, ([0, 1], 1, 1, 2), strict=True)))
    assert scoring.of(copied).value == 6.0 and scoring.of(copied).traffic == 10, "a copy costs its work, and no link"
    slow = Links(pairs={(i, j): Link(10.0, 1.0 + 5 * (j == 2)) for i in range(3) for j in range(3) if i != j})
    given = Plan.of(dict(zip(flow.nodes, (0, 1, 1, 2), strict=True)))
    sending = Scoring(StageRequest(None, flow, TIMES, links=slow)).of(given)
    assert (sending.value, sending.limiting) == (11.0, 2), "4 of work, 7 over its link; part 0: 1 and the slowest, 7"


def test_visits_of_one_device_are_one_load():
    plan = best([RoundRobin(2), Given((0, 0, 0, 1))])
    assert "RoundRobin(2): 6 s" in plan.note, "1 + 3 and 2 + 4, not four parts"
    assert labels(plan) == [0, 0, 0, 1] and plan.claim.value == 6, "less crosses"


def test_equal_loads_are_told_apart_by_traffic_and_then_by_the_order():
    made = fx.Graph()
    x = made.placeholder("x")
    a = made.call_function(torch.sin, (x,))
    b, c = made.call_function(torch.cos, (a,)), made.call_function(torch.exp, (x,))
    made.output((b, c))
    gm, even = fx.GraphModule(nn.Module(), made), Table({"sin": 1, "cos": 1, "exp": 2})
    crossing, free, mirrored = Given((0, 1, 0)), Given((0, 0, 1)), Given((1, 1, 0))
    uneven = Table({"sin": 1, "cos": 2, "exp": 1})
    assert labels(best([crossing, Given((0, 0, 1)), mirrored], even, gm)) == [0, 0, 1]
    assert labels(best([crossing], uneven, gm)) == [0, 1, 0]
    assert labels(best([mirrored, free], even, gm)) == [1, 1, 0], "the first one listed"


def test_who_refuses_is_passed_over():
    def cycle(node):
        return int(node.name == "cos")

    def parent(node):
        return None if node.name == "cos" else 0

    plan = best([Never("too tight"), cycle, parent, Given((0, 0, 0, 1))])
    assert labels(plan) == [0, 0, 0, 1]
    for text in ("Never(): SK303, too tight", "cycle: SK203", "parent: SK209"):
        assert text.replace("Never()", "Never('too tight')") in plan.note
    with pytest.raises(NoPlanError, match="SK303.*none of 2.*one; .*two") as error:
        best([Never("one"), Never("two")])
    assert error.value.remedy == "Do not ask."


def test_mistakes_are_not_passed_over():
    with pytest.raises(PolicyError, match="SK302"):
        best([Given((0, 0, 0, 1)), Expert([7])])
    with pytest.raises(PolicyError, match="SK301"):
        best([Given((0, 0, 0, 1)), 3])


def test_the_time_ends_the_list(monkeypatch):
    now = itertools.count(0.0, 10.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    plan = best([Given((0, 1, 1, 1)), Given((0, 0, 1, 1)), Given((0, 0, 0, 1))], seconds=15.0)
    assert labels(plan) == [0, 0, 1, 1]
    assert "Given((0, 0, 0, 1)): skipped, the time was over" in plan.note
    assert labels(best([Given((0, 1, 1, 1)), Given((0, 0, 0, 1))], seconds=0)) == [0, 1, 1, 1], "the first one runs"


# ---- bounds


def shared(policies, **options):
    return best(policies, **options).claim


def test_a_bound_is_shared_by_those_who_solve_the_same_problem():
    claim = shared([Given((0, 0, 0, 1)), Stages(2)])
    assert claim.optimal and claim.value == 6, "a human's plan, proven by Stages"
    assert re.fullmatch(r"Given\(\(0, 0, 0, 1\)\); Stages\(2\) by .+", claim.solver)
    own = shared([Stages(2), Given((0, 0, 0, 1))])
    assert re.fullmatch(r"Stages\(2\) by .+", own.solver)


@pytest.mark.parametrize(
    "other", [Stages(3), Stages(2, links=Links.uniform(1e9, 4.0)), Stages(2, memory=10**9), Given((0, 0, 0, 1), None)]
)
def test_and_not_by_others(other):
    gm = sk.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(1, 4))
    costs = Table({"linear": 1.0, "linear_1": 2.0, "linear_2": 3.0, "linear_3": 4.0})
    claim = best([Given((0, 0, 0, 1)), other], costs, gm, links=Links.uniform(1e9, 0.25)).claim
    assert claim.bound == pytest.approx(5) or claim.solver.startswith("Stages(3)"), "half of the work"


def test_a_policys_own_claim_is_not_taken_at_its_word():
    liar = Claim("bottleneck", 0.1, 0.1, "a dream", 0)
    claim = shared([Given((0, 0, 0, 1), liar)])
    assert claim.value == 6 and not claim.optimal
    assert shared([Given((0, 0, 0, 1), replace(liar, value=9.0, bound=9.0))]).bound == pytest.approx(5)


def test_what_fewer_parts_reach_is_no_bound_for_more():
    costs = Table({"sin": 1.0, "cos": 1.0, "exp": 1.5, "abs_1": 1.5})
    claim = best([Given((0, 0, 1, 2)), Stages(2)], costs).claim
    assert claim.value == 2 and claim.bound == pytest.approx(5 / 3), "two parts reach 3"


def test_with_fewer_demands_a_bound_still_holds():
    with_links = shared([Given((0, 0, 0, 1)), Stages(2)], links=WIRE)
    assert with_links.value == 8 and with_links.bound == pytest.approx(6), "without links nothing is below 6"
    assert shared([Stages(2, links=WIRE), Given((0, 0, 0, 1))], links=WIRE).optimal
    assert shared([Given((0, 0, 0, 1)), Stages(2, links=WIRE)]).bound == pytest.approx(5), "with links it says nothing"


def test_a_bound_with_messages_says_nothing_where_a_rank_has_several_stages():
    """Those of one rank send each other nothing."""
    gm = sk.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(1, 4))
    policies, costs = [Given((0, 1, 2, 3)), Stages(4, links=WIRE)], sk.costs.unit(gm)
    proofs = [best(policies, costs, gm, links=WIRE, schedule=name).claim.solver for name in (None, "1f1b", "zbv")]
    assert ["; Stages(4, links=...) by" in solver for solver in proofs] == [True, True, False]


def test_stages_prove_nothing_for_visits():
    heavy = Table({"sin": 3.0, "cos": 3.0, "exp": 3.0, "abs_1": 4.0, "neg": 6.0})
    gm = graph(torch.sin, torch.cos, torch.neg, torch.exp, torch.abs)
    plan = best([Stages(2), sk.extend.refine(sk.analyze(gm), visits(gm))], heavy, gm)
    assert plan.claim.value == 10.0 and plan.claim.bound == pytest.approx(9.5), "half of the work, not what Stages says"
    assert "a plan: 10 s" in plan.note and "Stages(2): 12 s" in plan.note


def visits(gm):
    flow = sk.analyze(gm)
    return Plan.of(dict(zip(flow.nodes, ("a", "b", "a", "b", "b"), strict=True)))


@pytest.mark.parametrize("seed", range(12))
def test_no_convex_parts_are_below_the_bound(seed):
    torch.manual_seed(seed)
    made = fx.Graph()
    values = [made.placeholder("x")]
    for _ in range(6):
        first, second = (values[int(torch.randint(len(values), ()))] for _ in range(2))
        values.append(made.call_function(torch.add, (first, second)))
    made.output(tuple(values[1:]))
    gm = fx.GraphModule(nn.Module(), made)
    flow = sk.analyze(gm)
    costs = Table({node.name: float(torch.randint(1, 6, ())) for node in flow.nodes})
    plan = best([Given((0, 0, 0, 1, 1, 1)), Stages(2), Stages(2, links=WIRE)], costs, gm, links=WIRE)
    scoring, least = Scoring(StageRequest(None, flow, costs, links=WIRE)), float("inf")
    for choice in itertools.product((0, 1), repeat=6):
        stage = dict(zip(flow.nodes, choice, strict=True))
        if len({*choice}) == 2 and all(stage[r] <= stage[n] for n in flow.nodes for r in flow.inputs(n)):
            least = min(least, scoring.of(Plan.of(stage)).value)
    assert plan.claim.bound <= least * (1 + 1e-9)
    assert plan.claim.value == pytest.approx(least), "Stages is exact"


# ---- schedules and memory, on a model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
        self.head = nn.Linear(32, 256)

    def forward(self, x):
        return self.head(self.h(x)).sum()


@pytest.fixture(scope="module")
def net():
    return sk.capture(Net(), torch.randn(8, 32))


def test_a_number_stands_for_two_policies(net):
    plan = best(3, sk.costs.roofline(net, device="a100"), net, schedule="1f1b", links="nvlink4", memory="1GiB")
    assert sorted(plan.parts) == [0, 1, 2]
    for name in ("Stages(3, schedule='1f1b'", "Expert(3)"):
        assert name in plan.note
    assert plan.note.count("step ") == plan.note.count("peak ") == 2
    assert plan.claim.bound <= plan.claim.value and plan.claim.gap < 0.2
    again = best(3, sk.costs.roofline(net, device="a100"), net, schedule="1f1b", links="nvlink4", memory="1GiB")
    assert again.to_dict() == plan.to_dict()


def test_what_exceeds_the_memory_is_out(net):
    costs, flow = sk.costs.unit(net), sk.analyze(net)
    plans = {name: Expert(counts).assign(flow, costs) for name, counts in (("even", [3, 3]), ("late", [5, 1]))}
    scoring = Scoring(StageRequest(None, flow, costs, memory=10**9))
    peaks = {name: max(scoring.of(plan).peaks) for name, plan in plans.items()}
    loads = {name: scoring.of(plan).value for name, plan in plans.items()}
    assert peaks["late"] < peaks["even"] and loads["even"] < loads["late"]
    candidates = [plans["even"], plans["late"]]
    assert labels(best(candidates, costs, net)) == labels(plans["even"])
    plan = best(candidates, costs, net, memory=peaks["late"], optimizer="adam")
    assert labels(plan) == labels(plans["late"]) and "too much" in plan.note
    with pytest.raises(NoPlanError, match="SK303.*1 B too much") as error:
        best([plans["late"]], costs, net, memory=peaks["late"] - 1, optimizer="adam")
    assert str(peaks["late"]) in error.value.remedy
    with pytest.raises(NoPlanError, match="memory is given for 3 ranks, the plan has 2"):
        best(candidates, costs, net, memory=["1GiB"] * 3)
    assert labels(best(candidates, costs, net, memory=[None, None, None][:2])) == labels(plans["even"])


def test_equal_loads_are_told_apart_by_the_simulated_step(net):
    costs = sk.costs.training(sk.costs.unit(net))
    flow = sk.analyze(net)
    early, late = Expert([4, 1, 1]).assign(flow, costs), Expert([1, 1, 4]).assign(flow, costs)
    scoring = Scoring(StageRequest(None, flow, costs, schedule="1f1b", microbatches=6))
    steps = {name: scoring.of(plan).step for name, plan in (("early", early), ("late", late))}
    whole = Given(tuple(0 for _ in flow.nodes))
    plan = best([late, early, whole], costs, net, schedule="1f1b", microbatches=6)
    assert plan.claim.value == min(scoring.of(p).value for p in (early, late))
    assert steps["early"] != steps["late"] and "step" in plan.note
    same = Scoring(StageRequest(None, flow, costs, schedule="gpipe")).of(early)
    assert same.step > 0 and same.traffic > 0


def test_visits_run_under_no_schedule(net):
    with pytest.raises(NoPlanError, match="visits to one device"):
        best([RoundRobin(2)], sk.costs.unit(net), net, schedule="1f1b")
    held = best([RoundRobin(2)], sk.costs.unit(net), net, memory="1GiB")
    assert "peak" in held.note and held.claim.bound <= held.claim.value


def test_a_schedule_that_does_not_go_with_a_plan_is_noted(net):
    costs = sk.costs.unit(net)
    plan = best([Expert(3), Expert(2)], costs, net, schedule="zbv", microbatches=8)
    assert sorted(plan.parts) == [0, 1] and "Expert(3): SK330" in plan.note
    assert sorted(best(2, costs, net, schedule="zbv", microbatches=8, memory=["1GiB"]).parts) == [0, 1]


def test_every_policy_of_the_number_agrees_on_a_small_chain():
    assert best([Stages(2), Stages(2, links="pcie4")]).claim.optimal
    assert labels(best(2)) == [0, 0, 0, 1]
    assert "Expert(2): SK303" in best(2).note, "no blocks"


@pytest.mark.parametrize(
    "options",
    [
        {"policies": []},
        {"policies": ()},
        {"policies": "Stages"},
        {"policies": None},
        {"policies": 0},
        {"policies": True},
        {"policies": 2, "seconds": -1},
        {"policies": 2, "seconds": "1"},
        {"policies": 2, "optimizer": "lion"},
        {"policies": [Stages(2)], "microbatches": 4},
        {"policies": 2, "memory": "much"},
    ],
)
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(PolicyError, match="SK302"):
        Best(**options)


def test_unknown_schedules_are_refused_at_once():
    for policies in (2, [Stages(2)]):
        with pytest.raises(ScheduleError, match="SK330"):
            Best(policies, schedule="2f2b")


def test_what_is_given_with_policies_of_ones_own_is_checked_when_it_is_made():
    for given in ({"optimizer": "lots"}, {"links": "lots"}, {"seconds": -1}, {"memory": "lots"}):
        with pytest.raises((PolicyError, CostError)):
            Best([RoundRobin(2)], **given)
