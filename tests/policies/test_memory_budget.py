"""`MemoryBudget`: the fewest parts that fit, compared with brute force."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pytest
import torch
from campaigns import few_of_many, these_first
from capturedmodels import captured_example
from hypothesis import strategies as st
from torch import nn

import splitkit as sk
from splitkit.pipeline.simulate import StageCosts, simulate_schedule
from splitkit.pipeline.stage_prices import StagePrices, stage_costs
from splitkit.policies import MemoryBudget

trained = partial(MemoryBudget, optimizer="adam")


class Net(nn.Module):
    """Layers of any widths, each of which reads what the draw says of the values before."""

    def __init__(self, widths, reads, frozen):
        super().__init__()
        self.reads = reads
        self.layers = nn.ModuleList(
            nn.Linear(sum(([3, *widths])[r] for r in read), width) for read, width in zip(reads, widths, strict=True)
        )
        for layer, still in zip(self.layers, frozen, strict=True):
            layer.requires_grad_(not still)

    def forward(self, x):
        values = [x]
        for layer, read in zip(self.layers, self.reads, strict=True):
            values.append(torch.tanh(layer(torch.cat([values[r] for r in read], -1))))
        return values[-1].sum()


@st.composite
def nets(draw):
    count = draw(st.integers(1, 3))
    widths = [draw(st.sampled_from([1, 4, 16])) for _ in range(count)]
    reads = [sorted({i, *draw(st.lists(st.integers(0, i), max_size=1))}) for i in range(count)]
    frozen = [draw(st.booleans()) for _ in range(count)]
    return Net(widths, reads, frozen)


def peaks_of(prices, parts, flights):
    costs = prices.of(parts)
    return [
        c.parameter_bytes + c.gradient_bytes + c.optimizer_bytes + f * c.saved_bytes + c.temporary_bytes
        for c, f in zip(costs, flights, strict=True)
    ]


def traffic_of(costs):
    sent = sum(c.activation_bytes for c in costs)
    return sent + sum(c.input_gradient_bytes for c in costs)


def flights_of(policy, count):
    if policy.schedule is None:
        return (1,) * count
    run = simulate_schedule([StageCosts(1.0, 1.0)] * count, policy.schedule, policy.microbatches or 2 * count)
    return run.in_flight_of_stages


def chains(flow, count):
    """Yield all ways to cut the graph's own order into ``count`` parts."""
    nodes = flow.nodes
    for cuts in combinations(range(1, len(nodes)), count - 1):
        yield [nodes[a:b] for a, b in zip((0, *cuts), (*cuts, len(nodes)), strict=True)]


def fitting(prices, policy, flow, count, memory):
    """The least traffic of chains of so many parts that fit; None if none does."""
    flights = flights_of(policy, count)
    fits = (c for c in chains(flow, count) if all(p <= memory for p in peaks_of(prices, c, flights)))
    return min((traffic_of(prices.of(c)) for c in fits), default=None)


def convex_fewest(prices, flow, policy, memory):
    """The fewest parts over all orders of the graph, by its closed sets of nodes: any convex chain counts."""
    nodes = flow.nodes
    before = {n: {*flow.inputs(n)} for n in nodes}
    closed = [frozenset()]
    for node in nodes:
        closed += [s | {node} for s in closed if before[node] <= s]
    whole, reached = frozenset(nodes), {frozenset()}
    for count in range(1, len(nodes) + 1):
        reached = {
            larger
            for larger in closed
            for s in reached
            if s < larger and stretch_peak(prices, nodes, s, larger) <= memory
        }
        if whole in reached:
            return count
    return None


def stretch_peak(prices, nodes, smaller, larger):
    groups = [smaller, larger - smaller, {n for n in nodes if n not in larger}]
    number = 1 if smaller else 0
    parts = [[n for n in nodes if n in group] for group in groups if group]
    return peaks_of(prices, parts, (1,) * len(parts))[number]


