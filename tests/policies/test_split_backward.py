"""`SplitBackward`: real training steps in three parts, plans of several stages, what is measured, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from campaigns import some_of_all, these_first
from dividedbackward import Parts, run_parts
from jointmodels import NAMES, SMALL, TRANSFORMERS, assert_steps_alike, captured, eager, ran
from torch import nn
from waitingvalues import waiting_bytes, waiting_values

import splitkit as sk
from splitkit.costs import flops, roofline
from splitkit.errors import PolicyError
from splitkit.frontends.joint_capture import capture_joint
from splitkit.graph.joint_marks import forward_owners
from splitkit.plans.record import Plan
from splitkit.policies import MinCut, RecomputeAll, SaveAll, SplitBackward
from splitkit.training.flow import BACKWARD, FORWARD, save_all_plan
from splitkit.training.stage_plan import stage_plan

POLICIES = {
    "products": SplitBackward(),
    "after recompute": SplitBackward(policy=RecomputeAll()),
    "after a cut": SplitBackward(policy=MinCut()),
    "nothing waits": SplitBackward(0.0),
    "at a price": SplitBackward(2e9, MinCut()),
    "all waits": SplitBackward(1e15),
}
CASES = [
    *some_of_all(SMALL, POLICIES, ["products"]),
    *some_of_all(["gpt2"], POLICIES, ["products", "after recompute"]),
    *(pytest.param(n, p, marks=pytest.mark.campaign) for n in sorted({*TRANSFORMERS} - {"gpt2"}) for p in POLICIES),
]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_a_step_in_three_parts_is_that_of_eager(name, policy):
    joint, args, kwargs, expected = captured(name)
    costs = roofline(joint.graph_module, "a100")
    plan = POLICIES[policy].assign(joint.flow, costs)
    assert list(plan.parts) == [("forward", 0), ("input", 0), ("weight", 0)]
    assert_steps_alike(run_parts(joint, plan, args, kwargs), expected)
    assert plan.claim.optimal and plan.claim.objective == "waiting" and plan.claim.limiting == ("weight", 0)
    waiting = waiting_bytes(joint.flow, plan, 0)
    assert plan.claim.value >= waiting if POLICIES[policy].price else plan.claim.value == waiting
    if policy == "nothing waits":
        assert waiting == 0
    if policy == "all waits":
        problem_pinned = {n for n in plan.members(("input", 0)) if costs.seconds(n)}
        assert problem_pinned <= {*joint.flow.once} | {
            n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]
        }


class Prices:
    """Prices by the number of a node, which make a frontier with corners."""

    def __init__(self, flow):
        self.index = flow.index

    def seconds(self, node):
        return 1.0 + self.index[node] % 7

    def flops(self, node):
        return self.seconds(node)

    def nbytes(self, node):
        return 0

    def param_bytes(self, node):
        return 0


class Layers(nn.Module):
    """Layers with norms; the loss is a sum."""

    def __init__(self, count=3, width=8):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).tanh()
        return x.sum()


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 8, requires_grad=True)
    return capture_joint(model, x), model, x


def test_gradients_of_inputs_come_from_the_input_part(layers):
    joint, model, x = layers
    plan = SplitBackward().assign(joint.flow, flops(joint.graph_module))
    (gradient,) = joint.flow.input_gradients
    assert plan[joint.flow.producer(gradient)] == (("input", 0),)
    step = run_parts(joint, plan, (x,), {})
    (expected,) = torch.autograd.grad(model(x), [x])
    torch.testing.assert_close(step.gradients["input 0"], expected)
    assert_steps_alike(
        replace(step, gradients={n: g for n, g in step.gradients.items() if n != "input 0"}),
        eager(model, (x.detach(),), {}),
    )
    unit = 4 * 8 * 4
    # The input and the output gradient of each linear layer, nothing of the norms.
    assert waiting_bytes(joint.flow, plan, 0) == 6 * unit
    late = [n.target for n in plan.members(("weight", 0))]
    assert late.count(torch.ops.aten.mm.default) == 3 and torch.ops.aten.native_layer_norm_backward.default not in late


def test_the_bytes_are_those_that_a_real_run_holds(layers):
    """What is alive after forward and the input part, beyond what the caller holds."""
    joint, _, x = layers
    plan = SplitBackward().assign(joint.flow, flops(joint.graph_module))
    given = joint.primals(x), joint.tangents()

    def early():
        parts = Parts(joint.flow, plan, *given)
        parts.run(("forward", 0))
        parts.run(("input", 0))
        return list(parts.waiting(0).values())

    with torch.no_grad():
        memory = sk.measure_memory(lambda *_: early(), *given)
    assert memory.end - memory.baseline == waiting_bytes(joint.flow, plan, 0)


def two_stages(joint, border):
    """A plan of two stages: a node of forward by the layer of its module, a node of backward by that of its owner."""
    flow, inner = joint.flow, save_all_plan(joint.flow)
    owners = forward_owners(flow.graph)
    stage, early = {}, True
    for node in flow.nodes:
        if inner.home(node) == FORWARD:
            early = early and node.name != border
            stage[node] = 0 if early else 1
    for node in flow.nodes:
        if inner.home(node) == BACKWARD:
            owner = owners.get(node)
            below = [stage[r] for r in flow.inputs(node) if inner.home(r) == BACKWARD]
            own = stage.get(flow.producer(owner), 1) if owner is not None else 1
            stage[node] = min([own, *below])
    return Plan({n: (("forward" if inner.home(n) == FORWARD else "backward", stage[n]),) for n in flow.nodes})


@pytest.mark.parametrize("price", [None, 0.0, 1e6, 1e15])
def test_each_stage_has_its_own_division(layers, price):
    joint, model, x = layers
    flow = joint.flow
    border = [n for n in flow.nodes if n.target is torch.ops.aten.native_layer_norm.default][1]
    whole = two_stages(joint, border.name)
    plan = SplitBackward(price, whole).assign(flow, flops(joint.graph_module))
    assert {*plan.parts} == {(half, s) for half in ("forward", "input", "weight") for s in (0, 1)}
    step = run_parts(joint, plan, (x,), {}, stages=2)
    assert_steps_alike(
        replace(step, gradients={n: g for n, g in step.gradients.items() if n != "input 0"}),
        eager(model, (x.detach(),), {}),
    )
    unit = 4 * 8 * 4
    if price is None:
        # Stage 1: two layers; stage 0: one, whose output gradient is made of what stage 1 sends.
        assert [waiting_bytes(flow, plan, s) for s in (0, 1)] == [2 * unit, 4 * unit]
        assert plan.claim.value == 6 * unit and plan.claim.limiting == ("weight", 1)
    for node in flow.nodes:  # what goes to another stage comes from the input part
        readers = {key for user in node.users for key in plan.places.get(flow.producer(user), ())}
        if any(key[1] != plan.home(node)[1] for key in readers):
            assert plan.home(node)[0] in ("forward", "input")


def in_stages(flow, count, base):
    """A plan with as many nodes of forward in each stage."""
    forward = [n for n in flow.nodes if FORWARD in base[n]]
    return stage_plan(flow, {n: i * count // len(forward) for i, n in enumerate(forward)}, base)


STAGED = [
    ("gpt2", 2, RecomputeAll()),
    ("conv", 2, SaveAll()),
    ("branches", 3, MinCut()),
    ("narrow writing", 1, SaveAll()),
]
MORE = [(n, c, p) for n in NAMES for c in (1, 2, 3) for p in (SaveAll(), RecomputeAll(), MinCut())]


@pytest.mark.parametrize(("name", "count", "base"), these_first(STAGED, [case for case in MORE if case not in STAGED]))
def test_stages_of_the_engine_wait_with_the_bytes_of_the_claim(name, count, base):
    joint, args, kwargs, (loss, gradients, buffers) = captured(name)
    flow, costs = joint.flow, roofline(joint.graph_module, "a100")
    saves = base.assign(flow, costs)
    for price in (None, 2e9):
        plan = SplitBackward(price, in_stages(flow, count, saves)).assign(flow, costs)
        step = joint.split(plan)
        found = ran(joint, step, args, kwargs)
        assert torch.equal(found.loss, loss) and all(torch.equal(v, buffers[n]) for n, v in found.updates.items())
        for parameter, gradient in gradients.items():  # those of tied parameters are added in another order
            if gradient is not None:
                torch.testing.assert_close(found.gradients[parameter], gradient, rtol=1e-5, atol=1e-7)
        waits = [stage.waiting_bytes for stage in step.stages]
        assert waits == [waiting_bytes(flow, plan, s) for s in range(count)]
        assert plan.claim.optimal and (price or plan.claim.value == sum(waits))
    if count == 1 and name != "checkpointed":  # a pair saves what lies between two checkpoints, whatever the plan says
        assert step.stages[0].saved_bytes == simulate(joint.split(saves, costs)).saved


def simulate(pair):
    return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)


def test_what_the_input_part_recomputes_waits_and_forward_does_not_save_it(layers):
    joint, *_ = layers
    costs = roofline(joint.graph_module, "a100")
    base = RecomputeAll().assign(joint.flow, costs)
    step = joint.split(SplitBackward(policy=base).assign(joint.flow, costs))
    (stage,) = step.stages
    assert stage.saved_bytes == simulate(joint.split(base, costs)).saved
    assert stage.waiting_bytes > stage.saved_bytes and not {*stage.waiting} & {*stage.saved}


def test_terms_of_a_tied_parameter_stay_in_their_stages():
    """The product of the head ends in a gradient of stage 1, which adds nothing to that of the embedding in stage 0."""
    joint, *_ = captured("gpt2")
    flow, costs = joint.flow, flops(joint.graph_module)
    plan = SplitBackward(policy=in_stages(flow, 2, save_all_plan(flow))).assign(flow, costs)
    late = [n.target for n in plan.members(("weight", 1))]
    assert late.count(torch.ops.aten.mm.default) >= 5  # those of a block, and that of the head


def test_a_first_stage_computes_its_chain_early_and_keeps_the_products():
    joint, *_ = captured("gpt2")
    assert not joint.flow.input_gradients
    plan = SplitBackward().assign(joint.flow, flops(joint.graph_module))
    whole = SplitBackward(1e15).assign(joint.flow, flops(joint.graph_module))
    assert waiting_bytes(joint.flow, plan, 0) < waiting_bytes(joint.flow, whole, 0)
    late = [n.target for n in plan.members(("weight", 0))]
    # Four linear layers in each of two blocks and the head; the embeddings of words and positions.
    assert late.count(torch.ops.aten.mm.default) == 2 * 4 + 1
    assert late.count(torch.ops.aten.embedding_dense_backward.default) == 2
    early = [n.target for n in plan.members(("input", 0))]
    assert torch.ops.aten.mm.default in early
    assert waiting_values(joint.flow, whole, 0) and not [
        n for n in whole.members(("input", 0)) if n not in joint.flow.once
    ]


def test_refusals(layers):
    joint, *_ = layers
    flow, costs = joint.flow, flops(joint.graph_module)
    twice, forward = SplitBackward(policy=SplitBackward()), Plan(dict.fromkeys(flow.nodes, (("forward", 0),)))
    for policy in (twice, SplitBackward(policy=lambda node: 3), SplitBackward(policy=forward)):
        with pytest.raises(PolicyError, match=r"SK302.*SplitBackward divides"):
            policy.assign(flow, costs)
    with pytest.raises(PolicyError, match="SK301"):
        SplitBackward(policy=3)
    gm = sk.capture(Layers(), torch.randn(4, 8))
    with pytest.raises(PolicyError, match="SK302"):
        SplitBackward().assign(sk.analyze(gm), flops(gm))
    assert SaveAll() == SplitBackward().policy
