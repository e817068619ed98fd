"""Dynamo's DDPOptimizer: one compiled graph a bucket of parameters, so that gradients are sent while backward runs."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer

import splitkit as sk
from splitkit.graph.scope import is_state_op
from splitkit.policies import Buckets

CAP, FIRST = 60_000, 20_000


def compiled(model, inputs, backend):
    """Logits, gradients, the optimizer and the graphs that it gave to the compiler."""
    torch.compiler.reset()
    whole, parts = [], []

    def inner(gm, example):
        parts.append(gm)
        return backend(gm, example) if backend else gm

    optimizer = DDPOptimizer(CAP, inner, FIRST)

    def compile_fn(gm, example):
        whole.append(gm)
        return optimizer.compile_fn(gm, example)

    model.zero_grad()
    logits = torch.compile(model, backend=compile_fn, fullgraph=True)(**inputs).logits
    logits.float().pow(2).mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}, optimizer, whole, parts


def eager(model, inputs):
    model.zero_grad()
    logits = model(**inputs).logits
    logits.float().pow(2).mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def aot_eager(gm, example):
    from torch._dynamo.backends.debugging import aot_eager as backend

    return backend(gm, example)


COMPILED = [(name, backend) for name in ("llama", "gpt2", "bert") for backend in (None, aot_eager)]
ALWAYS = [("gpt2", aot_eager)]


@pytest.mark.parametrize(("name", "backend"), these_first(ALWAYS, [case for case in COMPILED if case not in ALWAYS]))
def test_outputs_and_gradients_are_those_of_eager(use, small, name, backend):
    model, inputs = small(name)
    model.eval()
    spy = use("splitkit")
    logits, gradients, optimizer, _, parts = compiled(model, inputs, backend)
    assert len(spy.made) == 1 and len(parts) == len(optimizer.buckets) >= 4
    expected, wanted = eager(model, inputs)
    torch.testing.assert_close(logits, expected)
    assert gradients.keys() == wanted.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[parameter], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", these_first(["bert"], ["llama"]))
def test_the_compiler_sees_the_parts_that_torch_makes(use, small, name):
    model, inputs = small(name)
    model.eval()
    made = {}
    for engine in ("torch", "splitkit"):
        use(engine)
        *_, parts = compiled(model, inputs, None)
        made[engine] = [[(n.op, str(n.target)) for n in p.graph.nodes if _computes(n)] for p in parts]
    assert made["splitkit"] == made["torch"]


def _computes(node):
    return node.op.startswith("call_") and not is_state_op(node) and node.target is not torch.is_grad_enabled


def test_what_the_optimizer_hangs_on_the_parts_is_there(use, small):
    """`propagate_metadata` and `propagate_dynamo_source` look parts up by ``meta["partition_names"]``."""
    model, inputs = small("llama")
    spy = use("splitkit")
    *_, whole, parts = compiled(model, inputs, None)
    (made,) = spy.made
    assert set(made.meta["partition_names"]) == {f"submod_{i}" for i in range(len(parts))}
    sources = {n.name: n._dynamo_source for n in whole[0].graph.find_nodes(op="placeholder")}
    for part in parts:
        assert part.meta is whole[0].meta
        assert part._param_name_to_source is whole[0]._param_name_to_source
        given = [n for n in part.graph.find_nodes(op="placeholder") if n.name in sources]
        assert given and all(n._dynamo_source == sources[n.name] is not None for n in given)


class Regions(nn.Module):
    """A no_grad block and an autocast block, each of which a border of buckets runs through."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        x = self.layers[1](self.layers[0](x).relu())
        with torch.no_grad():
            frozen = self.layers[3](self.layers[2](x).relu()).sigmoid()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[5](self.layers[4](x).relu())
        return self.layers[7](self.layers[6](x.float()).relu() * frozen)


def test_buckets_run_through_regions(use):
    model, x = Regions(), torch.randn(4, 64)
    spy = use("splitkit")
    optimizer = DDPOptimizer(20_000, lambda gm, _: gm, 20_000)
    y = torch.compile(model, backend=optimizer.compile_fn, fullgraph=True)(x)
    assert len(spy.made) == 1 and len(optimizer.buckets) == 4
    y.sum().backward()
    got = [p.grad for p in model.parameters()]
    model.zero_grad()
    expected = model(x)
    expected.sum().backward()
    assert torch.equal(y, expected)
    for a, p in zip(got, model.parameters(), strict=True):
        assert (a is None) == (p.grad is None)
        if a is not None:
            torch.testing.assert_close(a, p.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", these_first(["vit"], ["llama", "bert"]))
def test_the_policy_makes_the_buckets_of_the_optimizer(use, small, name):
    """Where no parameter has two readers: see `Buckets`."""
    sizes = {"layers": 5, "image": 16, "patch": 4, "classes": 5} if name == "vit" else {}
    model, inputs = small(name, **sizes)
    use("torch")
    _, _, optimizer, (gm,), _ = compiled(model, inputs, None)
    flow = sk.analyze(gm)
    plan = Buckets(CAP, first=FIRST).assign(flow, sk.costs.unit(gm))
    bucket = {node: i for i, b in enumerate(optimizer.buckets) for node in b.nodes}
    assert len(plan.parts) == len(optimizer.buckets) >= 4
    assert {node.name: plan.home(node) for node in flow.nodes} == {node.name: bucket[node] for node in flow.nodes}


def test_a_tied_weight_is_counted_once_where_its_gradient_becomes_ready(use, small):
    """GPT-2's embedding is also its head. DDPOptimizer counts it at both; it is ready only after the embedding."""
    model, inputs = small("gpt2")
    use("torch")
    _, _, optimizer, (gm,), _ = compiled(model, inputs, None)
    counted = [p for b in optimizer.buckets for p in b.param_ids]
    assert len(counted) > len(set(counted))
    flow = sk.analyze(gm)
    plan = Buckets(CAP, first=FIRST).assign(flow, sk.costs.unit(gm))
    assert f"{sum(p.nbytes for p in model.parameters())} bytes" in plan.note
