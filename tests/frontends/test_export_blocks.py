"""A capture keeps the model's grad-mode and autocast blocks, whatever its caller or other threads do."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.policies import RoundRobin
from splitkit.testing import assert_same


def test_a_no_grad_block_around_control_flow_is_kept():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                z = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,))
                w = y.tan()
            return y + z + w

    model, x = Branches(), torch.randn(2, 4)
    gm = sk.capture(model, x)
    assert_same(model, gm, x)
    assert_same(model, sk.split(gm, RoundRobin(2)), x)


def test_no_grad_inside_autocast_is_kept():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @torch.no_grad()
        def frozen(self, x):
            return self.linear(x).tanh()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    a = self.linear(x).sin()
                b = self.linear(x)
                c = self.frozen(x)
            with torch.no_grad():
                d = self.linear(x)
                with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
                    e = self.linear(x)
                f = self.linear(x)
            return a, b, c, d, e, f

    model, x = Mixed(), torch.randn(2, 4)
    gm = sk.capture(model, x)
    wanted = [v.requires_grad for v in model(x)]
    for made in (gm, sk.split(gm, RoundRobin(1)), sk.split(gm, RoundRobin(3))):
        assert [v.requires_grad for v in made(x)] == wanted == [False, True, False, False, True, False]
        assert_same(model, made, x, tolerance=1e-2)
        with torch.no_grad():
            made(x)
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()


def grad_modes(model, x):
    """requires_grad of the outputs and the caller's mode afterwards, called with grad mode on and off."""
    found = []
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            found.append(([y.requires_grad for y in model(x)], torch.is_grad_enabled()))
    return found


class GradBlocks(nn.Module):
    """One way of changing grad mode, given by name."""

    def __init__(self, way):
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    @torch.set_grad_enabled(False)
    def decorated(self, x):
        return self.linear(x)

    def forward(self, x):
        return getattr(self, self.way)(x)

    def set_off(self, x):
        with torch.set_grad_enabled(False):
            y = self.linear(x)
        return y, self.linear(x), self.decorated(x)

    def set_on(self, x):
        with torch.set_grad_enabled(True):
            y = self.linear(x)
        return y, self.linear(x)

    def sequence(self, x):
        with torch.enable_grad():
            a = self.linear(x)
        with torch.no_grad():
            b = self.linear(x)
        with torch.enable_grad(), torch.enable_grad():
            c = self.linear(x)
        return a, b, c, self.linear(x)

    def nested(self, x):
        with torch.no_grad():
            with torch.enable_grad():
                a = self.linear(x)
            b = self.linear(x)
        return a, b, self.linear(x)

    def inference(self, x):
        with torch.inference_mode():
            a = self.linear(x)
        with torch.no_grad(), torch.inference_mode(False):
            b = self.linear(x)
        return self.linear(x), a, b

    def plainly(self, x):
        torch.set_grad_enabled(False)
        a = self.linear(x)
        torch.set_grad_enabled(True)
        return a, self.linear(x)

    def branches(self, x):
        def frozen(v):
            with torch.no_grad():
                return v * 2

        return torch.cond(x.sum() > 0, frozen, lambda v: v * 3, (x,)), self.linear(x)


@pytest.mark.parametrize(
    "way", ["set_off", "set_on", "sequence", "nested", "inference", "plainly", "branches", "decorated_alone"]
)
def test_every_block_of_grad_mode_is_kept(way):
    if way == "decorated_alone":
        GradBlocks.decorated_alone = lambda self, x: (self.decorated(x), self.linear(x))
    model, x = GradBlocks(way), torch.ones(2, 4)
    gm = sk.capture(model, x)
    wanted = grad_modes(model, x)
    torch.set_grad_enabled(True)
    assert grad_modes(gm, x) == wanted
    torch.set_grad_enabled(True)
    assert grad_modes(sk.split(gm, RoundRobin(2)), x) == wanted


def test_captures_in_threads_leave_export_as_it_was():
    results = []

    def work(depth):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)])
        results.append(sk.capture(model, torch.ones(1, 4)))

    threads = [threading.Thread(target=work, args=(depth,)) for depth in (2, 9, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    exported = torch.export.export(GradBlocks("nested"), (torch.ones(1, 4),), strict=False)
    assert any("wrap_with_set_grad_enabled" in str(n.target) for n in exported.graph.nodes)


def test_inference_mode_of_the_caller_changes_nothing_that_is_captured():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(1, 4)
    with torch.inference_mode():
        gm = sk.capture(model, x)
    assert gm.graph.find_nodes(op="output")[0].args[0][0].meta["val"].dtype == torch.float32
    assert_same(model, sk.split(gm, RoundRobin(2)), torch.ones(1, 4))


def test_a_capture_leaves_other_threads_alone():
    inside, done, entered = threading.Event(), threading.Event(), threading.Event()
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Waits(nn.Module):
        def forward(self, x):
            inside.set()
            assert done.wait(60)
            with torch.no_grad():
                y = x * 3
            return Twice.apply(x) + y

    def train():
        block = torch.inference_mode()
        block.__enter__()
        entered.set()
        try:
            assert inside.wait(60)
            block.__exit__(None, None, None)
            x = torch.ones(2, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), torch.set_grad_enabled(True):
                Twice.apply(x).sum().backward()
            seen.extend([x.grad.tolist(), torch.is_grad_enabled()])
        except Exception as error:
            seen.append(error)
        finally:
            done.set()

    other = threading.Thread(target=train)
    other.start()
    assert entered.wait(60)
    model, x = Waits(), torch.ones(2, requires_grad=True)
    gm = sk.capture(model, x)
    other.join()
    assert seen == [[2.0, 2.0], True]
    assert_same(model, gm, x)
