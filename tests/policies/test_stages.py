"""`Stages`: with links, memory and schedules, compared with every plan of small graphs and with runs."""

from __future__ import annotations

import re

import pytest
import torch
from campaigns import few_of_many, these_first
from capturedmodels import captured_example
from hypothesis import strategies as st
from placedgraphs import Deep, Prices, dags, every_chain, load_of
from torch import fx, nn

import splitkit as sk
from splitkit.memory.saved_storages import activations
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.policies import Stages
from splitkit.testing import assert_legal, assert_same


@few_of_many(25, 150, dags(), st.integers(1, 3), st.sampled_from([None, 0.25, 1.5]))
def test_no_stages_are_better(case, count, latency):
    gm, seconds = case
    flow, costs = sk.analyze(gm), Prices(seconds)
    link = sk.costs.Link(1e9, latency or 0.0)
    if count > len(flow.nodes):
        return
    plan = Stages(count, links=None if latency is None else sk.costs.Links(link)).assign(flow, costs)
    assert_legal(flow, plan)
    stage = {n: plan.home(n) for n in flow.nodes}
    assert all(len(places) == 1 for places in plan.values()) or latency is not None
    best = min(
        max(load_of(flow, costs, chain, number, link) for number in range(count)) for chain in every_chain(flow, count)
    )
    if all(len(places) == 1 for places in plan.values()):
        value = max(load_of(flow, costs, stage, number, link) for number in range(count))
        assert plan.claim.value == pytest.approx(value, abs=1e-9)
        assert value == pytest.approx(best, abs=1e-9)
    assert plan.claim.value <= best + 1e-9  # copies may make it better
    assert plan.claim.bound <= best + 1e-9
    assert plan.claim.objective == "bottleneck" and plan.claim.limiting in range(count)


def test_stages_need_not_follow_the_order_of_the_graph():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = graph.call_function(torch.relu, (x,)), graph.call_function(torch.abs, (x,))
    third = graph.call_function(torch.neg, (first,))
    fourth = graph.call_function(torch.sin, (second,))
    graph.output((third, fourth))
    gm = fx.GraphModule(nn.Module(), graph)
    plan = sk.plan(gm, Stages(2), Prices({"relu": 3.0, "abs_1": 1.0, "neg": 1.0, "sin": 1.0}))
    assert plan.claim.value == 3.0 and plan.claim.optimal  # the graph's own order gives 4
    assert {n.name for n in plan.members(plan.home(first))} == {"relu"}


def test_a_mask_is_computed_in_each_stage_that_reads_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

        def forward(self, x):
            mask = torch.ones(256, 256).tril() == 0
            for layer in self.layers:
                x = layer(x).masked_fill(mask, 0.0)
            return x

    model, inputs = Model(), torch.randn(256, 256)
    gm = sk.capture(model, inputs)
    costs = Prices({n.name: 10.0 if "linear" in n.name else 0.01 for n in gm.graph.nodes}, nbytes=1)
    plan = sk.plan(gm, Stages(4, links=sk.costs.Links.uniform(1.0)), costs)
    copied = {n.name: len(places) for n, places in plan.items() if len(places) > 1}
    assert set(copied.values()) == {3} or set(copied.values()) == {4}
    made = sk.split(gm, plan)
    assert all(n.name not in copied for unit in made.subgraphs.values() for n in unit.inputs)
    assert_same(gm, made, inputs)
    assert plan.claim.value == pytest.approx(12.04, abs=0.02) and plan.claim.gap < 0.01
    assert all(len(places) == 1 for places in sk.plan(gm, Stages(4), costs).values())


@pytest.fixture(scope="module")
def deep():
    gm = sk.capture(Deep(), torch.randn(4096, 32))
    return gm, sk.costs.roofline(gm, "h100")


def run_of(gm, plan, costs, policy):
    prices = StagePrices(sk.analyze(gm), sk.costs.training(costs, gm), "adam", activations(gm))
    return sk.simulate_schedule(prices.of(plan), policy.schedule, policy.microbatches)


