"""A dry run of a compiled step predicts the memory of the real step: predicted and measured peaks."""

from __future__ import annotations

import shutil

import pytest
import torch
from campaigns import these_first
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import codecache
from torch._inductor import config as inductor_config

import splitkit as sk
from splitkit.policies import SaveAll

plain_kernels = inductor_config.patch("cpp.simdlen", 0)
"""Kernels without vectors take the C++ compiler half as long; buffers are the same."""

X = torch.randn(64, 16)


class Net(nn.Module):
    """Blocks with dropout, a buffer that forward updates, a tied weight and a dictionary as output."""

    def __init__(self, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = blocks
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.2)

    def forward(self, x):
        for _ in range(self.blocks):
            x = self.second(self.drop(nn.functional.gelu(self.norm(self.first(x)))))
        return {"loss": x.square().mean(), "out": x}


def measured(net, backend):
    """Return the memory of the second step, in which nothing is compiled."""
    torch._dynamo.reset()
    compiled = torch.compile(net, backend=backend)

    def step(module, x):
        compiled(x)["loss"].backward()

    step(net, X)
    net.zero_grad()
    found = sk.measure_memory(step, net, X, allocator=True)
    net.zero_grad()
    return found


BACKENDS = {"torch": lambda: "inductor", "SaveAll": lambda: sk.backend(SaveAll(), "inductor"),
            "least": lambda: sk.backend("least", "inductor")}  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("name", these_first(["least"], ["torch", "SaveAll"]))
@plain_kernels
def test_the_peak_under_inductor_is_predicted_to_the_byte(name):
    net, backend = Net(), BACKENDS[name]()
    predicted = sk.dry_run(net, X, backend=backend)
    found = measured(net, backend)
    assert predicted.peak == found.peak == found.allocator_peak
    assert (predicted.baseline, predicted.end) == (found.baseline, found.end)


@pytest.mark.parametrize("backend", ["aot_eager", "eager", sk.backend("least")], ids=["aot_eager", "eager", "least"])
def test_the_peak_op_by_op_is_predicted_to_the_byte(backend):
    net = Net()
    assert sk.dry_run(net, X, backend=backend).peak == measured(net, backend).peak


class Chain(nn.Module):
    def forward(self, x):
        return (x.sin().cos().exp().tanh() * 2).sum()


@plain_kernels
def test_what_fusion_removes_does_not_count():
    """Forward reads x and writes a number; backward reads x and the number's gradient, and writes the gradient of x."""
    x = torch.randn(1024, requires_grad=True)
    memory = sk.dry_run(Chain(), x, backend="inductor")
    assert memory.baseline == 4096
    assert 2 * 4096 <= memory.peak <= 2 * 4096 + 16
    assert sk.dry_run(Chain(), x).peak >= 5 * 4096


@plain_kernels
def test_a_dry_run_leaves_nothing_behind():
    net = Net(1)
    net(X)["loss"].backward()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = [p.grad.clone() for p in net.parameters()]
    modules, state = list(codecache.PyCodeCache.modules), torch.get_rng_state()
    donated, stored = functorch_config.donated_buffer, inductor_config.fx_graph_cache
    backend = sk.backend("least", "inductor")
    first, second = (sk.dry_run(net, X, backend=backend) for _ in range(2))
    assert first.peak == second.peak and not backend.pairs
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(p.grad, old) for p, old in zip(net.parameters(), gradients, strict=True))
    assert codecache.PyCodeCache.modules == modules and torch.equal(torch.get_rng_state(), state)
    assert (donated, stored) == (functorch_config.donated_buffer, inductor_config.fx_graph_cache)
    net.zero_grad()
    gradient_bytes = sum(g.numel() * 4 for g in gradients)
    assert first.baseline - sk.dry_run(net, X).baseline == gradient_bytes


def test_the_peak_does_not_depend_on_the_sizes_of_earlier_calls():
    net, backend = Net(), sk.backend(0.5)
    first = sk.dry_run(net, X, backend=backend)
    sk.dry_run(net, X[:10], backend=backend)
    assert sk.dry_run(net, X[:32], backend=backend).peak < first.peak
    assert sk.dry_run(net, X, backend=backend) == first


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, x):
        y = self.linear(x).sum()
        torch._dynamo.graph_break()
        return y * 2


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Net(), {"backend": "inducto"}, "SK302.*no backend 'inducto'\n.*inductor"),
        (Net(), {"backend": 3}, "SK302.*int is no backend"),
        (Broken(), {"backend": "aot_eager"}, "SK401.*captured by dynamo(.|\n)*becomes one graph"),
        (nn.Linear(16, 2), {"backend": "aot_eager"}, "SK401.*no loss"),
        (nn.Linear(16, 1, device="meta"), {"backend": "aot_eager"}, "SK401.*on meta.*CPU"),
        (Net(), {"backend": sk.backend("1KiB")}, "SK303"),
    ],
    ids=["name", "type", "breaks", "loss", "device", "budget"],
)
def test_refusals(model, options, message):
    with pytest.raises(sk.SplitError, match=message):
        sk.dry_run(model, X, **options)
