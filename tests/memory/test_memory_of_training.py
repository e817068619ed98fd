"""Simulated memory of forward and backward: to the byte against real runs, on every model and partition."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from campaigns import these_first
from jointmodels import wide, wider
from smallnets import NETS, loss_or_sum
from torch import nn
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

import splitkit as sk
from splitkit.errors import NoPlanError
from splitkit.frontends.joint_capture import capture_joint
from splitkit.memory.profile import simulate_memory
from splitkit.policies import Budget, RecomputeAll, Remat, SaveAll
from splitkit.testing import models
from splitkit.training.peaks import Peaks

WAYS = {
    "torch's default": lambda joint: joint.partition(default_partition),
    "torch's min-cut": lambda joint: joint.partition(min_cut_rematerialization_partition),
    "save all": lambda joint: joint.split(SaveAll()),
    "recompute all": lambda joint: joint.split(RecomputeAll()),
    "keep products": lambda joint: joint.split(Remat(["aten.mm", "aten.addmm", "aten.bmm", "aten.convolution"])),
}

FIRST = ["gpt2", *(name for name in NETS if name != "unet")]


@pytest.mark.parametrize("name", these_first(FIRST, [name for name in (*models.NAMES, *NETS) if name not in FIRST]))
def test_forward_and_backward_to_the_byte(name):
    joint, made = wide(name)
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
    joint = capture_joint(model, x, loss=loss_or_sum)
    pair = joint.split(SaveAll())
    profile = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    assert profile.saved >= 1024 and profile.baseline == 2048 + 4
    assert profile.peak == 6 * 1024 + 8 and "threshold" in profile.at.name
    kinds = {b.kind: b.nbytes for b in profile.live_at_peak}
    assert kinds["parameter"] == kinds["input"] == kinds["saved"] == 1024 and kinds["tangent"] == 4


def test_user_outputs_are_found_without_their_number():
    joint, _ = wide("gpt2")
    pair = joint.split(SaveAll())
    told = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    assert simulate_memory(pair.forward, pair.backward).peak == told.peak


def test_a_real_training_step_takes_what_was_predicted():
    """A step of a module that AOTAutograd runs, not the halves alone: gradients, loss and all."""
    made = wider("gpt2")
    pair = wide("gpt2")[0].split(SaveAll())
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


def weighted(out):
    """A scalar of all outputs, each element with a weight of its own."""
    parts = out if isinstance(out, tuple) else (out,)
    return sum(
        (o * torch.cos(torch.arange(o.numel(), dtype=o.dtype) + i + 1).reshape(o.shape)).sum()
        for i, o in enumerate(parts)
    )


TARGETS = torch.tensor([0, 1, 2, 3, 0])
LOSSES = {
    "cross entropy": lambda y, x: F.cross_entropy(y, TARGETS, ignore_index=2, label_smoothing=0.1),
    "nll": lambda y, x: F.nll_loss(y.log_softmax(-1), TARGETS),
    "nll, summed": lambda y, x: F.nll_loss(y.log_softmax(-1), TARGETS, reduction="sum"),
    "mse": lambda y, x: F.mse_loss(y, x[:, :4]),
    "mse, each": lambda y, x: F.mse_loss(y, x[:, :4], reduction="none"),
    "smooth l1": lambda y, x: F.smooth_l1_loss(y, x[:, :4]),
    "smooth l1, summed": lambda y, x: F.smooth_l1_loss(y, x[:, :4], reduction="sum"),
    "l1": lambda y, x: F.l1_loss(y, x[:, :4]),
    "huber": lambda y, x: F.huber_loss(y, x[:, :4]),
    "kl": lambda y, x: F.kl_div(y.log_softmax(-1), x[:, :4].softmax(-1), reduction="batchmean"),
    "bce": lambda y, x: F.binary_cross_entropy(y.sigmoid(), x[:, :4].sigmoid()),
    "bce of logits": lambda y, x: F.binary_cross_entropy_with_logits(y, (x[:, :4] > 0).float()),
    "cosine": lambda y, x: F.cosine_similarity(y, x[:, :4]),
    "soft margin": lambda y, x: F.soft_margin_loss(y, (x[:, :4] > 0).float() * 2 - 1),
    "hinge": lambda y, x: F.hinge_embedding_loss(y, (x[:, :4] > 0).float() * 2 - 1),
    "multi margin": lambda y, x: F.multi_margin_loss(y, TARGETS),
    "multilabel": lambda y, x: F.multilabel_soft_margin_loss(y, (x[:, :4] > 0).float()),
    "poisson": lambda y, x: F.poisson_nll_loss(y, x[:, :4].abs()),
    "triplet": lambda y, x: F.triplet_margin_loss(y, x[:, :4], x[:, 2:6]),
    "margin ranking": lambda y, x: F.margin_ranking_loss(y[:, 0], y[:, 1], x[:, 0].sign()),
}
SIX = ("cross entropy", "nll", "smooth l1", "kl", "bce of logits", "cosine")


class Losses(nn.Module):
    """A tiny net with losses of some kinds, in which each number of 4 bytes counts."""

    def __init__(self, *names):
        super().__init__()
        self.linear, self.names = nn.Linear(6, 4), names

    def forward(self, x):
        y = self.linear(x)
        return tuple(LOSSES[name](y, x) for name in self.names)


class Adapter(nn.Module):
    """What LoRA trains: two small factors beside a frozen weight."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 0.5


