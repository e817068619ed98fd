"""Training steps in pipeline stages: they equal eager mode, and nothing goes where it may not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from campaigns import these_first
from jointmodels import NAMES, TRANSFORMERS, assert_stages_alike, captured, ran
from randomstageplans import random_stage_plan
from torch import nn

import splitkit as sk
from splitkit.engine.divide_stages import divide_stages
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import CycleError, PlanError
from splitkit.frontends.joint_capture import DividedStep
from splitkit.plans.record import Plan
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_parts import StagePart
from splitkit.training.stage_plan import stage_plan


def evenly(flow, count):
    """As many nodes of forward in each stage."""
    forward = [n for n in flow.nodes if FORWARD in save_all_plan(flow)[n]]
    return {n: i * count // len(forward) for i, n in enumerate(forward)}


ALIKE = ("llama", "bert", "vit", "mixtral")
"""Stacks of layers as in GPT-2, which a campaign divides into stages."""
FIRST_NAMES = [name for name in NAMES if name not in ALIKE]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", these_first(FIRST_NAMES, ALIKE))
def test_stages_run_like_eager(name, count):
    joint, args, kwargs, expected = captured(name)
    step = joint.split(stage_plan(joint.flow, evenly(joint.flow, count)))
    assert isinstance(step, StagedStep) and len(step.stages) == count
    assert_stages_alike(ran(joint, step, args, kwargs), expected)


SEEDS = [(name, seed) for seed in range(12) for name in NAMES]
FIRST = [(name, seed) for name, seed in SEEDS if name in FIRST_NAMES and seed < (1 if name in TRANSFORMERS else 2)]


@pytest.mark.parametrize(("name", "seed"), these_first(FIRST, [case for case in SEEDS if case not in FIRST]))
def test_random_stages_run_like_eager(name, seed):
    joint, args, kwargs, expected = captured(name)
    step = joint.split(random_stage_plan(joint.flow, 2 + seed % 4, seed))
    assert_stages_alike(ran(joint, step, args, kwargs), expected)
    again = Plan.from_dict(joint.graph_module.graph, json.loads(json.dumps(step.plan.to_dict())))
    assert again == step.plan


@pytest.mark.parametrize("name", these_first(FIRST_NAMES, ALIKE))
def test_each_part_computes_what_is_planned_there_and_values_go_along_the_arrows(name):
    joint = captured(name).joint
    step = joint.split(random_stage_plan(joint.flow, 3, 7))
    for number, stage in enumerate(step.stages):
        graphs = {"forward": stage.forward, "weight": stage.weight}
        graphs["backward" if stage.weight is None else "input"] = stage.backward
        for half, graph in graphs.items():
            if graph is not None:
                emitted = {n.name for n in graph.graph.nodes if n.op == "call_function"}
                planned = {n.name for n, keys in step.plan.items() if (half, number) in keys and n.op != "placeholder"}
                assert emitted - {n for n in emitted if n.startswith("add_tensor")} == planned
                graph.graph.lint()
        after = step.stages[number + 1] if number + 1 < len(step.stages) else None
        assert stage.sent == (after.received if after else ())
        assert stage.gradients_received == (after.gradients_sent if after else ())
        given = {n.name for n in stage.forward.graph.nodes if n.op == "placeholder"}
        assert given == {*stage.primals, *stage.received}


class Tied(nn.Module):
    """An embedding that is also the head, with a layer of its own between."""

    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.nn.functional.linear(self.layer(self.words(x)), self.words.weight).square().sum()


@pytest.fixture(scope="module")
def tied():
    torch.manual_seed(0)
    model = Tied()
    x = torch.tensor([[1, 2, 3]])
    return sk.capture_joint(model, x, loss=lambda loss: loss), model, x


def test_a_tied_gradient_has_a_term_in_each_stage_and_does_not_cross(tied):
    joint, model, x = tied
    step = joint.split(stage_plan(joint.flow, evenly(joint.flow, 2)))
    weight = next(i for i, name in joint.signature.gradients.items() if name in step.stages[0].primals)
    position = weight - joint.signature.forward_outputs
    assert step.ties == {position: (1, 0)}
    assert position in step.stages[0].gradients and position in step.stages[1].gradients
    crossing = {n.name: n.meta["val"].shape for n in step.stages[1].backward.graph.nodes if "val" in n.meta}
    assert all(crossing[name] != model.words.weight.shape for name in step.stages[1].gradients_sent)
    module = DividedStep(joint, step)
    module(x).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_one_gradient_comes_back_for_each_activation_between_layers():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    joint = sk.capture_joint(model, torch.randn(4, 8), loss=torch.sum)
    step = joint.split(stage_plan(joint.flow, evenly(joint.flow, 3)))
    assert [(len(s.received), len(s.gradients_sent)) for s in step.stages] == [(0, 0), (1, 1), (1, 1)]
    assert "receives 1 and sends 1 activations, saves 256 B" in str(step)
    count = "Training step in 3 stages"
    for note, head in (("", count), ("3 stages. Fast", f"{count}. Fast"), ("By hand", f"{count}: By hand")):
        assert str(replace(step, plan=replace(step.plan, note=note))).splitlines()[0] == head


def moved(plan, **places):
    """The plan with some nodes elsewhere."""
    nodes = {n.name: n for n in plan}
    return plan.place({nodes[name]: keys for name, keys in places.items()})


def test_values_against_the_arrows_are_refused(tied):
    flow = tied[0].flow
    plan = stage_plan(flow, evenly(flow, 2))
    first = next(n for n in flow.nodes if plan[n] == (StagePart("forward", 0),))
    late = plan.place({first: (StagePart("forward", 1),)})
    with pytest.raises(CycleError, match=r"'forward' of stage 0 needs .* computed in 'forward' of stage 1"):
        divide_stages(flow, late)
    crossing = next(n for n in flow.nodes if plan[n] == (StagePart("backward", 1),))
    with pytest.raises(CycleError, match="which does not run before it"):
        divide_stages(flow, plan.place({crossing: (StagePart("backward", 0),)}))


def test_the_weight_part_gives_nothing_to_others(tied):
    flow = tied[0].flow
    plan = stage_plan(flow, evenly(flow, 2))
    renamed = {
        n: tuple(StagePart("input", 1) if k == StagePart("backward", 1) else k for k in keys)
        for n, keys in plan.items()
    }
    split = replace(plan, places=renamed, parts={})
    first = next(n for n in flow.nodes if split[n] == (StagePart("input", 1),))
    with pytest.raises(CycleError, match="'weight' sends nothing"):
        divide_stages(flow, split.place({first: (StagePart("weight", 1),)}))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("backward", "is not part of a stage"),
        (("backwards", 1), "is not part of a stage"),
        (("forward", 3), "stage 2 of 4 has no nodes"),
        (("input", 1), "either one part, 'backward', or two"),
    ],
)
def test_parts_that_are_no_stages_are_refused(tied, key, message):
    flow = tied[0].flow
    plan = stage_plan(flow, evenly(flow, 2))
    last = flow.nodes[-1]
    with pytest.raises(PlanError, match="SK206") as error:
        divide_stages(flow, plan.place({last: (key,)}))
    assert message in f"{error.value.reason} {error.value.remedy}"


def test_a_node_without_a_part_is_refused(tied):
    flow = tied[0].flow
    plan = stage_plan(flow, evenly(flow, 2))
    with pytest.raises(PlanError, match="SK208"):
        divide_stages(flow, replace(plan, places={n: plan[n] for n in flow.nodes[1:]}))
    with pytest.raises(PlanError, match=r"SK208.*has no stage"):
        stage_plan(flow, {})


def test_random_numbers_are_not_drawn_twice_or_in_weight():
    joint, *_ = captured("conv")
    flow = joint.flow
    plan = stage_plan(flow, evenly(flow, 2))
    dropout = next(n for n in flow.nodes if (n in flow.once and "dropout" in n.name) or "rand" in n.name)
    with pytest.raises(PlanError, match="SK202"):
        divide_stages(flow, plan.place({dropout: (*plan[dropout], StagePart("backward", 0))}))
    with pytest.raises(PlanError, match="SK210"):
        divide_stages(flow, plan.place({dropout: (StagePart("backward", 1),)}))
