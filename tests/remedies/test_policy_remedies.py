"""Remedies of errors about policies and what they are given (SK301, SK302, SK304)."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from carried import Remedy, refusal
from stackednet import Net, X, forward, joint
from torch import fx, nn
from torch.fx.passes.operator_support import create_op_support

import splitkit as sk
from splitkit.frontends.compile.compile import splitkit_backend
from splitkit.policies import (
    AroundOps,
    AtMarkers,
    Best,
    Budget,
    ByDevice,
    ByName,
    BySupport,
    Devices,
    Expert,
    MemoryBudget,
    MinCut,
    Pipeline,
    PlanPool,
    Precompute,
    Remat,
    SaveAll,
    SplitBackward,
    Stages,
)
from splitkit.studies.explanation.explain import explain
from splitkit.studies.frontier import Frontier


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (y.view(1, 4, 2, 8).transpose(1, 2) for y in self.q(x).chunk(3, -1))
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 16))


@cache
def attention():
    return sk.capture(nn.Sequential(Attention(), Attention()), X)


def split(policy):
    """Whether the parts that a policy makes compute what the graph computes."""
    gm, costs = forward()
    return torch.equal(sk.split(gm, policy, costs=costs)(X), gm(X))


def step(policy, costs=None):
    made, prices = joint()
    return made.split(policy, costs or prices)


def tokens(costs=None, **options):
    gm = attention()
    policy = Stages(2, **{"memory": "24GiB", "objective": "tokens"} | options)
    return sk.plan(gm, policy, costs=costs or sk.costs.roofline(gm, "h100")).claim.value > 0


def cached(cache):
    """Stages for tokens of a model whose nodes with a cache must be named."""
    gm, costs = forward()
    return sk.plan(gm, Stages(2, memory="24GiB", objective="tokens", cache=cache), costs=costs).claim.value > 0


def refuses(policy):
    return lambda: split(policy())


def a_node():
    return sk.analyze(forward()[0]).nodes[0].name


class NotAPlan:
    def __init__(self, result):
        self.result = result

    def assign(self, flow, costs):
        return self.result(flow)


SUPPORT = create_op_support(lambda submodules, node: node.op == "call_function")


def partitioner(support, **options):
    gm = forward()[0]
    return sk.CapabilityBasedPartitioner(gm, support, **options).propose_partitions()


SIMPLE = [
    # ------------------------------------------------------------ SK301: not a policy
    Remedy(
        "SK301",
        "Pass a policy such as splitkit.policies.Stages(4), a Plan, a mapping of node names to parts, or a function "
        "from a node to its part.",
        lambda: split(Net()),
        (
            lambda: split(Stages(4)),
            lambda: split(sk.plan(forward()[0], Stages(4))),
            lambda: split({n.name: 0 for n in sk.analyze(forward()[0]).nodes}),
            lambda: split(lambda node: 0),
        ),
    ),
    Remedy(
        "SK301",
        "Return splitkit.Plan.of({node: part}).",
        lambda: split(NotAPlan(lambda flow: 3)),
        lambda: split(NotAPlan(lambda flow: sk.Plan.of(dict.fromkeys(flow.nodes, 0)))),
    ),
    Remedy(
        "SK301",
        "Make one first: plan = splitkit.plan(gm, policy).",
        lambda: sk.report(forward()[0], 3),
        lambda: "layers" in str(sk.report(forward()[0], sk.plan(forward()[0], Stages(2)))),
    ),
    Remedy(
        "SK301",
        "Give sets of nodes of Dataflow.nodes, or a plan.",
        lambda: sk.stage_costs(forward()[0], [3]),
        (
            lambda: len(sk.stage_costs(forward()[0], [sk.analyze(forward()[0]).nodes])) == 1,
            lambda: len(sk.stage_costs(forward()[0], sk.plan(forward()[0], Stages(2)))) == 2,
        ),
    ),
    Remedy(
        "SK301",
        "Pass a policy such as Stages(4, memory='80GiB').",
        lambda: explain(sk.plan(forward()[0], Stages(2)), policy=3),
        lambda: explain(sk.plan(forward()[0], Stages(4)), policy=Stages(4, memory="80GiB")) is not None,
    ),
    # ------------------------------------------------------------ SK302: a bad parameter
    Remedy("SK302", "{...} must be {...}.", lambda: Stages(0), lambda: split(Stages(1))),
    Remedy(
        "SK302",
        "Use {...} or {...}.",
        lambda: sk.split(forward()[0], Stages(2), on_cycle="no"),
        lambda: sk.split(forward()[0], Stages(2), on_cycle="merge"),
    ),
    Remedy(
        "SK302",
        "A card limits the peak of everything that training holds: Budget(card='24GiB', optimizer='adamw').",
        lambda: Budget(0.5, card="24GiB", optimizer="adamw"),
        lambda: step(Budget(card="24GiB", optimizer="adamw")).plan,
    ),
    Remedy(
        "SK302",
        "Give True or False.",
        lambda: Budget(card="24GiB", optimizer="adamw", accumulate=3),
        lambda: step(Budget(card="24GiB", optimizer="adamw", accumulate=False)).plan,
    ),
    Remedy(
        "SK302",
        "Give 'peak' or 'saved'.",
        lambda: Budget(0.5, of="all"),
        (lambda: step(Budget(0.5, of="peak")).plan, lambda: step(Budget(0.5, of="saved")).plan),
    ),
    Remedy(
        "SK302",
        "Give 'peak' or 'saved'.",
        lambda: Frontier(joint()[0], of="all"),
        lambda: bool(Frontier(joint()[0], of="saved").points),
    ),
    Remedy(
        "SK302",
        "Give a splitkit.policies.PlanPool().",
        lambda: Budget(0.5, pool=3),
        lambda: step(Budget(0.5, pool=PlanPool())).plan,
    ),
    Remedy(
        "SK302",
        "List policies or plans: (SaveAll(), Remat(['aten.mm'])).",
        lambda: Budget(0.5, candidates=3),
        lambda: step(Budget(0.5, candidates=(SaveAll(), Remat(["aten.mm"])))).plan,
    ),
    Remedy(
        "SK302",
        "Offload trades time against the peak: give the bytes of the peak, a share, or a card.",
        lambda: Budget("least", offload="pcie5"),
        (
            lambda: step(Budget(0.5, offload="pcie5")).plan,
            lambda: step(Budget("1MiB", offload="pcie5")).plan,
            lambda: step(Budget(card="24GiB", optimizer="adamw", offload="pcie5")).plan,
        ),
    ),
    Remedy(
        "SK302",
        "Name the link: {...}offload='pcie5', host='8GiB').",
        lambda: Budget(0.5, host="8GiB"),
        lambda: step(Budget(0.5, offload="pcie5", host="8GiB")).plan,
    ),
    Remedy(
        "SK302",
        "Give the bytes that it has room for, or leave host= or offload= out.",
        lambda: Budget(0.5, offload="pcie5", host=0),
        (
            lambda: step(Budget(0.5, offload="pcie5", host="8GiB")).plan,
            lambda: step(Budget(0.5, offload="pcie5")).plan,
            lambda: step(Budget(0.5)).plan,
        ),
    ),
    Remedy(
        "SK302",
        "Give prices in seconds: costs=splitkit.costs.roofline(gm, 'h100').",
        lambda: joint()[0].split(Budget(0.5, offload="pcie5"), sk.costs.flops(joint()[0].graph_module)),
        lambda: joint()[0].split(Budget(0.5, offload="pcie5"), sk.costs.roofline(joint()[0].graph_module, "h100")),
    ),
    Remedy(
        "SK302",
        "Offload trades time against the peak: add of='peak'.",
        lambda: Frontier(joint()[0], of="saved", offload="pcie5"),
        lambda: bool(Frontier(joint()[0], of="peak", offload="pcie5", costs=joint()[1]).points),
    ),
    Remedy(
        "SK302",
        "Give 'fused', or nothing for the costs as they are.",
        lambda: Budget(0.5, price="cheap"),
        (lambda: step(Budget(0.5, price="fused")).plan, lambda: step(Budget(0.5)).plan),
    ),
    Remedy(
        "SK302",
        "Name one of {...}, or give a function of the parameters: lambda params: "
        "torch.optim.AdamW(params, foreach=False).",
        lambda: Budget(card="24GiB", optimizer="adamm"),
        (
            lambda: step(Budget(card="24GiB", optimizer="sgd")).plan,
            lambda: step(Budget(card="24GiB", optimizer=lambda params: torch.optim.AdamW(params, foreach=False))).plan,
        ),
    ),
    Remedy(
        "SK302",
        "Give bytes per second, from 0 to {...}, such as 1e11; or 'fused'.",
        lambda: MinCut(price=-1),
        (lambda: step(MinCut(price=1e11)).plan, lambda: step(MinCut(price="fused")).plan),
    ),
    Remedy(
        "SK302",
        "It takes a node and returns bytes of at least 0; infinite for values that may not be saved.",
        lambda: step(MinCut(size=lambda node: -1)),
        lambda: step(MinCut(size=lambda node: 0)).plan,
    ),
    Remedy(
        "SK302",
        "Give bytes per second, from 0 to {...}, such as 1e12; or None to defer products.",
        lambda: SplitBackward(price=-1),
        (lambda: step(SplitBackward(price=1e12)).plan, lambda: step(SplitBackward(price=None)).plan),
    ),
    Remedy(
        "SK302",
        "Give it a policy or plan with the parts 'forward' and 'backward', or ('forward', s) and ('backward', s) for "
        "stages s.",
        lambda: step(SplitBackward(policy=SplitBackward())),
        (lambda: step(SplitBackward(policy=SaveAll())).plan, lambda: step(SplitBackward(policy=Pipeline(2))).plan),
    ),
    Remedy(
        "SK302",
        "Give a policy object for a joint graph: Precompute(SaveAll()).",
        lambda: Precompute(3),
        lambda: step(Precompute(SaveAll())).plan,
    ),
    Remedy(
        "SK302",
        "Give 'transformer.h.*' or a list of such patterns; '*' matches all, and SaveAll() recomputes nothing.",
        lambda: Remat(modules=3),
        (
            lambda: step(Remat(modules="layers.*")).plan,
            lambda: step(Remat(modules=["layers.*"])).plan,
            lambda: step(Remat(modules="*")).plan,
            lambda: step(SaveAll()).plan,
        ),
    ),
    Remedy(
        "SK302",
        "Use it with splitkit.capture_joint(model, *inputs).split(policy), partition_fn, backend or apply; on the "
        "command line with `splitkit plan MODEL --what fwd-bwd`.",
        lambda: split(SaveAll()),
        (lambda: sk.capture_joint(Net(), X).split(SaveAll()).plan, lambda: sk.apply(Net(), SaveAll(), X)(X)),
    ),
    Remedy(
        "SK302",
        'Add schedule="1f1b".',
        lambda: Stages(2, microbatches=4),
        lambda: split(Stages(2, microbatches=4, schedule="1f1b")),
    ),
    Remedy(
        "SK302",
        'Add schedule="1f1b".',
        lambda: MemoryBudget("1MiB", microbatches=4),
        lambda: split(MemoryBudget("1MiB", microbatches=4, schedule="1f1b")),
    ),
    Remedy(
        "SK302",
        "Use {...}, which put one there.",
        lambda: MemoryBudget("1MiB", schedule="zbv"),
        (lambda: split(MemoryBudget("1MiB", schedule="1f1b")), lambda: split(MemoryBudget("1MiB", schedule="gpipe"))),
    ),
    Remedy(
        "SK302",
        "Give a size for each part.",
        lambda: MemoryBudget(["1MiB"], 2),
        lambda: split(MemoryBudget(["1MiB", "1MiB"], 2)),
    ),
    Remedy(
        "SK302",
        'Give the bytes of each device, or "80GiB".',
        lambda: MemoryBudget([]),
        (lambda: split(MemoryBudget([80000, 80000])), lambda: split(MemoryBudget("80GiB"))),
    ),
    Remedy(
        "SK302",
        "Give one size for all devices, or one for each.",
        lambda: Stages(2, memory=["1GiB"]),
        (lambda: split(Stages(2, memory="1GiB")), lambda: split(Stages(2, memory=["1GiB", "2GiB"]))),
    ),
    Remedy(
        "SK302",
        "Give the memory in bytes, or leave replicas out.",
        lambda: Stages(3, memory="least", replicas=(1, 2)),
        (lambda: split(Stages(3, memory=10**6, replicas=(1, 2))), lambda: split(Stages(3, memory="least"))),
    ),
    Remedy(
        "SK302",
        "Use {...}, or leave replicas out.",
        lambda: Stages(2, replicas=(1, 2), schedule="zbv", microbatches=4),
        (
            lambda: split(Stages(2, replicas=(1, 2), schedule="1f1b", microbatches=4)),
            lambda: split(Stages(2, schedule="zbv", microbatches=4)),
        ),
    ),
    Remedy(
        "SK302",
        "Use {...}, or None for inference.",
        lambda: Stages(2, optimizer="adamm"),
        (lambda: split(Stages(2, optimizer="sgd")), lambda: split(Stages(2, optimizer=None))),
    ),
    Remedy(
        "SK302",
        "Use 'tokens' or 'throughput', or leave it out.",
        lambda: Stages(2, objective="fast"),
        (tokens, lambda: split(Stages(2, objective="throughput")), lambda: split(Stages(2))),
    ),
    Remedy("SK302", 'Add memory="24GiB".', lambda: tokens(memory=None), lambda: tokens(memory="24GiB")),
    Remedy("SK302", 'Give sizes: memory="24GiB".', lambda: tokens(memory="least"), lambda: tokens(memory="24GiB")),
    Remedy(
        "SK302",
        "Leave one of them out.",
        lambda: tokens(schedule="1f1b", microbatches=4),
        (tokens, lambda: split(Stages(2, schedule="1f1b", microbatches=4, memory="24GiB"))),
    ),
    Remedy(
        "SK302",
        "Leave tokens out, or use objective='throughput', which takes them as given.",
        lambda: tokens(tokens=8),
        (tokens, lambda: sk.plan(attention(), Stages(2, memory="24GiB", tokens=8, objective="throughput"))),
    ),
    Remedy(
        "SK302",
        "Give a whole number, 0 or more.",
        lambda: Stages(2, tokens=-1),
        lambda: sk.plan(attention(), Stages(2, tokens=0)),
    ),
    Remedy(
        "SK302",
        "Give the prices of forward: sk.costs.roofline(gm, 'h100').",
        lambda: tokens(costs=sk.costs.training(sk.costs.roofline(attention(), "h100"), attention())),
        lambda: tokens(costs=sk.costs.roofline(attention(), "h100")),
    ),
    Remedy(
        "SK302",
        'Give cache={"node": bytes per token}, or load the model with sdpa attention.',
        lambda: cached(None),
        (lambda: cached({a_node(): 64}), tokens),
    ),
    Remedy(
        "SK302", 'Give a mapping: cache={"node": bytes per token}.', lambda: cached(3), lambda: cached({a_node(): 64})
    ),
    Remedy(
        "SK302", 'Give cache={"node": bytes per token}.', lambda: cached({a_node(): 0}), lambda: cached({a_node(): 64})
    ),
    Remedy("SK302", "Name nodes of the graph.", lambda: cached({"nosuch": 64}), lambda: cached({a_node(): 64})),
    Remedy(
        "SK302",
        "Give a whole number of bytes per token.",
        lambda: cached({a_node(): 1.5}),
        lambda: cached({a_node(): 64}),
    ),
    Remedy(
        "SK302", 'List at least one: ["h200", "h200"].', lambda: Devices([]), lambda: split(Devices(["h200", "h200"]))
    ),
    Remedy("SK302", "Name it.", lambda: Devices({None: "h200"}), lambda: split(Devices({"first": "h200"}))),
    Remedy(
        "SK302",
        "Use {...}.",
        lambda: Devices(["h200"], objective="cheap"),
        lambda: split(Devices(["h200"], objective="latency")),
    ),
    Remedy(
        "SK302",
        "Use 1, or None for any number.",
        lambda: Devices(["h200"], pieces=2),
        (lambda: split(Devices(["h200"], pieces=1)), lambda: split(Devices(["h200"], pieces=None))),
    ),
    Remedy(
        "SK302",
        "Use a whole number >= 1.",
        lambda: Devices(["h200"], objective="latency", pieces=0),
        lambda: split(Devices(["h200"], objective="latency", pieces=2)),
    ),
    Remedy(
        "SK302",
        "Leave one of them out.",
        lambda: Devices(["h200"], objective="latency", tokens=3),
        (
            lambda: split(Devices(["h200"], objective="latency")),
            lambda: sk.plan(attention(), Devices(["h200"], tokens=3)),
        ),
    ),
    Remedy(
        "SK302",
        "List patterns of module paths: ['transformer.h.*'].",
        lambda: Devices(["h200"], together=3),
        lambda: split(Devices(["h200"], together=["layers.*"])),
    ),
    Remedy(
        "SK302",
        "Give a mapping of patterns of module paths: {'lm_head': [0]}.",
        lambda: Devices(["h200"], only=3),
        lambda: split(Devices(["h200"], only={"layers.0": [0]})),
    ),
    Remedy(
        "SK302",
        "List devices: [{...}].",
        lambda: Devices(["h200"], only={"layers.0": []}),
        lambda: split(Devices(["h200"], only={"layers.0": [0]})),
    ),
    Remedy(
        "SK302",
        "Devices are {...}.",
        lambda: Devices(["h200"], only={"layers.0": [7]}),
        lambda: split(Devices(["h200"], only={"layers.0": [0]})),
    ),
    Remedy(
        "SK302",
        "Give a function of a node: lambda node: 'cuda:0'.",
        lambda: ByDevice(3),
        lambda: split(ByDevice(lambda node: "cuda:0")),
    ),
    Remedy(
        "SK302",
        "Return a torch.device, a name such as 'cuda:1', or None.",
        lambda: split(ByDevice(lambda node: 3.5)),
        (
            lambda: split(ByDevice(lambda node: torch.device("cpu"))),
            lambda: split(ByDevice(lambda node: "cuda:1")),
            lambda: split(ByDevice(lambda node: None)),
        ),
    ),
    Remedy(
        "SK302",
        "Map patterns of module paths to parts: {'transformer.h.*': 1}.",
        lambda: ByName(3),
        lambda: split(ByName({"layers.*": 1, "*": 1})),
    ),
    Remedy(
        "SK302",
        "Use 'beginning' or 'end'.",
        lambda: split(AtMarkers({"layers.2": "middle"})),
        (lambda: split(AtMarkers({"layers.2": "beginning"})), lambda: split(AtMarkers({"layers.2": "end"}))),
    ),
    Remedy(
        "SK302",
        "Use 'parent' or 'parts'.",
        lambda: BySupport(SUPPORT, unsupported="nowhere"),
        (
            lambda: split(BySupport(SUPPORT, unsupported="parent")),
            lambda: split(BySupport(SUPPORT, unsupported="parts")),
        ),
    ),
    Remedy(
        "SK302",
        "List at least one, or give a number of stages.",
        lambda: Best([]),
        (lambda: split(Best([Stages(2)])), lambda: split(Best(2))),
    ),
    Remedy(
        "SK302",
        'Give a number of stages, numbers of blocks >= 1 ([3, 3, 4, 2]), or module paths (["h.3", "h.6"]).',
        lambda: Expert([]),
        (
            lambda: split(Expert(3)),
            lambda: split(Expert([2, 2, 1, 1])),
            lambda: split(Expert(["layers.3", "layers.5"])),
        ),
    ),
    Remedy("SK302", "Blocks are {...}.", lambda: split(Expert([1, 1])), lambda: split(Expert([3, 3]))),
    Remedy(
        "SK302",
        "Name a later module.",
        lambda: split(Expert(["layers.3", "layers.3"])),
        lambda: split(Expert(["layers.3", "layers.4"])),
    ),
    Remedy(
        "SK302",
        "Use True or False.",
        lambda: Pipeline(2, recompute=3),
        (lambda: step(Pipeline(2, recompute=True)).plan, lambda: step(Pipeline(2, recompute=False)).plan),
    ),
    Remedy(
        "SK302",
        "A rule answers for a node. A function that is meant as an op goes in a list: [torch.mm].",
        lambda: split(AroundOps(torch.mm)),
        lambda: split(AroundOps([torch.mm])),
    ),
    Remedy(
        "SK302",
        "List ops of torch.ops, functions, module classes, or their names: ['aten.mm', torch.relu].",
        lambda: split(AroundOps([3])),
        lambda: split(AroundOps(["aten.tanh", torch.relu])),
    ),
    Remedy(
        "SK302",
        "Give an object with is_node_supported(submodules, node)",
        lambda: partitioner(3),
        lambda: partitioner(SUPPORT),
    ),
    Remedy(
        "SK302",
        '{...} lists qualified names of functions, such as ["torch.ops.aten.permute"].',
        lambda: partitioner(SUPPORT, non_compute_ops="aten"),
        lambda: partitioner(SUPPORT, non_compute_ops=["torch.ops.aten.permute"]),
    ),
    Remedy(
        "SK302", "Choose one of {...}.", lambda: sk.backend(0.5, inner="nosuch"), lambda: sk.backend(0.5, inner="eager")
    ),
    Remedy(
        "SK302",
        "Its only option is inner ('eager', 'aot_eager', 'inductor'). For another budget or policy, write "
        "backend=splitkit.backend('2GiB').",
        lambda: splitkit_backend(forward()[0], [X], options={"budget": 3}),
        (
            lambda: torch.allclose(
                torch.compile(net := Net(), backend="splitkit", options={"inner": "eager"})(X), net(X)
            ),
            lambda: torch.allclose(torch.compile(net := Net(), backend=sk.backend("2GiB"))(X), net(X)),
        ),
    ),
    # ------------------------------------------------------------ SK304: a name that matches nothing
    Remedy(
        "SK304",
        "Modules near it: {...}.",
        lambda: split(ByName({"layer.0": 1})),
        lambda: split(ByName({"layers.*": 1, "*": 1})),
    ),
]


@pytest.mark.parametrize("remedy", SIMPLE, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy):
    remedy.carry_out()


def test_a_graph_without_module_paths():
    gm = fx.symbolic_trace(lambda x: (x + 1) * 2)
    with refusal("SK304", "The graph carries no module paths."):
        sk.plan(gm, ByName({"layers": 1}))
    assert sk.plan(forward()[0], ByName({"layers.0": 0, "*": 1}))
