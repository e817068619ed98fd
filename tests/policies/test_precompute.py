"""`Precompute`: nodes that move from backward to forward if that saves bytes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from campaigns import these_first
from jointgraphs import Hand
from jointmodels import wide
from smallnets import loss_or_sum
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import splitkit as sk
from splitkit.costs import roofline, unit
from splitkit.engine.pair import divide
from splitkit.errors import PolicyError
from splitkit.frontends.joint_capture import capture_joint
from splitkit.memory.profile import simulate_memory
from splitkit.policies import Budget, MinCut, Precompute, RecomputeAll, Remat, SaveAll
from splitkit.training.flow import BACKWARD, FORWARD, save_all_plan


def saved_by(flow, policy):
    return set(divide(flow, policy, unit(flow.root)).saved)


def saved_bytes(flow, policy):
    pair = divide(flow, policy, unit(flow.root))
    return simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).saved


def test_a_chain_moves_as_a_whole():
    h = Hand().inputs(w=1).op("x", 8, "w").op("loss", 1, "x").gradients(t=1)
    h.back("m1", 16, "x").back("m2", 1, "m1").back("g", 1, "t", "m2")
    flow = h.flow("loss", "g")
    assert saved_by(flow, Precompute()) == {"m2"}


def test_what_depends_on_gradients_never_moves():
    h = Hand().inputs(w=1).op("x", 8, "w").op("loss", 1, "x").gradients(t=1)
    h.back("m1", 1, "t", "x").back("m2", 1, "m1").back("g", 1, "m2")
    flow = h.flow("loss", "g")
    assert saved_by(flow, Precompute()) == {"x"}


def test_members_of_a_tuple_move_together():
    h = Hand().inputs(w=1).op("x", 8, "w").op("loss", 1, "x").gradients(t=1)
    h.pair("m", 1, 2, "x", tag="is_backward").back("g", 1, "t", "m_1").back("g2", 1, "g", "m_0")
    flow = h.flow("loss", "g2")
    assert saved_by(flow, Precompute()) == {"m_0", "m_1"}


def drawn(seed):
    """A random joint graph, and its backward as expressions. Listed nodes read no gradients."""
    draw, h = random.Random(seed), Hand().inputs(w=1, v=2)
    forward = ["w", "v"]
    for i in range(draw.randint(2, 5)):
        h.op(f"f{i}", draw.randint(1, 8), *draw.sample(forward, draw.randint(1, min(2, len(forward)))))
        forward.append(f"f{i}")
    h.op("loss", 1, *forward).gradients(t=1)
    known, late, expressions = list(forward), ["t"], []
    for i in range(draw.randint(3, 9)):
        is_listed = draw.random() < 0.6
        name, pool = f"{'m' if is_listed else 'g'}{i}", known if is_listed else known + late
        read = draw.sample(pool, min(len(pool), draw.randint(1, 2)))
        if not is_listed and "t" not in read:
            read.append("t")
        (known if is_listed else late).append(name)
        h.back(name, draw.randint(1, 8), *read)
        expressions.append((name, read))
    read = sorted({"t", *(n for n, _ in expressions)})
    h.back("g", 1, *read)
    expressions.append(("g", read))
    return h.flow("loss", "g"), expressions


PLACES = ((BACKWARD,), (FORWARD,), (FORWARD, BACKWARD))


@pytest.mark.parametrize("seeds", these_first([range(15)], [range(15, 200)]), ids=str)
def test_the_fewest_bytes_that_any_move_saves(seeds):
    """All ways to place the nodes that forward could compute, one by one."""
    better = 0
    for seed in seeds:
        flow, _ = drawn(seed)
        free = [n for n in flow.nodes if n.name.startswith("m")]
        if len(free) > 4:
            continue
        least = first = saved_bytes(flow, SaveAll())
        for places in itertools.product(PLACES, repeat=len(free)):
            plan = save_all_plan(flow).place(dict(zip(free, places, strict=True)))
            if all(FORWARD in plan[read] for n in free if FORWARD in plan[n] for read in flow.inputs(n)):
                least = min(least, saved_bytes(flow, plan))
        assert saved_bytes(flow, Precompute()) == least
        better += least < first
    assert better > len(seeds) / 8


def worked_twice(joint, pair):
    """Return the nodes that both halves compute; views cost nothing."""
    prices = roofline(joint.graph_module)
    return {n for n in joint.flow.nodes if len(pair.plan[n]) > 1 and prices.seconds(n)}


@pytest.mark.parametrize("name", these_first(["writing"], ["t5", "gpt2", "mixtral", "unet"]))
def test_never_more_bytes_and_never_more_work(name):
    joint, made = wide(name)
    for base in (SaveAll(), RecomputeAll(), Remat(["aten.mm", "aten.addmm", "aten.convolution"])):
        before, after = (divide(joint.flow, p, unit(joint.flow.root)) for p in (base, Precompute(base)))
        assert saved_bytes(joint.flow, Precompute(base)) <= saved_bytes(joint.flow, base)
        assert worked_twice(joint, after) <= worked_twice(joint, before)
        inputs = joint.primals(*made.args, **made.kwargs)
        torch.manual_seed(0)
        expected = before.run(list(inputs), joint.tangents())
        torch.manual_seed(0)
        torch.testing.assert_close(after.run(list(inputs), joint.tangents()), expected)


class Gate(torch.autograd.Function):
    """Backward needs only the mask of x > 0."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