def test_a_memory_limit_moves_the_cuts_and_is_kept_at_every_rank(deep):
    gm, costs = deep
    free = Stages(4, "1f1b", microbatches=8)
    loose = sk.plan(gm, free, costs)
    peaks = run_of(gm, loose, costs, free).peaks
    assert peaks[0] > peaks[-1]  # four microbatches are in flight in the first stage, one in the last
    limit = int(max(peaks) * 0.7)
    policy = Stages(4, "1f1b", microbatches=8, memory=limit)
    plan = sk.plan(gm, policy, costs)
    run = run_of(gm, plan, costs, policy)
    assert max(run.peaks) <= limit and run.in_flight_of_stages == (4, 3, 2, 1)
    assert len(plan.members(0)) < len(loose.members(0))
    assert plan.claim.value >= plan.claim.bound and plan.claim.value > loose.claim.value
    assert "peak" in plan.note and "1F1B of 8 microbatches" in plan.note


def test_memory_of_each_rank_apart(deep):
    gm, costs = deep
    free = Stages(4, "1f1b", microbatches=8)
    peaks = run_of(gm, sk.plan(gm, free, costs), costs, free).peaks
    limits = [max(peaks) // 2, max(peaks), max(peaks), max(peaks)]
    policy = Stages(4, "1f1b", microbatches=8, memory=limits)
    run = run_of(gm, sk.plan(gm, policy, costs), costs, policy)
    assert all(peak <= limit for peak, limit in zip(run.peaks, limits, strict=True))


def test_what_does_not_fit_says_what_would(deep):
    gm, costs = deep
    with pytest.raises(sk.errors.NoPlanError, match="SK303: Stages: what the parts hold does not fit") as error:
        sk.plan(gm, Stages(2, "1f1b", memory="1MiB"), costs)
    needed = int(error.value.remedy.split()[1])
    assert "alone holds" in error.value.reason and len(error.value.nodes) == 1
    with pytest.raises(sk.errors.NoPlanError):
        sk.plan(gm, Stages(2, "1f1b", memory=int(needed * 0.9)), costs)
    sk.plan(gm, Stages(2, "1f1b", memory=needed), costs)


def test_how_many_devices_would_do_is_said(deep):
    gm, costs = deep
    with pytest.raises(sk.errors.NoPlanError) as error:
        sk.plan(gm, Stages(2, memory="6MiB", optimizer="adam"), costs)
    count = int(error.value.remedy.split()[-2])
    assert count > 2 and f"there is one for {count} devices" in error.value.remedy
    sk.plan(gm, Stages(count, memory="6MiB", optimizer="adam"), costs)
    with pytest.raises(sk.errors.NoPlanError):
        sk.plan(gm, Stages(count - 1, memory="6MiB", optimizer="adam"), costs)


def test_what_is_advised_works_even_if_time_was_over(deep):
    gm, costs = deep
    hasty = {"optimizer": "adam", "seconds": 1e-6}
    with pytest.raises(sk.errors.NoPlanError, match="time ended the search") as error:
        sk.plan(gm, Stages(2, memory="6MiB", **hasty), costs)
    need, count = re.search(r"Give (\d+) bytes .* for (\d+) devices", error.value.remedy).groups()
    sk.plan(gm, Stages(2, memory=int(need), **hasty), costs)
    plan = sk.plan(gm, Stages(int(count), memory="6MiB", **hasty), costs)
    stages = sk.stage_costs(sk.analyze(gm), plan, costs)
    assert max(ByteBreakdown.of_stage(stage).total for stage in stages) <= 6 * 2**20


def test_the_purpose_is_inference_unless_training_is_named(deep):
    gm, costs = deep
    notes = {
        name: sk.plan(gm, policy, prices).note
        for name, policy, prices in (
            ("plain", Stages(2, memory="1GiB"), costs),
            ("named", Stages(2, memory="1GiB", optimizer="sgd"), costs),
            ("schedule", Stages(2, "1f1b", memory="1GiB"), costs),
            ("prices", Stages(2, memory="1GiB"), sk.costs.training(costs)),
        )
    }
    assert "inference: " in notes["plain"] and "gradients" not in notes["plain"] and "activations" in notes["plain"]
    assert "training with sgd: " in notes["named"] and "gradients" in notes["named"]
    assert "of optimizer" not in notes["named"]
    assert all(
        "training with adam: " in notes[name] and "of optimizer" in notes[name] for name in ("schedule", "prices")
    )


def test_of_equal_bottlenecks_the_shorter_step_is_taken():
    graph = fx.Graph()
    value = graph.placeholder("x")
    names = []
    for op in (torch.relu, torch.abs, torch.neg, torch.sin, torch.cos):
        value = graph.call_function(op, (value,))
        names.append(value.name)
    graph.output(value)
    gm = fx.GraphModule(nn.Module(), graph)
    sk.extend.propagate(gm, torch.ones(4))
    costs = Prices(dict(zip(names, [2.0, 1.0, 1.0, 1.0, 3.0], strict=True)))
    flow = sk.analyze(gm)

    def step(stage):
        times = [sum(costs.seconds(n) for n in flow.nodes if stage[n] == s) for s in range(3)]
        stages = [sk.extend.StageCosts(seconds, 0.0) for seconds in times]
        return max(times), sk.simulate_schedule(stages, "1f1b", 6).seconds

    best = min(map(step, every_chain(flow, 3)))
    plan = sk.plan(gm, Stages(3, "1f1b"), costs)
    assert step({n: plan.home(n) for n in flow.nodes}) == pytest.approx(best)


@pytest.mark.parametrize(
    ("policy", "code", "text"),
    [
        (lambda: Stages(2, "1f1c"), "SK330", "Did you mean 1F1B"),
        (lambda: Stages(3, "interleaved-1f1b"), "SK330", "4"),
        (lambda: Stages(2, microbatches=4), "SK302", "without a schedule"),
        (lambda: Stages(2, memory="lots"), "SK302", "80GiB"),
        (lambda: Stages(2, memory=[1, 2, 3]), "SK302", "3 sizes for 2 devices"),
        (lambda: Stages(2, memory=-1), "SK302", "memory=-1"),
        (lambda: Stages(2, links="nvlynk4"), "SK322", "nvlink4"),
        (lambda: Stages(2, optimizer="lion"), "SK302", "lion"),
        (lambda: Stages(2, seconds=0), "SK302", "above 0"),
        (lambda: Stages(0), "SK302", "n must be"),
    ],
)
def test_bad_parameters_are_refused(policy, code, text):
    with pytest.raises(sk.SplitError, match=text) as error:
        policy()
    assert error.value.code == code


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_bad_price_names_the_node(price):
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    graph.output(graph.call_function(torch.abs, (y,)))
    gm = fx.GraphModule(nn.Module(), graph)
    with pytest.raises(sk.errors.CostError, match="relu") as error:
        sk.plan(gm, Stages(2), Prices({"relu": price, "abs_1": 1.0}))
    assert error.value.code == "SK323" and error.value.nodes == ("relu",)


def test_a_missing_link_names_the_devices(deep):
    gm, costs = deep
    links = sk.costs.Links(pairs={(0, 1): sk.costs.Link(1e9), (1, 0): sk.costs.Link(1e9)})
    with pytest.raises(sk.errors.CostError, match="no link from 0 to 2"):
        sk.plan(gm, Stages(3, links=links), costs)


def test_slow_links_are_avoided():
    """The link between ranks 0 and 1 is a hundred times slower, so little crosses that border."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    values = [x]
    for op in (torch.relu, torch.abs, torch.neg, torch.sin):
        values.append(graph.call_function(op, (values[-1],)))
    graph.output(values[-1])
    gm = fx.GraphModule(nn.Module(), graph)

    class Sized(Prices):
        def nbytes(self, node):
            return {"relu": 100, "abs_1": 10, "neg": 100}.get(node.name, 1)

    costs = Sized(dict.fromkeys(("relu", "abs_1", "neg", "sin"), 1.0))
    slow = sk.costs.Links.matrix([[0, 1.0, 100.0], [1.0, 0, 100.0], [100.0, 100.0, 0]])
    plan = sk.plan(gm, Stages(3, links=slow), costs)
    homes = [plan.home(n) for n in values[1:]]
    assert homes == [0, 0, 1, 2]
    assert plan.claim.value == pytest.approx(2 + 10.0)


class Headed(nn.Module):
    """Twelve layers alike and a heavy head, with its loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))
        self.head = nn.Linear(32, 160)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x).relu()
        return nn.functional.cross_entropy(self.head(x), labels)