@few_of_many(
    6,
    25,
    nets(),
    st.floats(0.2, 1.1),
    st.sampled_from(["adam", "sgd", None]),
    st.sampled_from([None, "1f1b", "gpipe"]),
)
def test_the_fewest_parts_are_those_of_brute_force(model, share, optimizer, schedule):
    gm = sk.capture(model, torch.randn(2, 3))
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    schedule = schedule if optimizer else None
    prices = StagePrices(flow, costs, optimizer)
    memory = int(share * peaks_of(prices, [flow.nodes], (1,))[0])
    policy = MemoryBudget(memory, schedule=schedule, optimizer=optimizer)
    expected = next(
        ((c, t) for c in range(1, len(flow.nodes) + 1) if (t := fitting(prices, policy, flow, c, memory)) is not None),
        None,
    )
    try:
        plan = policy.assign(flow, costs)
    except sk.SplitError as error:
        assert error.code == "SK303"
        assert expected is None
        return
    found = prices.of(plan)
    assert all(p <= memory for p in peaks_of(prices, plan_parts(flow, plan), flights_of(policy, len(found))))
    assert plan.claim.value == len(found) == len(plan.parts)
    if expected is not None:  # other orders may need fewer parts, or send less
        assert (len(found), traffic_of(found)) <= expected
    if schedule is None and optimizer != "sgd":
        fewest = convex_fewest(prices, flow, policy, memory)
        assert plan.claim.bound == fewest == len(found)


class Towers(nn.Module):
    """Two inputs go through the same layers, a wide one among them, and meet at the end."""

    def __init__(self, width, wide):
        super().__init__()
        self.first, self.last = nn.Linear(width, wide * width), nn.Linear(wide * width, width)
        self.one = nn.Linear(width, width)

    def forward(self, x, y):
        a, b = (self.last(torch.tanh(self.first(v))) for v in (x, y))
        return (self.one(a) - b).pow(2).sum()


@pytest.mark.parametrize(("width", "wide", "batch"), these_first([(20, 3, 30)], [(8, 2, 5), (4, 6, 16)]))
def test_two_towers_need_no_more_parts_than_any_order_does(width, wide, batch):
    """Nine orders give three parts, but two fit if they alternate between nodes of the towers."""
    gm = sk.capture(Towers(width, wide), torch.randn(batch, width), torch.randn(batch, width))
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    prices = StagePrices(flow, costs, "adam")
    pairs = [[[n for n in flow.nodes if n in half], [n for n in flow.nodes if n not in half]] for half in halves(flow)]
    memory = min(max(peaks_of(prices, parts, (1, 1))) for parts in pairs)
    plan = sk.plan(gm, trained(memory), costs)
    assert len(plan.parts) == 2 and plan.claim.optimal
    assert max(peaks_of(prices, plan_parts(flow, plan), (1, 1))) == memory
    two = sk.plan(gm, trained(memory, parts=2), costs)
    fits = [parts for parts in pairs if max(peaks_of(prices, parts, (1, 1))) <= memory]
    assert two.claim.value == min(traffic_of(prices.of(parts)) for parts in fits) and two.claim.optimal
    less = sk.plan(gm, trained(memory - 1), costs)
    assert less.claim.bound >= 3


def halves(flow):
    """Return the closed sets of nodes, except the empty and the full one."""
    closed = [frozenset()]
    for node in flow.nodes:
        closed += [s | {node} for s in closed if s.issuperset(flow.inputs(node))]
    return [s for s in closed if 0 < len(s) < len(flow.nodes)]


def plan_parts(flow, plan):
    return [[n for n in flow.nodes if plan.home(n) == part] for part in range(len(plan.parts))]


