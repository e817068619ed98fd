"""The peak of a plan before any module is made of it: every step of it as simulated on the pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from campaigns import these_first
from jointgraphs import Hand
from jointmodels import wide
from smallnets import NETS, loss_or_sum
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from splitkit.costs import roofline
from splitkit.errors import GraphError
from splitkit.frontends.joint_capture import capture_joint
from splitkit.memory.profile import simulate_memory
from splitkit.policies import RecomputeAll, Remat, SaveAll
from splitkit.testing import models
from splitkit.training.choices import savings
from splitkit.training.peaks import Peaks, checkpoint_policies, eager_plan

PRODUCTS = ["aten.mm", "aten.addmm", "aten.bmm", "aten.convolution"]


def assert_alike(joint, peaks, plan):
    pair = joint.split(plan)
    profile = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    trace = peaks.trace(plan)
    assert [peaks.nodes[i].name for i in trace.steps] == [node.name for node in profile.steps]
    assert trace.timeline.tolist() == list(profile.timeline)
    assert (trace.peak, trace.saved_bytes) == (profile.peak, profile.saved)
    assert trace.forward == profile.calls["forward"].stop


@pytest.mark.parametrize("name", these_first(["gpt2", *NETS], [name for name in models.NAMES if name != "gpt2"]))
def test_each_step_of_each_plan_as_simulated_on_the_pair(name):
    joint, _ = wide(name)
    peaks, costs = Peaks(joint.flow), roofline(joint.graph_module)
    problem, random = savings(joint.flow, costs), np.random.default_rng(0)
    plans = [policy.assign(joint.flow, costs) for policy in (SaveAll(), RecomputeAll(), Remat(PRODUCTS))]
    plans += [problem.choose(random.random(len(problem.ops)) < share).plan() for share in (0.2, 0.5, 0.8)]
    for plan in plans:
        assert_alike(joint, peaks, plan)


def test_checkpoint_tags_are_honoured_as_on_the_pair():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(lambda y: self.b(self.a(y).tanh()).tanh(), x, use_reentrant=False).sum()

    joint = capture_joint(Net(), torch.randn(4, 8), loss=loss_or_sum)
    assert_alike(joint, Peaks(joint.flow), joint.flow.save_all)


def test_a_size_that_only_the_data_decides_is_named():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        value = torch.empty(mode.shape_env.create_unbacked_symint(), 4)
    h = Hand().inputs(x=1).op("a", 1, "x").op("loss", 1, "a").gradients(t=1).back("g", 1, "t", "a")
    h["a"].meta["val"] = value
    with pytest.raises(GraphError, match="SK108: a has .*u0"):
        Peaks(h.flow("loss", "g"))


def test_what_the_caller_holds_counts_once():
    """A tied weight, and an input that the graph never reads."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x, unread):
            return self.b(self.a(x).tanh()).sum()

    joint = capture_joint(Net(), torch.randn(4, 8), torch.randn(4, 8), loss=loss_or_sum)
    peaks = Peaks(joint.flow)
    assert_alike(joint, peaks, joint.flow.save_all)
    assert peaks.trace(joint.flow.save_all).baseline in (8 * 8 * 4 + 4 * 8 * 4 + 4, 8 * 8 * 4 + 2 * 4 * 8 * 4 + 4)


def test_what_ends_a_checkpoint_and_begins_the_next_one_is_saved():
    """As in eager mode, where each of the two keeps its inputs; the others are computed again."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in (self.first, self.second):
                x = checkpoint(lambda x, layer=layer: layer(x).sin().cos(), x, use_reentrant=False)
            return self.last(x).sum()

    flow = capture_joint(Net(), torch.randn(2, 4)).flow
    told = {node.name: policy.name for node, policy in checkpoint_policies(flow).items()}
    assert told == {"cos": "MUST_SAVE"} | dict.fromkeys(
        ("t", "addmm", "sin", "t_1", "addmm_1", "sin_1", "cos_1"), "PREFER_RECOMPUTE"
    )
    again = {node.name for node, keys in eager_plan(flow).items() if len(keys) == 2}
    assert {"sin", "sin_1", "cos_1"} <= again and "cos" not in again
