"""What waits for the weight part of a divided backward: real bytes under torch's own functions, against the costs."""

from __future__ import annotations

import inspect

import pytest
import torch
from campaigns import these_first
from keptmodels import MODELS, LossOnly
from ownorders import own_order
from savedbytes import storages, tensors_of
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils import _pytree as pytree
from waitingvalues import waiting_bytes

import splitkit as sk
from splitkit import _torch
from splitkit.graph.node_values import value_bytes
from splitkit.memory.saved_storages import activations
from splitkit.pipeline.simulate import StageCosts, simulate_schedule
from splitkit.pipeline.stage_prices import stage_costs
from splitkit.policies import SplitBackward, Stages
from splitkit.runtime.ranks.border_values import non_view
from splitkit.testing.models import build

SCALARS = 512
"""Bytes of a loss, of seeds of kernels: no value of the graph."""


def alone(tensor):
    return tensor.detach().requires_grad_(tensor.requires_grad)


class Divided(torch.fx.Interpreter):
    """Runs a split module; measures what each part holds after forward, after the input part, and after both."""

    def __init__(self, gm):
        super().__init__(gm)
        self.rows = []

    def call_module(self, target, args, kwargs):
        part = self.fetch_attr(target)
        args = pytree.tree_map_only(torch.Tensor, alone, args)
        self.rows.append(held(part, args, first=not self.rows))
        return pytree.tree_map_only(torch.Tensor, alone, part(*args))


def held(part, args, first):
    taken, weights = tensors_of(args), [p for p in part.parameters() if p.requires_grad]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    with torch.enable_grad():
        like = [t for t in tensors_of(part(*args)) if t.requires_grad]
    losses = [t.numel() == 1 for t in like]  # of the last part, which hands nothing else to torch
    gradients = [torch.ones_like(t) for t, loss in zip(like, losses, strict=True) if loss or not any(losses)]
    del like

    def forward():
        return [non_view(t) if t.requires_grad else t for t in tensors_of(part(*args))]

    def input_part():
        outputs = forward()
        differentiable = [t for t in outputs if t.requires_grad and (t.numel() == 1 or not any(losses))]
        return outputs, None if first else stage_backward_input(differentiable, gradients, taken, iter(weights))

    def both_parts():
        outputs, found = input_part()
        if found is not None:
            stage_backward_weight(iter(weights), found[1])
        return outputs, found

    inputs, come = sum(storages(taken).values()), sum(storages(gradients).values())
    bytes_of = []
    for run in (forward, input_part, both_parts):
        bytes_of.append(sum(_torch.allocations_between(run, "")[0]) + inputs)
        for tensor in taken:
            tensor.grad = None
    return bytes_of[0], bytes_of[1] + come, bytes_of[2]


def measured(model, args, kwargs, parts):
    gm = sk.capture(model, *args, **kwargs)
    plan = sk.plan(gm, Stages(parts, seconds=1), sk.costs.flops(gm))
    run = Divided(sk.split(gm, plan).module)
    run.run(*inspect.signature(gm.forward).bind(*args, **kwargs).arguments.values())
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    rows = [(f, w + more, both) for (f, w, both), more in zip(run.rows, relayed(flow, plan), strict=True)]
    return stage_costs(flow, plan, costs), rows


def relayed(flow, plan):
    """Bytes of the gradients that a pipeline sends through each part, of values that it passes on; no split does so."""
    requires, homes = activations(flow).requires, {n: where[0] for n, where in plan.places.items()}
    found, last = [0] * len(plan.parts), len(plan.parts) - 1
    for value in requires:
        readers = [homes[flow.producer(u)] for u in value.users if flow.producer(u) in homes]
        yielded = last not in readers and any(user.op == "output" for user in value.users)
        if flow.producer(value) in homes and (readers or yielded):
            for part in range(homes[flow.producer(value)] + 1, last + 1 if yielded else max(readers)):
                found[part] += value_bytes(value)
    return found


FIRST = [("llama", 3), ("gpt2", 2)]


