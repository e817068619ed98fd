"""Facts are found once: a verb analyses its graph once, and looks once at what autograd keeps, if it plans training."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import splitkit as sk
from splitkit.graph.dataflow import analyze
from splitkit.memory.saved_storages import activations
from splitkit.policies import Best, Devices, Expert, MemoryBudget, RoundRobin, Stages
from splitkit.search.request import StageRequest
from splitkit.search.stages.stage_search import StagePlanner
from splitkit.solvers.placement.stages.contiguous import contiguous

MEMORY = "1MiB"
LOADED = (sk.plan, sk.split, sk.split_module, sk.report, sk.stage_costs, sk.sweep, sk.costs.measured)
"""Named so that all modules that call `analyze` are loaded before it is counted."""


class Masked(nn.Module):
    """Layers that all read a mask: searches with links compare sending it with making it again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.seen.exp().cumsum(0).sin()
        for layer in self.layers:
            x = layer(x) * mask
        return x


@pytest.fixture
def gm() -> fx.GraphModule:
    return sk.capture(Masked(), torch.randn(2, 8))


def counted(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> list[object]:
    """Called wherever the library calls ``function``; one entry for each time."""
    calls: list[object] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        return function(*args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith("splitkit") and vars(module).get(function.__name__) is function:
            monkeypatch.setattr(module, function.__name__, call)
    return calls


def computed(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


WITHOUT_BACKWARD = {
    "a mapping": lambda gm: sk.plan(gm, RoundRobin(2)),
    "work": lambda gm: sk.plan(gm, Stages(2)),
    "links": lambda gm: sk.plan(gm, Stages(2, links="pcie4")),
    "the best without memory": lambda gm: sk.plan(gm, Best(2, links="pcie4")),
    "a split": lambda gm: sk.split(gm, Stages(2)),
    "a split with links": lambda gm: sk.split(gm, Stages(2, links="pcie4")),
    "torch's split_module": lambda gm: sk.split_module(gm, gm, Stages(2)),
    "a report": lambda gm: sk.report(gm, sk.Plan.of({})),
    "stages in memory": lambda gm: sk.plan(gm, Stages(2, links="pcie4", memory=MEMORY)),
    "devices": lambda gm: sk.plan(gm, Devices(["h200", "h200"], links="pcie4")),
    "latency": lambda gm: sk.plan(gm, Devices(["h200", "h200"], links="pcie4", objective="latency")),
    "the best of several": lambda gm: sk.plan(
        gm, Best([Stages(2, memory=MEMORY), MemoryBudget(MEMORY), Expert(2)], memory=MEMORY)
    ),
}
WITH_BACKWARD = {
    "a schedule": lambda gm: sk.plan(gm, Stages(2, "1f1b", links="pcie4")),
    "a schedule in memory": lambda gm: sk.plan(gm, Stages(2, "1f1b", links="pcie4", memory=MEMORY)),
    "a split with a schedule": lambda gm: sk.split(gm, Stages(2, "1f1b", links="pcie4")),
    "devices in training": lambda gm: sk.plan(gm, Devices(["h200", "h200"], links="pcie4", optimizer="adam")),
    "devices that differ": lambda gm: sk.plan(gm, Devices(["h200", "a100"], links="pcie4", optimizer="sgd")),
    "a memory budget": lambda gm: sk.plan(gm, MemoryBudget("4KiB", schedule="1f1b")),
    "a memory budget that does not fit": lambda gm: sk.plan(gm, MemoryBudget("1KiB", schedule="1f1b")),
    "the best": lambda gm: sk.plan(gm, Best(2, schedule="1f1b", links="pcie4", memory=MEMORY)),
    "stage costs": lambda gm: sk.stage_costs(gm, sk.Plan.of(dict.fromkeys(computed(gm), 0)), sk.costs.flops(gm)),
    "a sweep": lambda gm: sk.sweep(
        gm, sk.costs.flops(gm), stages=(2, 3), microbatches=(4,), schedules=("gpipe", "1f1b"), memory="5KiB"
    ),
}


def tried(verb: Callable[[fx.GraphModule], object], gm: fx.GraphModule) -> None:
    try:
        verb(gm)
    except sk.SplitError as error:
        assert error.code in ("SK303", "SK208")


@pytest.mark.parametrize("verb", WITHOUT_BACKWARD.values(), ids=WITHOUT_BACKWARD)
def test_a_verb_analyses_its_graph_once(gm, verb, monkeypatch):
    analysed, kept = counted(monkeypatch, analyze), counted(monkeypatch, activations)
    tried(verb, gm)
    assert (len(analysed), len(kept)) == (1, 0)


@pytest.mark.parametrize("verb", WITH_BACKWARD.values(), ids=WITH_BACKWARD)
def test_a_verb_looks_once_at_what_autograd_keeps(gm, verb, monkeypatch):
    analysed, kept = counted(monkeypatch, analyze), counted(monkeypatch, activations)
    tried(verb, gm)
    assert (len(analysed), len(kept)) == (1, 2 if verb is WITH_BACKWARD["devices that differ"] else 1)  # two kernels


def test_facts_serve_as_a_graph_for_prices_and_are_not_found_again(gm, monkeypatch):
    flow = sk.analyze(gm)
    analysed = counted(monkeypatch, analyze)
    rooflines = [sk.costs.roofline(flow, device) for device in ("h200", "a100")]
    others = [sk.costs.flops(flow), sk.costs.unit(flow), sk.costs.fused(flow), sk.costs.default(flow)]
    trained = sk.costs.training(rooflines[0], flow)
    assert not analysed and all(costs.gm is gm for costs in (*rooflines, *others, trained))
    counters = [costs.counter for costs in (*rooflines, others[0], others[2], others[3], trained)]
    assert all(counter is counters[0] for counter in counters)
    assert rooflines[0].seconds(flow.nodes[0]) == sk.costs.roofline(gm, "h200").seconds(flow.nodes[0])


def test_measured_prices_take_facts(gm):
    measured = sk.costs.measured(sk.analyze(gm), (torch.randn(2, 8),), min_run_time=0.001)
    assert measured.gm is gm and measured.seconds(sk.analyze(gm).nodes[-1]) > 0


def test_facts_that_depend_on_what_is_trained_are_found_anew_when_that_changes(gm):
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    before = sk.stage_costs(flow, [flow.nodes], costs)
    assert sk.stage_costs(flow, [flow.nodes], costs) == before
    for parameter in gm.parameters():
        parameter.requires_grad_(False)
    (frozen,) = sk.stage_costs(flow, [flow.nodes], costs)
    assert frozen.backward == 0 < before[0].backward and frozen.saved_bytes < before[0].saved_bytes


def test_placements_that_are_the_same_are_weighed_once(gm, monkeypatch):
    weighed: list[bytes] = []

    def solver(problem: Any, **options: Any) -> Any:
        prefer = options.pop("prefer")
        own: list[bytes] = []

        def key(device: Any, order: tuple[int, ...]) -> tuple[float, ...]:
            own.append(device.tobytes())
            return prefer(device, order)

        found = contiguous(problem, prefer=key, **options)
        assert len(own) == len(set(own))
        weighed.extend(own)
        return found

    demand = StageRequest(None, sk.analyze(gm), sk.costs.unit(gm), "1f1b")
    monkeypatch.setattr("splitkit.search.stages.stage_search.contiguous", solver)
    StagePlanner(demand, (0, 1, 2)).plan()
    assert weighed


def _costs_of_two_stages(flow: sk.extend.Dataflow) -> str:
    plan = sk.plan(flow.root, sk.policies.Stages(2))
    return repr(sk.stage_costs(flow, plan, sk.costs.flops(flow)))


def test_facts_first_asked_for_in_inference_mode_are_the_same():
    gm = sk.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4))
    right, flow = _costs_of_two_stages(analyze(gm)), analyze(gm)
    with torch.inference_mode():
        assert _costs_of_two_stages(flow) == right
    assert _costs_of_two_stages(flow) == right


def test_facts_are_found_anew_for_other_kernels_of_attention():
    class Attention(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    gm = sk.capture(nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 8)), torch.randn(2, 4, 16, 8))
    right, flow = _costs_of_two_stages(analyze(gm)), analyze(gm)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert _costs_of_two_stages(flow) != right
    assert _costs_of_two_stages(flow) == right
