"""Small models whose training steps are captured once, with what eager autograd gives for them."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from capturedmodels import stored
from smallnets import NETS, Writing, loss_or_sum
from torch import nn
from torch.utils.checkpoint import checkpoint

import splitkit as sk
from splitkit.costs import roofline
from splitkit.frontends.joint_capture import Joint, capture_joint
from splitkit.testing.models import Example, build

WIDER = {"layers": 2, "width": 64, "heads": 2, "batch": 2}
TINY = {"layers": 1, "width": 32, "heads": 4, "batch": 2}
TEXT = {**TINY, "vocab": 64, "seq": 8}
TRANSFORMERS = {
    "gpt2": {**TEXT, "layers": 2},
    **dict.fromkeys(("llama", "bert", "t5"), TEXT),
    "vit": {**TINY, "image": 32, "patch": 16, "classes": 10},
    "mixtral": {**TEXT, "experts": 2},
}


class Conv(nn.Module):
    """Convolution, BatchNorm (whose buffers are updated) and dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 5))

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Checkpointed(nn.Module):
    """Blocks under torch's checkpoint."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sin()


class Chain(nn.Module):
    """Pointwise ops and products of different sizes, with a skip."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(8, width, bias=False), nn.Linear(width, 8, bias=False)

    def forward(self, x):
        y = torch.tanh(self.up(x)).exp()
        return (self.down(y * y).sigmoid() + x).cos().sum()


class Branches(nn.Module):
    """Two branches of one value, and a tuple of which backward reads a member."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, width))

    def forward(self, x):
        y = x @ self.weight
        high, at = y.sin().max(dim=1)
        return (y.tanh() * y).sum() + (high.exp() * at).sum()


class Deep(nn.Module):
    """A wide value at each end, and a chain in between."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, width))

    def forward(self, x):
        y = (x @ self.weight).sigmoid()
        z = y.tanh().exp().mean(dim=1, keepdim=True).tanh()
        return ((z * x).exp().sigmoid() * y.sum(dim=1, keepdim=True)).tanh().sum()


class Normed(nn.Module):
    """Tuples of which forward reads a member long after they were made: a norm, and statistics of it."""

    def __init__(self, width):
        super().__init__()
        self.up, self.norm = nn.Linear(8, width), nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm(self.up(x))
        z = y.tanh().exp().sin()
        return (z.cumsum(0).cos() * y).sum()


SMALL = {
    "conv": lambda: (Conv(), torch.randn(4, 3, 8, 8)),
    "checkpointed": lambda: (Checkpointed(), torch.randn(4, 8)),
    "chain": lambda: (Chain(16), torch.randn(4, 8)),
    "branches": lambda: (Branches(16), torch.randn(4, 8)),
    "deep": lambda: (Deep(32), torch.randn(4, 8)),
    "normed": lambda: (Normed(8), torch.randn(4, 8)),
    "narrow writing": lambda: (Writing(16), torch.randn(4, 16)),
}
NAMES = [*TRANSFORMERS, *SMALL]
MODELS = [*TRANSFORMERS, "conv"]


class Captured(NamedTuple):
    """A training step, with the inputs and what eager gives."""

    joint: Joint
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: tuple[Any, ...]


def example(name):
    """A model with inputs and named inputs."""
    torch.manual_seed(1)
    if name in SMALL:
        model, x = SMALL[name]()
        return model, (x,), {}
    return _parts(net(name) if name in NETS else build(name, **TRANSFORMERS[name]))


def _parts(made):
    return made.model, made.args, made.kwargs


@cache
def captured(name):
    """The joint graph of a model; nobody may change it."""
    with torch.random.fork_rng():
        if name in NETS:
            joint, (model, args, kwargs) = wide(name)[0], _parts(wide(name)[1])
        else:

            def make():
                model, args, kwargs = example(name)
                return capture_joint(model, *args, **kwargs, loss=loss_or_sum), (model, args, kwargs)

            joint, (model, args, kwargs) = stored(f"joint {name}", make)
        return Captured(joint, args, kwargs, eager(model, args, kwargs))