@few_of_many(6, 10, nets(), st.integers(2, 4), st.floats(0.4, 1.0))
def test_a_number_of_parts_with_the_least_traffic(model, count, share):
    gm = sk.capture(model, torch.randn(2, 3))
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    if len(flow.nodes) < count:
        return
    prices = StagePrices(flow, costs)
    memory = int(share * peaks_of(prices, [flow.nodes], (1,))[0])
    policy = trained(memory, parts=count)
    expected = fitting(prices, policy, flow, count, memory)
    try:
        plan = policy.assign(flow, costs)
    except sk.SplitError as error:
        assert error.code == "SK303"
        assert expected is None
        return
    assert len(plan.parts) == count
    assert plan.claim.objective == "traffic"
    assert plan.claim.bound <= plan.claim.value == traffic_of(prices.of(plan))
    assert expected is None or plan.claim.value <= expected


@pytest.fixture(scope="module")
def gpt2():
    gm = captured_example("gpt2", layers=3, width=32, heads=2, vocab=200, batch=4, seq=64).graph
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    return gm, flow, costs


def whole_of(flow, costs):
    return peaks_of(StagePrices(flow, costs), [flow.nodes], (1,))[0]


def test_a_model_in_parts_that_run(gpt2):
    gm, flow, costs = gpt2
    memory = int(0.4 * whole_of(flow, costs))
    plan = sk.plan(gm, trained(memory), costs)
    parts = stage_costs(flow, plan, costs)
    assert max(peaks_of(StagePrices(flow, costs), plan_parts(flow, plan), (1,) * len(parts))) <= memory
    assert 3 <= len(parts) <= 4
    assert plan.note.startswith(
        f"{len(parts)} parts, at least {plan.claim.bound:.0f} needed; training with adam; part "
    )
    assert len(sk.split(gm, plan).parts) == len(parts)
    assert plan == sk.plan(gm, trained(memory), costs)


def test_what_all_fits_is_one_part_and_proven(gpt2):
    gm, flow, costs = gpt2
    plan = sk.plan(gm, trained(whole_of(flow, costs)), costs)
    assert len(plan.parts) == 1
    assert plan.claim.optimal


def test_early_stages_hold_more_microbatches(gpt2):
    gm, flow, costs = gpt2
    memory = int(0.6 * whole_of(flow, costs))
    policy = trained(memory, schedule="1f1b", microbatches=16)
    plan, plain = sk.plan(gm, policy, costs), sk.plan(gm, trained(memory), costs)
    assert len(plan.parts) > len(plain.parts)
    flights = flights_of(policy, len(plan.parts))
    assert flights == tuple(range(len(plan.parts), 0, -1))
    assert max(peaks_of(StagePrices(flow, costs), plan_parts(flow, plan), flights)) <= memory


def test_devices_of_different_sizes(gpt2):
    gm, flow, costs = gpt2
    whole = whole_of(flow, costs)
    sizes = [int(0.45 * whole), int(0.9 * whole), whole]
    plan = sk.plan(gm, trained(sizes), costs)
    peaks = peaks_of(StagePrices(flow, costs), plan_parts(flow, plan), (1,) * len(plan.parts))
    assert len(plan.parts) == 2
    assert all(p <= size for p, size in zip(peaks, sizes, strict=False))


def test_inference_needs_less(gpt2):
    gm, flow, costs = gpt2
    memory = int(0.4 * whole_of(flow, costs))
    assert len(sk.plan(gm, MemoryBudget(memory, optimizer=None), costs).parts) == 1


def test_a_node_that_fits_nowhere_is_named_and_what_would_do(gpt2):
    gm, _, costs = gpt2
    with pytest.raises(sk.SplitError, match="SK303") as raised:
        sk.plan(gm, trained("700kB"), costs)
    (node,) = raised.value.nodes
    assert f"{node} in " in str(raised.value)
    text = str(raised.value)
    needs = [int(word.split(",")[0]) for word in text.split("MemoryBudget(")[1:]]
    assert len(needs) == 4  # for 1, 2, 4 and 8 parts
    for count, need in zip((1, 2, 4, 8), needs, strict=True):
        assert len(sk.plan(gm, trained(need, parts=count), costs).parts) == count
    assert "inference, without optimizer and schedule, would fit in" in text


