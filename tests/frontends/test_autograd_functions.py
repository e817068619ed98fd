"""Autograd Functions are captured with their backwards; what would be lost is refused with the line."""

from __future__ import annotations

import copy

import pytest
import torch
from custombackwards import BACKWARDS, Net, Pair, Scaled, Through

import splitkit as sk
from splitkit.graph.ops import effects_of
from splitkit.policies import RoundRobin


@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_custom_backwards_are_captured(name, dynamic):
    net, x = Net(BACKWARDS[name]), torch.randn(4, 4)
    gm = sk.capture(net, x, dynamic=dynamic)
    sk.compare(net, gm, x).raise_if_different()
    sk.compare(net, sk.split(gm, sk.policies.RoundRobin(3), on_cycle="refine"), x).raise_if_different()
    sk.compare(net, copy.deepcopy(gm), x).raise_if_different()


def test_symbolic_trace_keeps_custom_backwards():
    net, x = Net(BACKWARDS["scaled"]), torch.randn(4, 4)
    gm = sk.capture(net, x, how="symbolic_trace")
    sk.compare(net, gm, x).raise_if_different()


def test_a_kept_function_says_what_its_forward_does():
    gm = sk.capture(Net(BACKWARDS["in_place"]), torch.randn(4, 4))
    node = next(n for n in gm.graph.nodes if n.name.startswith("inplace"))
    effects = effects_of(node, gm)
    assert [n.name for n in effects.writes] == ["mul"] and effects.known and not effects.random
    noisy = sk.capture(Net(BACKWARDS["noisy"]), torch.randn(4, 4))
    effects = effects_of(next(n for n in noisy.graph.nodes if n.name.startswith("noisy")), noisy)
    assert effects.random and not effects.writes and not effects.aliases


def test_a_function_that_no_node_can_call_is_refused_with_its_line():
    x = torch.randn(4, 4)
    with pytest.raises(
        sk.CaptureError, match=r"(?s)SK404: the backward of Through .*a Linear.*autograd_functions.py:\d+"
    ):
        sk.capture(Net(lambda net, h: Through.apply(h, net.b)), x)

    def closes_over(net, h):
        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):
                return t * h

            @staticmethod
            def backward(ctx, g):
                return g

        return Inner.apply(h * 2)

    with pytest.raises(sk.CaptureError, match=r"SK404: .*closes over"):
        sk.capture(Net(closes_over), x)
    with pytest.raises(sk.CaptureError, match=r"SK404: .*torch.func"):
        sk.capture(Net(lambda net, h: torch.vmap(lambda t: Pair.apply(t[None], net.a.weight)[0])(h)), x)
    quiet = Net(lambda net, h: torch.no_grad()(Through.apply)(h, net.b) + h)  # no gradient, nothing to lose
    sk.compare(quiet, sk.capture(quiet, x), x).raise_if_different()


def test_hooks_on_gradients_are_refused_with_their_line():
    def hooked(net, h):
        h = h * 1
        h.register_hook(lambda g: g * 2)
        return h

    def packed(net, h):
        with torch.autograd.graph.saved_tensors_hooks(torch.round, lambda t: t):
            return h.sin()

    x = torch.randn(4, 4)
    for f in (hooked, packed):
        with pytest.raises(sk.CaptureError, match=r"(?s)SK405.*autograd_functions.py:\d+"):
            sk.capture(Net(f), x)
    net = Net(lambda net, h: h)
    handle = net.a.register_full_backward_hook(lambda module, given, out: (given[0] * 2,))
    with pytest.raises(sk.CaptureError, match=r"SK405: a \(Linear\) has a backward hook"):
        sk.capture(net, x)
    handle.remove()
    sk.compare(net, sk.capture(net, x), x).raise_if_different()


bound_before = Scaled.apply  # as PyTorch's own tutorials write it


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
def test_a_function_whose_apply_was_bound_before_keeps_its_backward_or_is_refused(how):
    torch.manual_seed(0)
    model, x = Net(lambda net, h: bound_before(h) + bound_before(h * 2)), torch.randn(4, 4)
    if not isinstance(vars(torch.autograd.Function)["apply"], classmethod):  # torch 2.15: nobody can step in
        with pytest.raises(sk.CaptureError, match=r"SK404: the backward of Scaled would be lost: it was bound before"):
            sk.capture(model, x, how=how)
        return
    gm = sk.capture(model, x, how=how)
    assert sum(type(n.target).__name__ == "FunctionCall" for n in gm.graph.nodes) == 2
    wanted, found = (torch.autograd.grad(f(x), f.a.weight)[0] for f in (model, gm))
    assert torch.equal(wanted, found)
    assert sk.compare(model, sk.split(gm, RoundRobin(2)), x).same
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)  # nothing is left behind