@pytest.fixture(scope="module")
def headed():
    gm = sk.capture(Headed(), torch.randn(64, 32), torch.zeros(64, dtype=torch.long))
    return gm, sk.costs.flops(gm)


@pytest.mark.parametrize(
    "pipeline",
    [{}, {"schedule": "1f1b", "microbatches": 16}, {"links": sk.costs.Links(sk.costs.Link(1e15, 0.0))}],
    ids=["alone", "1f1b", "links"],
)
@pytest.mark.parametrize("count", these_first([2, 6], [4, 8]))
def test_a_heavy_head_leaves_no_stage_without_work(headed, count, pipeline):
    """If only the slowest stage counted, the plan would begin with stages of 0 %."""
    gm, costs = headed
    plan = sk.plan(gm, Stages(count, **pipeline), costs)
    works = [sum(map(costs.seconds, plan.members(stage))) for stage in range(count)]
    head = max(map(costs.seconds, plan))
    assert max(works) <= 1.01 * max(head, sum(works) / count + head / 5)
    if pipeline.get("schedule"):  # the last stage may compute the loss alone, whose backward is in the step
        works = works[:-1] if works[-1] < 1e-11 else works
    assert min(works) >= min(head / 5, sum(works) / count) * 0.99, "one layer at least in each"
    if len(works) == count:
        assert plan.claim.evenness == pytest.approx(sum(works) ** 2 / count / sum(w * w for w in works), rel=2e-2)