@cache
def step_of(layers, **sizes):
    """The joint graph of a GPT-2 without dropout, and its prices; nobody may change it."""
    wanted = {"layers": layers, "width": 64, "heads": 2, "batch": 2, "seq": 32, "vocab": 101, **sizes}

    def make():
        made = build("gpt2", **wanted)
        for module in made.model.modules():
            module.training = False
        return capture_joint(made.model, *made.args, **made.kwargs, loss=loss_or_sum)

    joint = stored(f"step of {sorted(wanted.items())}", make)
    return joint, roofline(joint.graph_module, "a100")


def net(name):
    """One of `NETS`, with four words in each row: each is one more copy of a recurrent cell in the graph."""
    made = NETS[name]()
    return Example(made.model, (made.args[0][:, :4],), {}) if name == "lstm" else made


def wider(name):
    """An example model or net of width 64, with inputs."""
    if name in NETS:
        return net(name)
    sizes = {"image": 32} if name == "vit" else {"seq": 16, "vocab": 101}
    return build(name, **{**WIDER, "layers": 2 if name == "gpt2" else 1}, **sizes)


@cache
def wide(name):
    """The joint graph of a model as `wider` makes it, and the example; nobody may change them."""

    def make():
        torch.manual_seed(0)
        made = wider(name)
        return capture_joint(made.model, *made.args, **made.kwargs, loss=loss_or_sum), made

    return make() if name in NETS else stored(f"wide {name}", make)


def eager(model, args, kwargs, loss=None):
    """Loss, gradients and buffers of one eager step from seed 0, on a copy of the model."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    output = model(*args, **kwargs)
    value = loss(output) if loss else output.loss if hasattr(output, "loss") else output.sum()
    value.backward()
    return value.detach(), {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())


def assert_steps_alike(step, expected):
    """Loss, gradients and buffers to the bit."""
    loss, gradients, buffers = expected
    assert torch.equal(step.loss, loss)
    assert {n for n, g in gradients.items() if g is not None} == {
        n for n in step.gradients if not n.startswith("input ")
    }
    for name, gradient in gradients.items():
        if gradient is not None:
            assert torch.equal(step.gradients[name], gradient), name
    for name, value in step.updates.items():
        assert torch.equal(value, buffers[name])


def assert_stages_alike(step, expected):
    """To the bit, but for the gradients of tied parameters, whose terms stages may add up in another order."""
    close = {
        name: gradient
        for name, gradient in expected[1].items()
        if gradient is not None and torch.allclose(step.gradients[name], gradient, rtol=1e-5, atol=1e-7)
    }
    assert_steps_alike(replace(step, gradients={**step.gradients, **close}), expected)


def ran(joint, pair, args, kwargs):
    """A step of a pair from seed 0."""
    torch.manual_seed(0)
    outputs, gradients = pair.run(joint.primals(*args, **kwargs), joint.tangents())
    return joint.read([*outputs, *gradients])


def assert_step_like_eager(model, policy, *args, **kwargs):
    joint = capture_joint(model, *args, **kwargs)
    assert_pair_like_eager(joint, policy, *args, **kwargs)
    return joint


def assert_pair_like_eager(joint, policy, *args, **kwargs):
    """The pair that the policy makes, run, against eager; and its memory, simulated."""
    pair = joint.split(policy)
    assert sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak > 0
    outputs, gradients = pair.run(joint.primals(*args, **kwargs), joint.tangents())
    found = joint.read([*outputs, *gradients])
    plain = copy.deepcopy(joint.model)
    loss = plain(*args, **kwargs)
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert expected.keys() <= found.gradients.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found.gradients[name], gradient)


class Checked(nn.Module):
    """Its body checks something on the way, in an op that yields nothing."""

    def __init__(self, body):
        super().__init__()
        self.linear, self.w, self.body = nn.Linear(4, 4), nn.Parameter(torch.rand(4) + 1), body

    def forward(self, x):
        return self.body(self, x)
