"""Stages of views: what they take, give and save, counted in the modules that pipelines run, and as predicted."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
import torch
from campaigns import few_of_many, these_first
from hypothesis import strategies as st
from savedbytes import kept_by_autograd, storages
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input

import splitkit as sk
from splitkit import _torch
from splitkit.memory.saved_storages import activations
from splitkit.pipeline.stage_prices import stage_costs
from splitkit.runtime.parent import values_of
from splitkit.runtime.ranks.microbatches import MessageShapes, StepSizes
from splitkit.runtime.ranks.stage import Batch, ChainStage
from splitkit.runtime.ranks.stage_chain import chain_of, last_stage_of
from splitkit.testing.models import build

CPU = torch.device("cpu")


def stretches(flow, *cuts):
    """The plan of consecutive parts that begin at some nodes."""
    places = [0, *cuts, len(flow.nodes)]
    return sk.Plan.of({n: i for i, (a, b) in enumerate(pairwise(places)) for n in flow.nodes[a:b]})


class Counted:
    """One microbatch through all stages: what each holds for backward, and between the two parts of its backward."""

    def __init__(self, gm, plan, inputs):
        chain = chain_of(sk.split(gm, plan))
        ends = last_stage_of(chain, None, True, False)
        named = {str(n.target): t for n, t in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)}
        batch = Batch(inputs=[named], sizes=StepSizes(({},), (1.0,)), seeds=[0], targets=[None])
        known = activations(gm)
        inputs_of = {str(n.target): known.values[n] for n in gm.graph.find_nodes(op="placeholder")}
        parent = values_of(chain.split.module.graph, chain.split)
        self.saved, self.waits, self.beyond, received = [], [], [], ()
        for number in range(chain.stages):
            module = ChainStage(chain, number, ends, batch, CPU, MessageShapes())
            own = [named[str(n.target)] for n in chain.inputs(number)]
            read = {n for call in chain.nodes(number) for n in call.all_input_nodes}
            both = list(zip(module._received, received, strict=True))
            passed = [t for n, t in both if n not in read]  # of which another stage is said to hold it
            # Predicted is all of the memory that a part lies in.
            there = {s for n in chain.inputs(number) for s in inputs_of[str(n.target)]}
            within = Counter[int]()
            for node, tensor in both:
                if node in read:
                    within.update(dict.fromkeys(set(known.values[parent[node]]) - there, tensor.nbytes))
            self.beyond.append(sum(max(0, known.nbytes[s] - nbytes) for s, nbytes in within.items()))
            self._count(module, received, own, passed)
            with torch.enable_grad():
                made = module(*received)
            like = made if isinstance(made, tuple) else (made,)
            received = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in like)

    def _count(self, module, received, own, passed):
        weights = [p for p in module.parameters() if p.requires_grad]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        more = sum(storages(passed).values())

        def forward():
            made = module(*received)
            module._batch.losses.clear()
            return made if isinstance(made, tuple) else (made,)

        self.saved.append(kept_by_autograd(module, forward, [*received, *own], outputs=True) - more)
        come = [None if module.last or not t.requires_grad else torch.ones(t.shape) for t in forward()]

        def input_part():
            made = forward()
            outputs = [t for t in made if t.requires_grad]
            grads = None if module.last else [g for g in come if g is not None]
            return made, received and stage_backward_input(outputs, grads, list(received), iter(weights))

        held = storages([*received, *own, *(g for g in come if g is not None)])
        self.waits.append(sum(_torch.allocations_between(input_part, "")[0]) + sum(held.values()) - more)
        for tensor in received:
            tensor.grad = None


def check(gm, inputs, *cuts):
    """Equal to the byte, but for the seeds and scalars of kernels in what waits."""
    flow = sk.analyze(gm)
    plan = stretches(flow, *cuts)
    found, true = stage_costs(flow, plan, sk.costs.flops(gm)), Counted(gm, plan, inputs)
    for stage, saved, waits, beyond in zip(found, true.saved, true.waits, true.beyond, strict=True):
        assert stage.saved_bytes == saved + beyond
        assert waits + beyond - 64 <= stage.deferred_bytes
    return found, true


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, labels=ids, use_cache=False)[0]


@pytest.fixture(scope="module")
def gpt2():
    example = build("gpt2", layers=1, width=32, heads=2, vocab=64, seq=16, batch=2)
    ids = example.kwargs["input_ids"]
    return sk.capture(Loss(example.model.eval()), ids), [ids]


FIRST, LAST = ["view_2", "split", "view_3", "transpose"], ["split", "view_4", "transpose_1", "transpose_2"]


@pytest.mark.parametrize(
    ("first", "last"),
    these_first(
        [("split", "split"), ("view_3", "transpose_1")],
        [(a, b) for a in FIRST for b in LAST],
    ),
)
def test_queries_keys_and_values_as_a_stage(gpt2, first, last):
    """Copies of the thirds that a stage sends count beside the whole."""
    gm, inputs = gpt2
    place = {node.name: i for i, node in enumerate(sk.analyze(gm).nodes)}
    if place[first] > place[last]:
        pytest.skip("no stretch")
    found, true = check(gm, inputs, place[first], place[last] + 1)
    assert found[1].deferred_bytes == true.waits[1] + true.beyond[1]
    whole = 2 * 16 * 96 * 4
    assert found[1].saved_bytes == (2 * whole if first in ("view_2", "split") else whole)


class Views(nn.Module):
    """Views of all kinds: parts side by side and not, turned, spread, of weights and of inputs; one that is saved."""

    def __init__(self):
        super().__init__()
        self.up, self.row = nn.Linear(8, 12), nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        whole = self.up(x)
        a, b, c = whole.split(4, dim=-1)
        turned = a.view(4, 2, 2).transpose(0, 1)
        top, rest = whole[:2], b.t()
        spread = c[:, :1].expand(4, 4)
        kept = torch.relu(whole)
        half = kept.t()[:6].t()
        column = self.row[:, ::2]
        given = x.t()[1:5]
        mixed = turned.reshape(4, 4) * rest + spread * given
        return (mixed.sum() + (top * 2).sum() + (half * self.row).sum() + (column * column).sum() + kept.mean()) * 2


@cache
def views():
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    return sk.capture(Views(), x), [x]


@few_of_many(2, 300, st.data())
def test_any_stretches_of_a_graph_of_views(data):
    gm, inputs = views()
    count = len(sk.analyze(gm).nodes)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), min_size=1, max_size=3)))
    check(gm, inputs, *cuts)
