"""What a stage takes while it computes equals what was measured in a run of its graphs, also where weights are tied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.engine.staged_step import graph_temporaries
from splitkit.memory.measurement import measure_memory
from splitkit.policies import Pipeline


class Tied(nn.Module):
    """A projection that its stages share: three terms of one gradient, each alive while others are made."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Parameter(torch.randn(32, 32) / 6)
        self.own = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for layer in self.own:
            x = torch.tanh(torch.tanh(layer(x)) @ self.shared)
        return x.sum()


class TiedHead(nn.Module):
    """An embedding that shares its weight with the head, as in GPT-2: its gradient decides the peak of both ends."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(300, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return (x @ self.embedding.weight.T).logsumexp(-1).sum()


@pytest.fixture(scope="module", params=["layers", "head"])
def given(request):
    torch.manual_seed(0)
    model, x = {"layers": (Tied(), torch.randn(4, 32)), "head": (TiedHead(), torch.randint(300, (6,)))}[request.param]
    joint = sk.capture_joint(model, x)
    return joint, joint.primals(x), sk.costs.roofline(joint.graph_module, "h100")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pipeline_and_staged_step_say_what_a_run_takes(given, count):
    joint, primals, costs = given
    policy = Pipeline(count, "gpipe", microbatches=2)
    found = policy.found(policy.problems(joint.flow, costs))
    step = joint.split(found.plan)
    planned = [stage.temporary_bytes for stage in found.run.stages]
    assert planned == [stage.temporary_bytes for stage in step.stage_costs(costs)]
    assert planned == measured(step, primals, joint.tangents())


def measured(step, primals, tangents):
    """The most bytes that each stage takes beyond its inputs, saved values and sent values."""
    with torch.no_grad():
        given, crossing, held, most = dict(zip(step.primals, primals, strict=True)), (), [], []
        for stage in step.stages:
            inputs = [*(given[name] for name in stage.primals), *crossing]
            most.append(graph_temporaries(stage.forward, len(stage.outputs)))
            _, crossing, kept = stage.given(stage.forward(*inputs))
            held.append(kept)
        crossing = tuple(tangents)
        for number in reversed(range(len(step.stages))):
            stage = step.stages[number]
            inputs = [*(held[number][name] for name in stage.saved), *crossing]
            ran = measure_memory(stage.backward, *inputs)
            most[number] = max(most[number], ran.peak - ran.baseline)
            crossing = tuple(stage.backward(*inputs)[: len(stage.gradients_sent)])
    return most
