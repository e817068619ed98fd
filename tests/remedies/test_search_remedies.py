"""Remedies of searches that find no plan (SK303), of what they are given (SK302, SK304) and of kept casts (SK217)."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from carried import Remedy, refusal
from stackednet import X, forward, joint
from torch import fx, nn

import splitkit as sk
from splitkit import _torch
from splitkit.graph.dataflow import module_path
from splitkit.policies import AroundOps, Best, Devices, MemoryBudget, Pipeline, Stages
from splitkit.studies.sweep import TrainingSweeper

TURNS = {"layers.0": [0], "layers.1": [1], "layers.2": [0], "layers.3": [1], "layers.4": [0]}
"""Layers that take turns on two devices: the first needs three pieces, the second two."""
BOTH = {**TURNS, "layers.1": [0, 1], "layers.3": [0, 1]}
"""The same, with the layers that stand between on any of them."""


class Visits:
    """Parts that are visits to two devices: one to each, or two."""

    def __init__(self, count):
        self.keys = [(device, visit) for visit in range(count) for device in range(2)]

    def assign(self, flow, costs):
        share = len(flow.nodes) // len(self.keys) + 1
        return sk.Plan.of({n: self.keys[i // share] for i, n in enumerate(flow.nodes)})


def planned(policy):
    """Whether the split by a policy computes what the graph computes."""
    gm, costs = forward()
    return torch.equal(sk.split(gm, policy, costs=costs)(X), gm(X))


def placed(only, **options):
    """Whether each of two devices runs what it alone is to run, and both compute what the graph computes."""
    gm, costs = forward()
    plan = sk.plan(gm, Devices(["h100", "h100"], only=only, **options), costs)
    for node in plan:
        layer = ".".join(module_path(node).split(".")[:2])
        key = plan.home(node)
        assert (key[0] if isinstance(key, tuple) else key) in only.get(layer, [0, 1])
    return torch.equal(sk.split(gm, plan)(X), gm(X))


@cache
def attention():
    class Layer(nn.Module):
        def forward(self, x):
            q = x.view(1, 4, 2, 8).transpose(1, 2)
            return x + nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(4, 16)

    gm = sk.capture(nn.Sequential(Layer(), nn.Linear(16, 16), Layer()), X)
    return gm, sk.costs.roofline(gm, "h100")


def cached(policy):
    gm, costs = attention()
    return torch.equal(sk.split(gm, policy, costs=costs)(X), gm(X))


def attends():
    return {n.name: 64 for n in sk.analyze(attention()[0]).nodes if "attention" in n.name}


SIMPLE = [
    Remedy(
        "SK302",
        'Add objective="throughput".',
        lambda: cached(Stages(2, tokens=8)),
        lambda: cached(Stages(2, tokens=8, objective="throughput")),
    ),
    Remedy(
        "SK302",
        'Stages needs objective="tokens" or "throughput", and Devices needs tokens.',
        lambda: cached(Stages(2, cache=attends())),
        (
            lambda: cached(Stages(2, cache=attends(), objective="tokens", memory="24GiB")),
            lambda: cached(Stages(2, cache=attends(), objective="throughput")),
            lambda: cached(Devices(["h100", "h100"], cache=attends(), tokens=8)),
        ),
    ),
    Remedy(
        "SK303",
        "Give one size.",
        lambda: planned(Best([Stages(3)], memory=["1GiB", "1GiB"])),
        lambda: planned(Best([Stages(3)], memory="1GiB")),
    ),
    Remedy(
        "SK303",
        "Leave replicas out.",
        lambda: planned(Best([Stages(4, replicas=(2,))])),
        lambda: planned(Best([Stages(4)])),
    ),
    Remedy(
        "SK303",
        "Use one part per device.",
        lambda: planned(Best([Visits(2)], schedule="1f1b")),
        lambda: planned(Best([Visits(1)], schedule="1f1b")),
    ),
    Remedy(
        "SK303",
        "Give {...}: a device then runs several pieces; or let more devices run what stands between.",
        lambda: placed(TURNS),
        (lambda: placed(TURNS, pieces=None), lambda: placed(BOTH)),
    ),
    Remedy(
        "SK303",
        "Give {...}: a device then runs several pieces; or let more devices run what stands between.",
        lambda: placed(TURNS, objective="latency"),
        (lambda: placed(TURNS, objective="latency", pieces=3), lambda: placed(BOTH, objective="latency")),
    ),
    Remedy(
        "SK303",
        "Let `only` name more devices, or allow more `pieces`.",
        lambda: placed(TURNS, objective="latency", pieces=2),
        (
            lambda: placed(TURNS, objective="latency", pieces=3),
            lambda: placed({**TURNS, "layers.3": [0, 1]}, objective="latency", pieces=2),
        ),
    ),
    Remedy(
        "SK303",
        "Let `only` name more devices, or put fewer nodes `together`.",
        lambda: placed({"layers.0": [0], "layers.1": [1]}, together=["layers.[01]"]),
        (
            lambda: placed({"layers.0": [0, 1], "layers.1": [1]}, together=["layers.[01]"]),
            lambda: placed({"layers.0": [0], "layers.1": [1]}, together=["layers.[12]"]),
        ),
    ),
    Remedy(
        "SK303",
        "Give more memory.",
        lambda: planned(MemoryBudget([1] * 9, schedule="1f1b", microbatches=4)),
        lambda: planned(MemoryBudget(["1MiB"] * 9, schedule="1f1b", microbatches=4)),
    ),
]


@pytest.mark.parametrize("remedy", SIMPLE, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy):
    remedy.carry_out()


class Recurrent(nn.Module):
    """Two layers that keep a state of a constant size, as those of Mamba do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x, cache_params):
        kept = []
        for layer, state in zip(self.layers, cache_params, strict=True):
            kept.append(state * 0.5 + layer(x).sum())
            x = x + kept[-1].mean()
        return {"logits": x, "cache_params": tuple(kept)}