def test_too_few_devices_say_what_would_do(gpt2):
    gm, flow, costs = gpt2
    memory = int(0.5 * whole_of(flow, costs))
    with pytest.raises(sk.SplitError, match="SK303: no plan of up to 2 parts was found that fits 2 devices") as raised:
        sk.plan(gm, trained([memory, memory]), costs)
    assert "3 parts of" in str(raised.value)
    need = int(str(raised.value).split("MemoryBudget(")[1].split(",")[0])
    assert len(sk.plan(gm, trained([need, need]), costs).parts) == 2
    with pytest.raises(sk.SplitError, match="SK303"):
        sk.plan(gm, trained([int(0.98 * need)] * 2), costs)


def test_devices_that_cannot_hold_the_parts_in_any_order_are_counted(gpt2):
    gm, flow, costs = gpt2
    memory = int(0.4 * whole_of(flow, costs))
    reason = "SK303: the parts together need the memory of 3 such devices at least, and there are 2"
    with pytest.raises(sk.SplitError, match=reason) as raised:
        sk.plan(gm, trained([memory, memory]), costs)
    count = int(str(raised.value).split(" parts of")[0].split()[-1])
    assert count >= 3 and len(sk.plan(gm, trained([memory] * count), costs).parts) == count


LAYERS = sk.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), torch.ones(1, 4))
"""Six ops, each with 80 bytes of weights and 16 of result."""
EACH_TAKES = "SK303: linear_1 in 1 takes 432 B at least, and a device has 200 B, for training with adam"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"memory": [300, 200], "parts": 2}, "SK303: no plan of 2 parts was found that fits 2 devices, for inference"),
        ({"memory": "287B", "parts": 2}, "SK303: no plan of 2 parts was found that fits 287 B, for inference"),
        ({"memory": 200, "schedule": "1f1b"}, EACH_TAKES),
    ],
)
def test_what_does_not_fit_is_said_with_the_devices_and_the_purpose(asked, said):
    with pytest.raises(sk.SplitError) as refused:
        sk.plan(LAYERS, MemoryBudget(**asked), sk.costs.unit(LAYERS))
    assert str(refused.value).splitlines()[0] == said


def test_more_parts_do_not_help_where_each_holds_more(gpt2):
    gm, flow, costs = gpt2
    memory = int(0.3 * whole_of(flow, costs))
    with pytest.raises(sk.SplitError, match="SK303.*with gpipe") as raised:
        sk.plan(gm, trained(memory, schedule="gpipe", microbatches=64), costs)
    assert "one microbatch at a time would fit in" in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "eighty"}, "eighty"),
        ({"memory": -1}, "-1"),
        ({"memory": 1.5}, "1.5"),
        ({"memory": None}, "None"),
        ({"memory": []}, r"\[\]"),
        ({"memory": ["1GiB", None]}, "None"),
        ({"memory": ["1GiB"], "parts": 2}, "2 parts for 1 devices"),
        ({"memory": 1, "parts": 0}, "parts=0"),
        ({"memory": 1, "microbatches": 4}, "without a schedule"),
        ({"memory": 1, "schedule": "1f1b", "microbatches": True}, "microbatches=True"),
        ({"memory": 1, "schedule": "interleaved-1f1b"}, "several parts on one device"),
        ({"memory": 1, "optimizer": "lion"}, "'lion'"),
    ],
)
def test_bad_parameters(arguments, message):
    with pytest.raises(sk.SplitError, match=f"SK302.*{message}"):
        MemoryBudget(**arguments)


def test_bad_schedules_and_graphs(gpt2):
    gm, _, costs = gpt2
    with pytest.raises(sk.SplitError, match="SK330"):
        trained(1, schedule="2f2b")
    with pytest.raises(sk.SplitError, match="SK303.*nodes to place"):
        sk.plan(gm, trained(1, parts=10_000), costs)