@pytest.mark.parametrize(
    ("name", "parts"), these_first(FIRST, sorted({(name, parts) for name in MODELS for parts in (2, 3)} - {*FIRST}))
)
def test_parts_of_models(name, parts):
    example = build(name, **MODELS[name])
    found, rows = measured(LossOnly(example.model).train(), example.args, example.kwargs, parts)
    assert len(rows) == parts
    exact = name != "mixtral"  # experts add into memory that is written, which counts from above
    for number, (stage, row) in enumerate(zip(found, rows, strict=True)):
        forward, waiting, after = row
        assert abs(forward - stage.saved_bytes) <= SCALARS
        assert waiting - SCALARS <= stage.deferred_bytes and (number == 0 or after < waiting)
        assert stage.deferred_bytes <= (1.02 if exact else 1.6) * waiting
        assert (stage.backward_input == 0) is (number == 0)
    if exact:
        assert max(waiting / forward for forward, waiting, _ in rows) > 1.15


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_torch_captures_gradients_beside_all_that_was_saved():
    """After ``stage_backward_input``, torch holds up to 1.6 times the saved bytes."""
    model, x = nn.Sequential(*[Block(16) for _ in range(4)]), torch.randn(32, 16)
    found, rows = measured(model, (x,), {}, 2)
    unit = 32 * 16 * 4
    assert rows[1][1] == found[1].deferred_bytes and rows[1][0] == found[1].saved_bytes
    # A block captures those of norm (1), up (4), down (1: that of the sum, of the last block the one that came); its
    # input's is another one, that of the stage's goes back.
    assert found[1].deferred_bytes == found[1].saved_bytes + 2 * (1 + 4 + 1) * unit + unit
    # The first has no input part: what came waits, and nothing more.
    assert rows[0][1] == found[0].deferred_bytes == found[0].saved_bytes + unit
    # Of the joint graph wait inputs of products and gradients of their results, and of the first norm the statistics.
    joint = sk.capture_joint(model, x, loss=torch.sum)
    divided = SplitBackward().assign(joint.flow, sk.costs.flops(joint.graph_module))
    assert waiting_bytes(joint.flow, divided, 0) == 39 * unit + 2 * 32 * 4 + 4


def test_a_gradient_that_two_ways_add_up_is_held_beside_those_that_come():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x):
            x = self.a(x)
            y = self.b(x)
            return (self.c(torch.relu(y)) * y.sigmoid()).sum()

    model, x = Two(), torch.randn(4, 8)
    gm = sk.capture(model, x)
    first = {n: 0 if i == 0 else 1 for i, n in enumerate(sk.analyze(gm).nodes)}
    plan = sk.Plan.of(first)
    run = Divided(sk.split(gm, plan).module)
    run.run(x)
    found = stage_costs(gm, plan, sk.costs.flops(gm))
    assert run.rows[1][1] - 4 == found[1].deferred_bytes  # the 1 with which backward begins
    assert run.rows[0][1] == found[0].deferred_bytes


def peaks(order, saved, deferred):
    run = simulate_schedule([StageCosts(1, 1, 1, saved_bytes=saved, deferred_bytes=deferred)], own_order([order]))
    return run.peaks[0]


def test_what_waits_may_be_more_than_what_was_saved():
    assert peaks("0F0 0I0 0W0", 10, 17) == 17
    assert peaks("0F0 0B0", 10, 17) == 10
    assert peaks("0F0 0I0 0F1 0I1 0W0 0W1", 10, 17) == 34
    assert peaks("0F0 0F1 0I0 0W0 0I1 0W1", 10, 17) == 27
    assert peaks("0F0 0I0 0F1 0I1 0W0 0W1", 10, 4) == 14
    assert peaks("0F0 0I0 0F1 0I1 0W0 0W1", 10, None) == 20


def test_what_waits_besides_is_not_in_a_static_buffer():
    stages = [StageCosts(1, 1, 1, activation_bytes=4), StageCosts(1, 1, 1, saved_bytes=10, deferred_bytes=17)]
    order = own_order(["0F0 0B0", "1F0 1I0 1W0"])
    run = simulate_schedule(stages, order, static_buffers=True)
    # 4 of the 10 are the input, in its buffer; 4 more are the gradient that it has sent.
    assert run.memory[1].saved == 13 and run.memory[1].messages == 4 + 4