def test_a_model_that_keeps_states_alone():
    given = {"cache_params": (torch.ones(4, 2**16), torch.ones(4, 2**16))}  # of 1 MiB
    gm = sk.capture(Recurrent(), X, **given)
    with refusal("SK302", 'Leave objective out: memory="24GiB" counts the states of the captured batch.'):
        sk.plan(gm, Stages(2, memory="24GiB", objective="tokens"))
    found, whole = sk.split(gm, Stages(2, memory="24GiB"))(X, **given), gm(X, **given)
    assert all(torch.equal(a, b) for a, b in zip(found["cache_params"], whole["cache_params"], strict=True))
    assert sk.plan(gm, Stages(2, memory="4MiB")).parts
    with pytest.raises(sk.errors.NoPlanError):
        sk.plan(gm, Stages(2, memory="1MiB"))  # less than one state and its update


def test_a_name_that_is_almost_an_op():
    with refusal("SK304", "Did you mean {...}?") as error:
        planned(AroundOps(["aten.tahn"]))
    meant = re.search(r"Did you mean (.+)\? An op of", error.value.remedy)[1].split(", ")
    assert "aten.tanh" in meant and all(planned(AroundOps([name])) for name in meant)
    with refusal(
        "SK304",
        "An op of a library that is not loaded is written library::op; a function of your own, or a class of modules, "
        "is given as itself.",
    ):
        planned(AroundOps(["qqqqqq"]))
    assert planned(AroundOps(["qqqqqq::op"]))  # an op that this graph does not have
    gm = fx.symbolic_trace(Calls())
    for own in (own_op, nn.Tanh):
        assert torch.equal(sk.split(gm, AroundOps([own]))(X), gm(X)) and len(sk.plan(gm, AroundOps([own])).parts) > 1


@fx.wrap
def own_op(x):
    return x + 1


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.tanh = nn.Tanh()

    def forward(self, x):
        return own_op(self.tanh(own_op(x).sin())).cos()