class Gated(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.first, self.last, self.checkpointed = nn.Linear(8, 64), nn.Linear(64, 8), checkpointed

    def block(self, x):
        return Gate.apply(self.first(x) * 2)

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.last(x)


def masks(pair):
    return [n for n in pair.forward.graph.nodes if n.target is torch.ops.aten.gt.Scalar]


def test_a_mask_is_saved_instead_of_what_it_is_of():
    model, x = Gated(), torch.randn(16, 8)
    joint = capture_joint(model, x, loss=loss_or_sum)
    plain, pair = joint.split(SaveAll()), joint.split(Precompute())
    assert not masks(plain) and len(masks(pair)) == 1
    assert saved_bytes(joint.flow, SaveAll()) - saved_bytes(joint.flow, Precompute()) == 16 * 64 * (4 - 1)
    model(x).sum().backward()
    run = joint.read([*itertools.chain(*pair.run(joint.primals(x), joint.tangents()))])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.gradients[name], parameter.grad)


def test_nothing_of_a_checkpoint_is_saved_in_disguise():
    joint = capture_joint(Gated(checkpointed=True), torch.randn(16, 8), loss=loss_or_sum)
    marked = [n for n in joint.flow.nodes if "recompute" in n.meta]
    for node in marked:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for policy in (Precompute(), MinCut(0.0), Budget(1.0)):
        assert not masks(joint.split(policy))


def test_what_is_computed_again_is_saved_where_that_is_less():
    """b is smaller than a, which only b is computed from."""
    h = Hand().inputs(w=1).op("a", 8, "w").op("b", 2, "a").op("loss", 1, "b").gradients(t=1)
    h.back("g", 1, "t", "b")
    flow = h.flow("loss", "g")
    base = Remat(keep=lambda n: n.name == "a")
    assert saved_by(flow, base) == {"a"} and saved_by(flow, Precompute(base)) == {"b"}


def test_other_graphs_are_refused(chain):
    with pytest.raises(PolicyError, match="SK302"):
        sk.split(chain, Precompute())


@pytest.mark.parametrize("base", [5, None, SaveAll, "SaveAll()"])
def test_what_is_no_base(base):
    with pytest.raises(PolicyError, match=r"SK302: Precompute has base=.*\n  Give a policy object"):
        Precompute(base)


class _Planless:
    def assign(self, flow, costs):
        return None


def test_a_base_that_makes_no_plan():
    h = Hand().inputs(w=1).op("a", 4, "w").op("loss", 1, "a").gradients(t=1).back("g", 1, "t", "a")
    with pytest.raises(PolicyError, match="SK301"):
        saved_by(h.flow("loss", "g"), Precompute(_Planless()))
