"""Replicated stages, compared with every division into stages for every number of replicas."""

from __future__ import annotations

import random
import re
from itertools import accumulate

import pytest
import torch
from campaigns import some_of_all
from leastmemory import KINDS, SCHEDULES, captured, every_plan
from placedgraphs import Prices, every_chain
from torch import fx, nn

import splitkit as sk
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.plans.parts import Part
from splitkit.policies import Best, Stages
from splitkit.testing import assert_legal, assert_same

DEGREES = [(1, 2), (1, 2, 4), (2, 3), (1, 3), (2,)]


def graph_of(draw, nodes):
    """A random graph of sums with prices; every other one is a chain."""
    graph, chain = fx.Graph(), draw.random() < 0.4
    values = [graph.placeholder("x")]
    for _ in range(nodes):
        pair = (values[-1],) * 2 if chain else (draw.choice(values), draw.choice(values))
        values.append(graph.call_function(torch.add, pair))
    graph.output(tuple(values[1:]))
    gm = fx.GraphModule(nn.Module(), graph)
    sk.extend.propagate(gm, torch.ones(4, 2))
    return gm, Prices({n.name: draw.choice([0.0, 0.1, 0.5, 1.0, 3.0, 6.0]) for n in values[1:]}, 32)


def every_replication(flow, devices, degrees):
    """Yield every (stage of each node, replicas of each stage)."""
    for each in degrees:
        for stage in every_chain(flow, devices // each):
            yield stage, (each,) * (devices // each)


def loads_of(flow, costs, stage, replicas, link=None):
    """Return the load by definition: shares of work, and of each value that leaves or enters, once."""
    loads = [0.0] * len(replicas)
    for node in flow.nodes:
        loads[stage[node]] += costs.seconds(node) / replicas[stage[node]]
        here, paid = stage[node], []
        for there in {stage[user] for user in node.users if user in stage} - {stage[node]}:
            if link is not None:
                each = costs.nbytes(node) / min(replicas[here], replicas[there])
                paid.append(link.latency + each / link.bandwidth)
                loads[there] += paid[-1]
        loads[here] += max(paid, default=0.0)
    return loads


def placed(flow, plan):
    replicas = [plan.parts[key].replicas for key in sorted(plan.parts)]
    return {node: plan.home(node) for node in flow.nodes}, replicas


def squares(loads):
    return sum(load**2 for load in loads)


@pytest.mark.parametrize("seed", range(32))
def test_no_stages_and_replicas_are_better(seed):
    draw = random.Random(seed)
    gm, costs = graph_of(draw, draw.randint(3, 5))
    flow, degrees = sk.analyze(gm), draw.choice(DEGREES)
    devices = draw.randint(max(degrees), 6)
    least = min(max(loads_of(flow, costs, *each)) for each in every_replication(flow, devices, degrees))
    for tolerance in (0.0, 0.01):
        plan = Stages(devices, replicas=degrees, tolerance=tolerance).assign(flow, costs)
        assert_legal(flow, plan)
        stage, replicas = placed(flow, plan)
        loads = loads_of(flow, costs, stage, replicas)
        assert len(set(replicas)) == 1 and {*replicas} <= {*degrees} and len(replicas) == devices // replicas[0]
        assert plan.claim.value == pytest.approx(max(loads))
        assert least * (1 - 1e-9) <= plan.claim.value <= least * (1 + tolerance + 1e-9)
        assert plan.claim.bound == pytest.approx(least), "all borders are known: the bound is the least"
        if not tolerance:
            known = [loads_of(flow, costs, s, r) for s, r in every_replication(flow, devices, replicas[:1])]
            even = min(squares(found) for found in known if max(found) <= least * (1 + 1e-9))
            assert even * (1 - 1e-9) <= squares(loads) <= 1.01 * even


@pytest.mark.parametrize("seed", range(32, 64))
def test_no_stages_and_replicas_are_better_with_links(seed):
    draw = random.Random(seed)
    gm, costs = graph_of(draw, draw.randint(3, 5))
    flow, degrees = sk.analyze(gm), draw.choice(DEGREES)
    devices = draw.randint(max(degrees), 6)
    link = sk.costs.Link(draw.choice([30.0, 300.0]), draw.choice([0.0, 0.2]))
    least = min(max(loads_of(flow, costs, *each, link)) for each in every_replication(flow, devices, degrees))
    plan = Stages(devices, replicas=degrees, links=sk.costs.Links(link), tolerance=0.0).assign(flow, costs)
    if all(len(keys) == 1 for keys in plan.values()):  # copies may make it better
        assert plan.claim.value == pytest.approx(max(loads_of(flow, costs, *placed(flow, plan), link)))
        assert plan.claim.value >= least * (1 - 1e-9)
    assert plan.claim.bound <= min(least, plan.claim.value) * (1 + 1e-9)
    assert plan.claim.value <= least * (1 + 1e-9)


def with_replicas(parts, replicas):
    """Return a plan with these parts."""
    made = sk.Plan.of({node: key for key, part in enumerate(parts) for node in part})
    return sk.Plan(made.places, {key: Part(key, replicas=count) for key, count in enumerate(replicas)})


def every_worth(gm, costs, devices, degrees, schedule, microbatches, links=None):
    """Yield (peak, load, step) of every plan, by definition; without links the load is the work."""
    flow = sk.analyze(gm)
    both = sk.costs.training(costs, gm)
    prices = StagePrices(flow, both)
    for each in degrees:
        count = devices // each
        for stage in every_plan(flow, count):
            parts = [[n for n, s in zip(flow.nodes, stage, strict=True) if s == part] for part in range(count)]
            stages = prices.of(with_replicas(parts, [each] * count))
            run = sk.simulate_schedule(stages, schedule or "gpipe", microbatches if schedule else 1, links=links)
            load = max(sum(map(both.seconds, part)) / each for part in parts)
            yield max(run.peaks) if schedule else max(map(held, stages)), load, run.seconds


def held(costs):
    return costs.fixed_bytes + costs.saved_bytes + costs.temporary_bytes


CASES = [(kind, *sizes, schedule) for sizes in ((8, 4), (16, 64)) for kind in KINDS for schedule in SCHEDULES]
SHORT = CASES[9:10]
ALL = [pytest.param(*case, marks=() if case in SHORT else pytest.mark.campaign) for case in CASES]


@pytest.mark.parametrize(("kind", "width", "batch", "schedule"), ALL)
def test_what_fits_is_found(kind, width, batch, schedule):
    gm, costs = captured(kind, width, batch)
    asked = {"schedule": schedule, "microbatches": 6 if schedule else None, "replicas": (1, 2), "optimizer": "adam"}
    known = list(every_worth(gm, costs, 3, (1, 2), schedule, 6 if schedule else 1))
    least = min(peak for peak, _, _ in known)
    for memory in (least, int(least * 1.1), int(least * 1.5), 4 * least):
        plan = sk.plan(gm, Stages(3, memory=memory, tolerance=0.0, **asked), costs)
        stages = sk.stage_costs(gm, plan, costs)
        run = sk.simulate_schedule(stages, schedule or "gpipe", 6 if schedule else 1)
        assert (max(run.peaks) if schedule else max(map(held, stages))) <= memory
        fits = [(load, step) for peak, load, step in known if peak <= memory]
        if schedule is None:
            assert plan.claim.value == pytest.approx(min(load for load, _ in fits))
        else:
            assert run.seconds <= 1.02 * min(step for _, step in fits)
    with pytest.raises(sk.errors.NoPlanError, match="SK303") as refused:
        sk.plan(gm, Stages(3, memory=least - 1, **asked), costs)
    named = int(re.search(r"Give (\d+) bytes", refused.value.remedy)[1])
    assert least <= named <= 1.02 * least
    sk.plan(gm, Stages(3, memory=named, **asked), costs)


@pytest.mark.parametrize(("kind", "latency"), some_of_all(["chain", "tied"], [0.0, 1e-6], always=()))
def test_no_step_with_links_is_much_shorter(kind, latency):
    gm, costs = captured(kind, 16, 64)
    links = sk.costs.Links(sk.costs.Link(1e11, latency))
    steps = [step for _, _, step in every_worth(gm, costs, 4, (1, 2, 4), "1f1b", 8, links)]
    plan = sk.plan(gm, Stages(4, "1f1b", links=links, replicas=(1, 2, 4)), costs)
    stages = sk.stage_costs(gm, plan, costs)
    run = sk.simulate_schedule(stages, "1f1b", 8, links=links)
    assert min(steps) <= run.seconds * (1 + 1e-9) <= 1.03 * min(steps)
    loads = [stage.forward + stage.backward_input + stage.backward_weight for stage in stages]
    for at, stage in enumerate(stages):
        d = stage.replicas
        loads[at] += 2 * (d - 1) * (latency + stage.gradient_bytes / d / 1e11) / 8
        for there, nbytes in ((at - 1, stages[at - 1].activation_bytes), (at + 1, stage.activation_bytes)):
            if 0 <= there < len(stages):
                loads[at] += 2 * (latency + nbytes / min(d, stages[there].replicas) / 1e11)
    assert plan.claim.value == pytest.approx(max(loads)), "a chain: what crosses a border goes from stage to stage"
    assert plan.claim.bound <= plan.claim.value


def test_stages_with_replicas_are_no_slower_than_those_without():
    gm, costs = captured("tower", 32, 64)
    links = sk.costs.Links(sk.costs.Link(1e10, 1e-6))
    for count in (2, 3, 4):
        plain = sk.plan(gm, Stages(count, links=links), costs)
        more = sk.plan(gm, Stages(count, links=links, replicas=(1, 2), tolerance=0.0), costs)
        assert more.claim.value <= plain.claim.value * (1 + 1e-9)


def test_one_replica_is_the_plan_of_before():
    gm, costs = captured("branches", 8, 4)
    plain, one = (sk.plan(gm, Stages(2, **asked), costs) for asked in ({}, {"replicas": [1]}))
    assert plain.to_dict() == one.to_dict()
    assert "replicas" not in str(plain.to_dict())


def test_a_heavy_op_stands_on_several_devices():
    gm, seconds = chain_of(1.0, 1.0, 4.0)
    plan = sk.plan(gm, Stages(5, replicas=(1, 2)), Prices(seconds))
    assert [plan.parts[key].replicas for key in sorted(plan.parts)] == [2, 2]
    assert plan.claim.value == 2.0 and plan.claim.optimal and plan.claim.evenness == 0.9
    assert "2 stages on 2 devices each" in plan.note
    more = sk.plan(gm, Stages(5, replicas=(1, 4)), Prices(seconds))
    assert [part.replicas for part in more.parts.values()] == [4] and more.claim.value == 1.5
    with pytest.raises(sk.errors.NoPlanError):
        sk.plan(gm, Stages(5), Prices(seconds))


def test_an_op_too_heavy_for_the_replicas_is_named():
    gm, seconds = chain_of(1.0, 1.0, 20.0)
    plan = sk.plan(gm, Stages(6, replicas=(1, 2)), Prices(seconds))
    assert plan.claim.value == 10.0
    assert "neg_2, one op, takes 91%: more than 2 stages are no faster" in plan.note


def test_memory_of_each_device_counts():
    gm, costs = captured("chain", 32, 64)
    free = sk.plan(gm, Stages(4, "1f1b", replicas=(1, 2)), costs)
    peaks = sk.simulate_schedule(sk.stage_costs(gm, free, costs), "1f1b", 8).peaks
    memory = [int(max(peaks) * 0.95)] * 2 + [max(peaks)] * 2
    plan = sk.plan(gm, Stages(4, "1f1b", replicas=(1, 2), memory=memory), costs)
    stages = sk.stage_costs(gm, plan, costs)
    ends = list(accumulate(stage.replicas for stage in stages))
    for peak, end, stage in zip(sk.simulate_schedule(stages, "1f1b", 8).peaks, ends, stages, strict=True):
        assert peak <= min(memory[end - stage.replicas : end])


def test_the_parts_run_as_the_model_does():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return x

    model, x = Model(), torch.randn(2, 8)
    gm = sk.capture(model, x)
    plan = sk.plan(gm, Stages(4, replicas=(1, 2)))
    assert_same(model, sk.split(gm, plan), x)
    loaded = sk.Plan.from_dict(gm.graph, plan.to_dict())
    assert loaded.parts == plan.parts


def chain_of(*seconds):
    graph = fx.Graph()
    value = graph.placeholder("x")
    nodes = []
    for _ in seconds:
        value = graph.call_function(torch.neg, (value,))
        nodes.append(value)
    graph.output(value)
    gm = fx.GraphModule(nn.Module(), graph)
    sk.extend.propagate(gm, torch.ones(2))
    return gm, {node.name: price for node, price in zip(nodes, seconds, strict=True)}


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        ({"replicas": ()}, "SK302", "from 1 to 4"),
        ({"replicas": (1, 8)}, "SK302", "from 1 to 4, the devices"),
        ({"replicas": 0}, "SK302", "from 1 to 4"),
        ({"replicas": "2"}, "SK302", "from 1 to 4"),
        ({"replicas": (1, True)}, "SK302", "from 1 to 4"),
        ({"replicas": (1, 2), "memory": "least"}, "SK302", "in bytes"),
        ({"replicas": (1, 2), "microbatches": 4}, "SK302", "1f1b"),
        ({"replicas": (1, 2), "schedule": "zbv"}, "SK302", "Use gpipe, 1f1b or eager-1f1b"),
        ({"replicas": (1, 2), "schedule": "1f1b", "microbatches": 3}, "SK330", "icrobatch"),
        ({"replicas": (1, 2), "memory": [1, 2]}, "SK302", "one for each"),
    ],
)
def test_what_replicas_do_not_go_with_is_refused(asked, code, words):
    with pytest.raises(sk.SplitError, match=code) as refused:
        Stages(**{"n": 4, **asked})
    assert words in f"{refused.value.reason} {refused.value.remedy}"


def test_plans_with_replicas_are_not_compared_with_others():
    gm, seconds = chain_of(1.0, 1.0, 4.0)
    with pytest.raises(sk.errors.NoPlanError, match="several replicas"):
        sk.plan(gm, Best([Stages(3, replicas=(1, 2))]), Prices(seconds))
    best = sk.plan(gm, Best([Stages(3, replicas=(1, 2)), Stages(2)]), Prices(seconds))
    assert best.claim.value == 4.0