def test_a_pipeline_that_names_what_fits():
    net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    made, small = (sk.capture_joint(net, x, loss=torch.sum) for x in (X, X[:1]))
    costs = sk.costs.roofline(made.graph_module, "h100")
    for options in ({"schedule": "1f1b"}, {"schedule": "gpipe", "optimizer": "sgd", "links": "nvlink4"}):
        given = {"microbatches": 4, **options}
        with refusal("SK303", "{...}: {...} for each rank. Or: use more stages, a smaller microbatch, or an") as error:
            made.split(Pipeline(2, memory=1, **given), costs)
        fits = eval(error.value.remedy.split(" fits: ")[0])
        assert fits == Pipeline(2, memory=fits.memory, **given)  # what it was given, and more memory
        for nbytes in (fits.memory, fits.memory + 1, 2 * fits.memory):
            made.split(Pipeline(2, memory=nbytes, **given), costs)
        less = {**given, "memory": fits.memory - 1}
        made.split(Pipeline(3, **less), costs)
        small.split(Pipeline(2, **less), sk.costs.roofline(small.graph_module, "h100"))
        if "optimizer" not in given:
            made.split(Pipeline(2, **less, optimizer="sgd"), costs)


def test_a_pipeline_of_more_stages_than_there_are():
    made, costs = joint()
    with refusal("SK303", "Ask for at most {...}.") as error:
        made.split(Pipeline(40, "1f1b", 40), costs)
    assert made.split(Pipeline(int(error.value.remedy.split()[-1][:-1]), "1f1b", 40), costs).plan


def test_a_memory_budget_that_names_what_would_do():
    policy = MemoryBudget(1, schedule="1f1b", microbatches=8, optimizer="sgd")
    with refusal("SK303", "MemoryBudget({...}{...}) would do for {...} ({...}).") as error:
        planned(policy)
    for would in re.findall(r"MemoryBudget\(.*?\)", error.value.remedy):
        named = eval(would)
        assert named == MemoryBudget(named.memory, schedule="1f1b", microbatches=8, optimizer="sgd")
        assert planned(named)


def test_a_cast_that_autocast_keeps():
    def made(cached):
        graph = fx.Graph()
        x = graph.placeholder("x")
        handle = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, cached))
        first = graph.call_module("layer", (x,))
        graph.call_function(torch.Tensor.mul_, (graph.get_attr("layer.weight"), 1.5))
        second = graph.call_module("layer", (x,))
        graph.call_function(_torch.EXIT_AUTOCAST, (handle,))
        graph.output((first, second))
        torch.manual_seed(0)
        root = nn.Module()
        root.layer = nn.Linear(16, 16).requires_grad_(False)
        return fx.GraphModule(root, graph)

    def same(where, cached=True):
        want = made(cached)(X)
        return all(torch.equal(a, b) for a, b in zip(sk.split(made(cached), where)(X), want, strict=True))

    apart = {"layer": 0, "mul_": 1, "layer_1": 2}
    with refusal(
        "SK217",
        "Put {...} into one part, or open the region with torch.autocast(..., cache_enabled=False) in the model.",
    ) as error:
        sk.split(made(True), apart)
    together = re.search("Put (.*) into one part", error.value.remedy)[1].split(", ")
    assert same({**apart, **dict.fromkeys(together, 0), "mul_": 0}) and same(apart, cached=False)


def test_stages_that_ranks_do_not_share_evenly():
    made, costs = joint()
    with refusal("SK330", "Use a multiple of {...} stages.") as error:
        TrainingSweeper(made, costs)._policy(3, "interleaved-1f1b", 4, 2)
    chunks = int(re.search(r"\d+", error.value.remedy)[0])
    options = {"microbatches": (4,), "schedules": ("interleaved-1f1b",), "chunks": (2,)}
    found = sk.sweep(made, costs, stages=(3, 2 * chunks), **options)
    refused, fine = found.rows
    assert error.value.remedy in refused.why and fine.run is not None and fine.run.ranks == 2
