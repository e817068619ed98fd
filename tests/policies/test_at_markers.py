"""Parts that begin at markers; see also tests/consumers/test_pipelining.py and test_export.py."""

from __future__ import annotations

import pytest
import torch
from policygraphs import graph, labels
from torch import fx, nn

import splitkit as sk
from splitkit._torch import EXIT_AUTOCAST, SET_GRAD
from splitkit.errors import PolicyError
from splitkit.policies import AtMarkers
from splitkit.testing import assert_same


def test_markers_begin_parts():
    s, c = torch.sin, torch.cos
    assert labels(graph(c, s, c, s, s, c), AtMarkers([s])) == [0, 1, 1, 2, 3, 3]
    assert labels(graph(s, c), AtMarkers([s])) == [0, 0], "no part is empty"
    assert labels(graph(c, c), AtMarkers([s])) == [0, 0]
    assert labels(graph(), AtMarkers([s])) == []


def test_a_marker_that_only_writes_computes():
    class Model(nn.Module):
        def forward(self, x):
            y = x.sin()
            y.add_(1)
            return y.cos()

    assert labels(fx.symbolic_trace(Model()), AtMarkers("add_")) == [0, 1, 1]


class Scopes(nn.Module):
    """A model with no_grad twice in a row, and autocast."""

    def forward(self, x):
        x = x.sin()
        with torch.no_grad():
            y = x.cos()
        with torch.no_grad():
            y = y.exp()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = y @ y
        return x * y


def test_state_ops_are_markers_though_they_have_no_place():
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda x: Scopes()(x), pre_dispatch=True)(torch.randn(4, 4))
    flow = sk.analyze(gm)
    plan = AtMarkers([SET_GRAD]).assign(flow, sk.costs.unit(gm))
    homes = {n.name: plan.home(n) for n in flow.nodes}
    assert [homes[n] for n in ("sin", "cos", "exp", "mul")] == [0, 1, 2, 3], "True, False in a row begin one part"
    assert set(labels(gm, AtMarkers([EXIT_AUTOCAST]))) == {0, 1}
    assert_same(gm, sk.split(gm, plan), torch.randn(4, 4), tolerance=1e-2)


class Nested(nn.Module):
    """Layers with a norm in between, the first of which is called again at the end."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3))
        self.norm = nn.LayerNorm(2)

    def forward(self, x):
        for layer in self.h:
            x = layer(x)
        return self.h[0](self.norm(x))


def test_borders_of_modules():
    gm = sk.capture(Nested(), torch.ones(1, 2))  # h.0 h.0 h.1 h.1 h.2 h.2 norm h.0 h.0
    assert labels(gm, AtMarkers({"h.1": "beginning"})) == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert labels(gm, AtMarkers({"h.1": "end"})) == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert labels(gm, AtMarkers({"h.1": "END", "h.2": "BEGINNING"})) == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert labels(gm, AtMarkers({"h.0": "beginning"})) == [0, 0, 0, 0, 0, 0, 0, 1, 1], "each call is a visit"
    assert labels(gm, AtMarkers({"h": "end"})) == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert labels(gm, AtMarkers({"h.1.1": "beginning", "norm": "beginning"})) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert labels(gm, AtMarkers({"h": "beginning", "h.1": "beginning"})) == [0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert labels(gm, AtMarkers({"h.1.0": "beginning", "h.1.1": "beginning"})) == [0, 0, 1, 2, 2, 2, 2, 2, 2]
    assert labels(gm, AtMarkers({})) == [0] * 9
    made = sk.split(gm, AtMarkers({"h.1": "beginning", "norm": "end"}))
    assert_same(gm, made, torch.randn(1, 2))


def test_markers_that_make_no_sense():
    gm = sk.capture(Nested(), torch.ones(1, 2))
    with pytest.raises(PolicyError, match=r"(?s)SK304: the graph has no module 'h\.7'.*h\.[012]"):
        labels(gm, AtMarkers({"h.7": "beginning"}))
    with pytest.raises(PolicyError, match=r"(?s)SK302: .*'h\.1' is to be cut at 'middle'.*'beginning' or 'end'"):
        labels(gm, AtMarkers({"h.1": "middle"}))
    with pytest.raises(PolicyError, match=r"(?s)SK304.*carries no module paths"):
        labels(graph(torch.sin), AtMarkers({"h": "end"}))
