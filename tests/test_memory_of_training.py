"""Simulated memory of forward and backward: to the byte against real runs, on every model and partition."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

import splitkit as sk
from splitkit import models
from splitkit.joint import capture_joint
from splitkit.memory import simulate_memory
from splitkit.policies import RecomputeAll, Remat, SaveAll
from splitkit.testing.nets import NETS

SMALL = {"layers": 2, "width": 64, "heads": 2, "batch": 2}
WAYS = {
    "torch's default": lambda joint: joint.partition(default_partition),
    "torch's min-cut": lambda joint: joint.partition(min_cut_rematerialization_partition),
    "save all": lambda joint: joint.split(SaveAll()),
    "recompute all": lambda joint: joint.split(RecomputeAll()),
    "keep products": lambda joint: joint.split(Remat(["aten.mm", "aten.addmm", "aten.bmm", "aten.convolution"])),
}


def example(name):
    if name in NETS:
        return NETS[name]()
    return models.build(name, **(SMALL | ({"image": 32} if name == "vit" else {"seq": 16, "vocab": 101})))


@pytest.mark.parametrize("name", [*models.NAMES, *NETS])
def test_forward_and_backward_to_the_byte(name):
    made = example(name)
    joint = capture_joint(made.model, *made.args, **made.kwargs)
    for way, partition in WAYS.items():
        pair = partition(joint)
        profile = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
        primals, tangents = joint.primals(*made.args, **made.kwargs), joint.tangents()
        held = list(primals)
        measured = sk.measure_memory(pair.run, primals, tangents)
        assert profile.peak == measured.peak, way
        assert profile.end == measured.end, way
        assert profile.peak == max(profile.peaks["forward"], profile.peaks["backward"])
        del held


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 16))

    def forward(self, x):
        return ((x @ self.weight).relu() @ self.weight).sum()


def test_by_hand():
    """::

    1 KiB each: w, x held throughout. y = x w, r = relu(y) and the sum's 4 bytes; saved: r (relu needs its result).

    forward   mm        w x y                       3
              relu      w x y r                     4
              mm_1      w x r z                     4
              sum       w x r z s                   4 + 4 B
    backward  the tangent's 4 bytes are held as well; `expand` is a view of them
              permute, mm_2 = r^T g                 w x r m2              4 + 8 B
              mm_3 = g w^T                          w x r m2 m3           5 + 8 B
              threshold_backward(m3, r) = t         w x r m2 m3 t         6 + 8 B
              mm_4 = x^T t                          w x m2 t m4           5 + 8 B
              add = m2 + m4                         w x m2 m4 a           5 + 8 B
    """
    model, x = Two(), torch.zeros(16, 16)
    joint = capture_joint(model, x)
    pair = joint.split(SaveAll())
    profile = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    assert profile.saved >= 1024 and profile.baseline == 2048 + 4
    assert profile.peak == 6 * 1024 + 8 and "threshold" in profile.at.name
    kinds = {b.kind: b.nbytes for b in profile.live_at_peak}
    assert kinds["parameter"] == kinds["input"] == kinds["saved"] == 1024 and kinds["tangent"] == 4


def test_user_outputs_are_found_without_their_number():
    made = example("gpt2")
    joint = capture_joint(made.model, *made.args, **made.kwargs)
    pair = joint.split(SaveAll())
    told = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    assert simulate_memory(pair.forward, pair.backward).peak == told.peak


def test_a_real_training_step_takes_what_was_predicted():
    """A step of a module that AOTAutograd runs, not the halves alone: gradients, loss and all."""
    made = example("gpt2")
    joint = capture_joint(made.model, *made.args, **made.kwargs)
    pair = joint.split(SaveAll())
    predicted = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak
    made.model.zero_grad()
    applied = sk.apply(made.model, SaveAll(), *made.args, **made.kwargs)

    def step():
        loss = applied(*made.args, **made.kwargs).loss
        loss.backward()
        return loss

    step()  # compiles
    made.model.zero_grad()
    measured = sk.measure_memory(step).peak
    # The logits are outputs of this step, and not of the joint graph of the loss.
    logits = 2 * 16 * 101 * 4
    assert abs(measured - predicted) <= logits + 0.01 * predicted