class Frozen(nn.Module):
    """Some of its weights are not trained; its second output is an integer, its third needs no gradient."""

    def __init__(self, frozen, rank=0):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("scale", torch.ones(16))
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)
        if rank:
            self.a, self.b = Adapter(self.a, rank), Adapter(self.b, rank)

    def forward(self, x):
        y = self.norm(self.b((self.a(x) * self.scale).relu()))
        return y.square().sum(), y.argmax(-1), x * 2


STEPS = {
    **{f"loss: {name}": (lambda name=name: Losses(name), (5, 6)) for name in LOSSES},
    "losses of six kinds": (lambda: Losses(*SIX), (5, 6)),
    "nothing frozen": (lambda: Frozen(()), (9, 16)),
    "a layer frozen": (lambda: Frozen(("a.weight", "a.bias")), (9, 16)),
    "weights frozen": (lambda: Frozen(("a.weight", "a.bias", "b.weight")), (9, 16)),
    "biases alone trained": (lambda: Frozen(("a.weight", "b.weight", "norm.weight")), (9, 16)),
    "norm alone trained": (lambda: Frozen(("a.weight", "a.bias", "b.weight", "b.bias")), (9, 16)),
    "adapters": (lambda: Frozen((), rank=1), (9, 16)),
    "adapters and frozen norm": (lambda: Frozen(("norm.weight", "norm.bias"), rank=3), (9, 16)),
}


def of_step(out):
    """The loss: the first output alone, where there are others of other kinds."""
    return out[0] if any(not o.requires_grad for o in out) else weighted(out)


def lowest(joint):
    """The plan of the least peak, which `Budget` names in its refusal."""
    with pytest.raises(NoPlanError) as refused:
        joint.split(Budget(1))
    return joint.split(Budget(int(re.search(r"Budget\((\d+)", refused.value.remedy)[1])))


FIRST_STEPS = [
    *(f"loss: {name}" for name in ("mse", "huber", "multi margin", "poisson", "margin ranking")),
    *("losses of six kinds", "a layer frozen", "biases alone trained", "adapters and frozen norm"),
]


@pytest.mark.parametrize("name", these_first(FIRST_STEPS, [name for name in STEPS if name not in FIRST_STEPS]))
def test_what_budget_promises_is_what_the_run_takes(name):
    make, shape = STEPS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    joint = capture_joint(model, x, loss=of_step)
    for pair in (joint.split(SaveAll()), joint.split(RecomputeAll()), lowest(joint)):
        primals, tangents = joint.primals(x), joint.tangents()
        held = list(primals)
        measured = sk.measure_memory(pair.run, primals, tangents)
        profile = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
        assert (profile.baseline, profile.peak, profile.end) == (measured.baseline, measured.peak, measured.end)
        assert Peaks(joint.flow).trace(pair.plan).peak == measured.peak
        del held
