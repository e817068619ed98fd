"""Remedies of errors about plans for training steps (SK2xx): forward and backward, and stages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from carried import refusal
from jointgraphs import Hand
from jointmodels import assert_stages_alike, captured, ran

import splitkit as sk
from splitkit.engine.pair import divide
from splitkit.extend import stage_plan
from splitkit.plans.parts import Offloaded
from splitkit.plans.record import Plan
from splitkit.policies import RoundRobin, SaveAll
from splitkit.training.flow import BACKWARD, FORWARD, save_all_plan, unrepeatable
from splitkit.training.stage_parts import StagePart


@cache
def step():
    """A small convolutional net with dropout and batch norm, captured, with its plans."""
    joint, args, kwargs, expected = captured("conv")
    flow = joint.flow
    halves = save_all_plan(flow)
    forward = [n for n in flow.nodes if FORWARD in halves[n]]
    stages = {n: int(2 * i >= len(forward)) for i, n in enumerate(forward)}

    def right(plan):
        assert_stages_alike(ran(joint, joint.split(plan), args, kwargs), expected)

    return SimpleNamespace(
        joint=joint,
        flow=flow,
        halves=halves,
        stages=stages,
        staged=stage_plan(flow, stages),
        random=next(n for n in flow.once if "bernoulli" in n.name or "dropout" in n.name),
        convolution=next(n for n in halves if n.target is torch.ops.aten.convolution.default),
        gradient=next(n for n in halves if halves[n] == (BACKWARD,) and flow.inputs(n)),
        nodes={n.name: n for n in flow.scope},
        right=right,
    )


def refused(code, told, plan):
    with refusal(code, told) as caught:
        step().joint.split(plan)
    return caught.value


def test_forward_that_waits_for_backward():
    s = step()
    with refusal("SK203", "Place {...} in 'forward' as well, or {...} in 'backward'.") as caught:
        s.joint.split(s.halves.place({s.convolution: (BACKWARD,)}))
    node, other = (s.nodes[name] for name in caught.value.nodes)
    assert other is s.convolution
    s.right(s.halves.place({other: (FORWARD,)}))
    with refusal("SK203", "Place {...} in 'forward' as well, or {...} in 'backward'.") as caught:
        s.joint.split(s.halves.place({s.gradient: (FORWARD,)}))
    node, other = (s.nodes[name] for name in caught.value.nodes)
    s.right(s.halves.place({node: (BACKWARD,)}))


def test_an_output_of_forward_that_backward_computes():
    s = step()
    loss = s.flow.outputs[s.joint.signature.loss]
    with refusal("SK203", "Place it, and what it reads, in 'forward'."):
        s.joint.split(s.halves.place({loss: (BACKWARD,)}))
    s.right(s.halves.place({loss: (FORWARD,)}))


def test_parts_that_a_step_does_not_have():
    s = step()
    with refusal("SK206", "Use a policy that divides a training step, such as splitkit.policies.SaveAll()."):
        s.joint.split(RoundRobin(2))
    s.right(SaveAll())


def test_an_effect_in_the_other_half():
    s = step()
    with refusal(
        "SK210",
        "Leave it where splitkit.training.flow.save_all_plan has it; `unrepeatable` there lists such nodes.",
    ):
        s.joint.split(s.halves.place({s.random: (BACKWARD,)}))
    assert s.random in unrepeatable(s.flow)
    s.right(s.halves)


def test_stages_that_are_none():
    s = step()
    last = s.flow.nodes[-1]
    with refusal("SK206", "Parts of stages are {...}, and so on, or {...}.") as caught:
        s.joint.split(s.staged.place({last: (("backwards", 1),)}))
    assert "('forward', 0), ('backward', 0)" in caught.value.remedy
    with refusal("SK206", "Number stages from 0."):
        s.joint.split(s.staged.place({last: (StagePart("forward", 3),)}))
    with refusal("SK206", "Its backward is either one part, 'backward', or two, 'input' and 'weight'."):
        s.joint.split(s.staged.place({last: (StagePart("input", 1),)}))
    s.right(s.staged)  # ('forward', 0), ('backward', 0), and so on, from 0


def test_a_node_in_no_stage():
    s = step()
    with refusal(
        "SK208", "Give every node a part; splitkit.extend.stage_plan does, from a stage for each node of forward."
    ):
        s.joint.split(replace(s.staged, places={n: s.staged[n] for n in s.flow.nodes[1:]}))
    with refusal("SK208", "Give it a stage."):
        stage_plan(s.flow, {n: stage for n, stage in s.stages.items() if n is not s.convolution})
    s.right(stage_plan(s.flow, s.stages))


def test_an_output_of_forward_in_a_backward_stage():
    s = step()
    loss = s.flow.outputs[s.joint.signature.loss]
    with refusal("SK208", "Place it, and what it reads, in the 'forward' of a stage."):
        s.joint.split(s.staged.place({loss: (StagePart("backward", 1),)}))
    s.right(s.staged.place({loss: (StagePart("forward", 1),)}))


def test_a_random_number_in_the_backward_of_a_stage():
    s = step()
    with refusal(
        "SK210",
        "Leave it in the half where splitkit.training.flow.save_all_plan has it, and not in 'weight', which may run "
        "much later.",
    ):
        s.joint.split(s.staged.place({s.random: (StagePart("backward", 1),)}))
    assert s.halves[s.random] == (FORWARD,)
    s.right(s.staged)


def test_values_against_the_arrows():
    s = step()
    first = next(n for n in s.flow.nodes if s.staged[n] == (StagePart("forward", 0),))
    with refusal(
        "SK203",
        "Activations go only to later stages, gradients only to earlier ones; 'weight' sends nothing to other parts.",
    ):
        s.joint.split(s.staged.place({first: (StagePart("forward", 1),)}))
    s.right(s.staged)


def test_random_numbers_in_another_order():
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)] * 2)
    joint = sk.capture_joint(model, torch.ones(2, 4), loss=torch.sum)
    flow = joint.flow
    second, first = next((n, before) for n in flow.nodes for before in flow.after.get(n, ()) if n in flow.once)
    plan = stage_plan(flow, {n: 0 if n is second else 1 for n in flow.nodes if FORWARD in save_all_plan(flow)[n]})
    with refusal("SK203", "Place {...}, and what it reads, in the part of {...}, or earlier.") as caught:
        joint.split(plan.place({second: (StagePart("forward", 0),)}))
    assert caught.value.nodes == (second.name, first.name)
    forward = [n for n in flow.nodes if FORWARD in save_all_plan(flow)[n]]
    joint.split(stage_plan(flow, {n: int(flow.index[n] > flow.index[second]) for n in forward}))


def test_prices_of_parts_that_leave_nodes_out():
    gm = sk.capture(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4))
    flow = sk.analyze(gm)
    with refusal("SK208", "Place every node of Dataflow.nodes."):
        sk.stage_costs(gm, [flow.nodes[:1]])
    assert len(sk.stage_costs(gm, [flow.nodes])) == 1


# ---------------------------------------------------------------- values on the host


def hand():
    """A step with a value that backward reads, a view, one that is returned, and an input."""
    h = Hand().inputs(x=1).gradients(g=1).op("a", 4, "x").op("b", 4, "a").view("w", "b").op("c", 2, "w")
    h.op("out", 1, "c").op("loss", 1, "out").back("b2", 1, "g", "out").back("b1", 1, "b2", "w", "a", "x")
    flow = h.flow("loss out", "b1")
    return h, flow, SaveAll().assign(flow, sk.costs.unit(flow.root))


def divided(h, flow, plan, *moved):
    offloaded = (Offloaded(*(name and h[name] for name in moved)),) if moved else ()
    return divide(flow, replace(plan, offloaded=offloaded), sk.costs.unit(flow.root))


@pytest.mark.parametrize("value", ["c", "x", "out"])
def test_a_value_that_cannot_move(value):
    with refusal("SK220", "Leave it out of Plan.offloaded, or plan again."):
        divided(*hand(), value)
    assert not divided(*hand()).offloaded  # left out
    assert divided(*hand(), "a").offloaded == ("a",)


def test_moments_that_are_too_early_or_too_late():
    with refusal("SK220", "Name a node of forward that runs later, or None."):
        divided(*hand(), "a", "x")
    assert divided(*hand(), "a", "c").offloaded == divided(*hand(), "a", None).offloaded == ("a",)
    with refusal("SK220", "Name a node of backward that runs no later than {...}, or None.") as caught:
        divided(*hand(), "a", None, "g")
    first = caught.value.remedy.split("no later than ")[1].split(",")[0]
    assert divided(*hand(), "a", None, first).offloaded == divided(*hand(), "a", None, None).offloaded == ("a",)


def test_values_of_stages_on_the_host():
    s = step()
    moved = next(n for n in s.flow.nodes if why_moved(s, n))
    first = s.flow.nodes[0]
    with refusal("SK220", "Leave out release and fetch."):
        s.joint.split(replace(s.staged, offloaded=(Offloaded(moved, release=first),)))
    s.right(replace(s.staged, offloaded=(Offloaded(moved),)))
    with refusal("SK220", "Leave it out of Plan.offloaded, or plan again."):
        s.joint.split(replace(s.staged, offloaded=(Offloaded(s.nodes["primals_1"]),)))
    s.right(replace(s.staged, offloaded=()))


def why_moved(s, node):
    try:
        s.joint.split(replace(s.staged, offloaded=(Offloaded(node),)))
    except sk.errors.PlanError:
        return False
    return True


class Name(str):
    """A text that equals only itself."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def test_parts_with_one_name_in_a_file(tmp_path):
    gm = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU()))
    one, two = (n for n in gm.graph.nodes if n.op.startswith("call"))
    with refusal("SK206", "Name them differently."):
        Plan.of({one: Name("a"), two: "a"}).save(tmp_path / "plan.json")
    Plan.of({one: "first", two: "second"}).save(tmp_path / "plan.json")
    assert list(Plan.load(tmp_path / "plan.json", gm.graph).parts) == ["first", "second"]
