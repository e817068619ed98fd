"""export's `sequential_split`, with which it makes higher-order ops of grad-mode and autocast blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._export.utils import sequential_split
from torch.fx.experimental.proxy_tensor import make_fx

import splitkit as sk
from splitkit.policies import AtMarkers


class NoGrad(nn.Module):
    """A no_grad block with an enable_grad block inside, two of them in a row, and one that nothing reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.a(x).relu()
        with torch.no_grad():
            y = self.b(x).sigmoid()
            with torch.enable_grad():
                z = self.c(y) + x
        with torch.no_grad():
            w, v = self.c(z).chunk(2)
        return self.a(x) * y, z, w, v


class Autocast(nn.Module):
    """Autocast with its opposite inside."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = self.a(x).relu()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.c(x) * x
            w, v = y.chunk(2)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                v = self.b(v.float())
        return self.a(x) + y.float(), w, v


class Both(nn.Module):
    """Autocast inside no_grad, and no_grad inside autocast."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            y = self.b(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.c(y) + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.c(x) * y
            with torch.no_grad():
                w = self.a(z)
        return z.float() + x, w


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [NoGrad, Autocast])
def test_exported_programs_are_the_same(use, make, strict):
    model, x = make(), torch.randn(4, 8)
    ours, theirs = (_exported(use, engine, model, x, strict) for engine in ("splitkit", "torch"))
    assert _picture(ours.graph_module) == _picture(theirs.graph_module)
    assert [s.kind for s in ours.graph_signature.output_specs] == [s.kind for s in theirs.graph_signature.output_specs]
    assert _same(ours.module()(x), model(x))


def test_no_grad_inside_autocast_is_lost_in_torch(use):
    model, x = Both(), torch.randn(4, 8)
    assert _same(_exported(use, "splitkit", model, x, strict=False).module()(x), model(x))
    assert not _same(_exported(use, "torch", model, x, strict=False).module()(x), model(x)), "torch is mended"


def _exported(use, engine, model, x, strict):
    spy = use(engine)
    program = torch.export.export(model, (x,), strict=strict)
    assert spy.made
    return program


def _same(got, expected):
    """Equal, with and without gradient alike."""
    return all(torch.equal(a, b) and a.requires_grad == b.requires_grad for a, b in zip(got, expected, strict=True))


def test_a_model_of_transformers(use, small):
    model, inputs = small("llama")
    model.eval()
    spy = use("splitkit")
    program = torch.export.export(model, (), inputs, strict=False)
    assert spy.made
    assert torch.equal(program.module()(**inputs).logits, model(**inputs).logits)


def _picture(gm):
    """Ops of the graph and of the bodies in it, in order."""
    return {name: [str(n.target) for n in m.graph.nodes if n.op == "call_function"] for name, m in gm.named_modules()}


def _is_set_grad(node):
    return node.target is torch._C._set_grad_enabled


def test_the_policy_makes_the_parts_of_sequential_split():
    def model(x, w):
        x = (x @ w).relu()
        with torch.no_grad():
            y = (x @ w).sigmoid()
            with torch.enable_grad():
                y = y + 1
        return x * y, y

    gm = make_fx(model, pre_dispatch=True)(torch.randn(8, 8), torch.randn(8, 8))
    theirs = sequential_split(gm, _is_set_grad)
    made = sk.split(gm, AtMarkers(_is_set_grad))
    ours = [[n.name for n in s.nodes] for s in made.subgraphs.values()]
    inside = [[n.name for n in m.graph.nodes if n.op == "call_function"] for _, m in theirs.named_children()]
    computing = [[name for name in part if "set_grad" not in name] for part in inside]
    assert ours == [part for part in computing if part], "torch makes a part of two markers in a row too, an empty one"
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    assert all(map(torch.equal, made(x, w), gm(x, w)))
