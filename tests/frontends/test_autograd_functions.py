"""Autograd Functions are captured with their backwards; what would be lost is refused with the line."""

from __future__ import annotations

import copy

import pytest
import torch
from campaigns import these_first
from custombackwards import BACKWARDS, Net, Pair, Scaled, Through
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # 2.11, 2.13, 2.15
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import splitkit as sk
from splitkit import _torch
from splitkit.errors import CaptureError
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
    with pytest.raises(CaptureError, match=r"(?s)SK404: the backward of Through .*a Linear.*autograd_functions.py:\d+"):
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

    with pytest.raises(CaptureError, match=r"SK404: .*closes over"):
        sk.capture(Net(closes_over), x)
    with pytest.raises(CaptureError, match=r"SK404: .*torch.func"):
        sk.capture(Net(lambda net, h: torch.vmap(lambda t: Pair.apply(t[None], net.a.weight)[0])(h)), x)
    quiet = Net(lambda net, h: torch.no_grad()(Through.apply)(h, net.b) + h)  # no gradient, nothing to lose
    sk.compare(quiet, sk.capture(quiet, x), x).raise_if_different()


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 3


@pytest.mark.parametrize(
    "of_ids",
    [
        lambda net, ids: torch.vmap(Doubled.apply)(ids),
        lambda net, ids: torch.no_grad()(torch.vmap(Doubled.apply))(net.a.weight),
    ],
)
def test_a_function_under_vmap_that_needs_no_gradient_is_captured(of_ids):
    net, x = Net(lambda net, h: h + of_ids(net, torch.arange(4))), torch.randn(4, 4)
    gm = sk.capture(net, x)
    assert sk.compare(net, sk.split(gm, sk.policies.Stages(2)), x).same


class Flex(torch.nn.Module):
    """FlexAttention with a mask or a score of its own, of [batch, 16, 2 heads of 4]."""

    def __init__(self, mask, score):
        super().__init__()
        self.qkv, self.out, self.mask, self.score = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8), mask, score
        self.register_buffer("documents", torch.arange(16) // 5)
        self.bias = torch.nn.Parameter(torch.randn(2, 32))

    def forward(self, x):
        q, k, v = self.qkv(x).view(-1, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = self.mask and (lambda b, h, i, j: self.mask(self, b, h, i, j))
        score = self.score and (lambda s, b, h, i, j: self.score(self, s, b, h, i, j))
        made = mask and create_block_mask(mask, None, None, 16, 16, device="cpu")
        y = flex_attention(q, k, v, score, made)
        return self.out(y.transpose(1, 2).flatten(2))


def same_document(net, b, h, i, j):
    return (i >= j) & (net.documents[i] == net.documents[j])


@pytest.mark.parametrize(
    ("mask", "score", "autocast"),
    these_first(
        [(same_document, lambda net, s, b, h, i, j: s + net.bias[h, i - j + 16], True)],
        [
            (same_document, None, False),
            (None, lambda net, s, b, h, i, j: s + net.bias[h, i - j + 16], False),
            (lambda net, b, h, i, j: (i >= j) & (i - j < 4), None, True),
        ],
    ),
)
def test_flex_attention_is_captured_and_split(mask, score, autocast):
    net = Flex(mask, score).requires_grad_(False)  # the CPU has no backward
    x = torch.randn(2, 16, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        gm = sk.capture(net, x)
        split = sk.split(gm, sk.policies.Stages(2))
        assert len(split.parts) == 2 and sk.compare(net, split, x).same
    flow = sk.analyze(gm)
    assert not flow.written and all(flow.effects[node].known for node in flow.nodes)


def test_a_mask_made_from_a_learned_table_keeps_its_gradient_and_can_be_planned_jointly():
    def learned(net, h):
        with TransformGetItemToIndex():
            return h * torch.vmap(lambda i: torch.vmap(lambda j: net.a.weight[i, j])(i + ids))(ids)

    ids = torch.zeros(4, dtype=torch.long)
    net, x = Net(learned), torch.randn(4, 4)
    gm = sk.capture(net, x)
    found = sk.compare(net, sk.split(gm, sk.policies.Stages(2)), x)
    assert found.same and any(d.name == "gradient of a.weight" for d in found.gradients)
    assert sk.capture_joint(gm, x, loss=torch.sum).graph_module.graph.nodes
    assert _torch.functorch_depth() == 0


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
        with pytest.raises(CaptureError, match=r"(?s)SK405.*autograd_functions.py:\d+"):
            sk.capture(Net(f), x)
    net = Net(lambda net, h: h)
    handle = net.a.register_full_backward_hook(lambda module, given, out: (given[0] * 2,))
    with pytest.raises(CaptureError, match=r"SK405: a \(Linear\) has a backward hook"):
        sk.capture(net, x)
    handle.remove()
    sk.compare(net, sk.capture(net, x), x).raise_if_different()


bound_before = Scaled.apply  # as PyTorch's own tutorials write it


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
def test_a_function_whose_apply_was_bound_before_keeps_its_backward_or_is_refused(how):
    torch.manual_seed(0)
    model, x = Net(lambda net, h: bound_before(h) + bound_before(h * 2)), torch.randn(4, 4)
    if not isinstance(vars(torch.autograd.Function)["apply"], classmethod):  # torch 2.15: nobody can step in
        with pytest.raises(CaptureError, match=r"SK404: the backward of Scaled would be lost: it was bound before"):
            sk.capture(model, x, how=how)
        return
    gm = sk.capture(model, x, how=how)
    assert sum(type(n.target).__name__ == "FunctionCall" for n in gm.graph.nodes) == 2
    wanted, found = (torch.autograd.grad(f(x), f.a.weight)[0] for f in (model, gm))
    assert torch.equal(wanted, found)
    assert sk.compare(model, sk.split(gm, RoundRobin(2)), x).same
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)  # nothing is left behind