def test_the_op_that_limits_stages_is_named(headed):
    gm, costs = headed
    share = max(map(costs.seconds, gm.graph.nodes)) / sum(map(costs.seconds, gm.graph.nodes))
    assert "no faster" not in sk.plan(gm, Stages(3), costs).note
    note = sk.plan(gm, Stages(6), costs).note
    assert f"linear_12 (head), one op, takes {share:.0%}: more than 4 stages are no faster; split that op" in note


def test_even_stages_within_a_tolerance():
    """Seven and five or six and six: the slowest decides, unless it is told how much slower it may be."""
    seconds = {f"s{i}": s for i, s in enumerate((4.0, 3.0, 3.02, 1.98))}
    graph = fx.Graph()
    x = graph.placeholder("x")
    for name in seconds:
        x = graph.create_node("call_function", torch.sin, (x,), name=name)
    graph.output(x)
    gm = fx.GraphModule(nn.Module(), graph)
    strict, loose = (sk.plan(gm, Stages(3, tolerance=t), Prices(seconds)) for t in (0, 0.3))
    assert strict.claim.value == 5.0 and strict.claim.optimal
    assert loose.claim.value <= 5.0 * 1.3
    assert loose.claim.evenness >= strict.claim.evenness
    with pytest.raises(sk.errors.PolicyError, match="SK302.*tolerance"):
        Stages(2, tolerance=-0.1)


def test_a_claim_of_before_evenness_is_read(headed, tmp_path):
    gm, costs = headed
    plan = sk.plan(gm, Stages(4), costs)
    plan.save(tmp_path / "plan.json")
    assert sk.Plan.load(tmp_path / "plan.json", gm.graph).claim == plan.claim
    data = plan.to_dict()
    del data["claim"]["evenness"]
    assert sk.Plan.from_dict(gm.graph, data).claim.evenness is None


@pytest.mark.parametrize("more", these_first([{}, {"links": "pcie4"}], [{"memory": "least"}, {"memory": "1GiB"}]))
def test_an_optimizer_asks_for_stages_that_are_even_in_training(more):
    """As prices with backward do: a load is forward and backward, and gradients come back over links."""
    gm = captured_example("gpt2", layers=2, width=32, heads=2, vocab=100, seq=16).graph
    costs = sk.costs.roofline(gm, "l4")
    named = sk.plan(gm, Stages(2, optimizer="adam", **more), costs)
    priced = sk.plan(gm, Stages(2, **more), sk.costs.training(costs))
    assert named.claim.value == pytest.approx(priced.claim.value) and dict(named.items()) == dict(priced.items())
    slowest = next(one for one in sk.compare_plans(named, named).figures if one.name == "slowest stage")
    assert slowest.first == pytest.approx(named.claim.value)
