"""Nets that write memory get no plan that a runtime refuses: what it would not have in two stages is in one."""

from __future__ import annotations

import pytest
import torch
from handgraphs import graph_of
from torch import nn

import splitkit as sk
from splitkit.pipeline.inseparable_nodes import together
from splitkit.policies import Stages
from splitkit.runtime.devices.device_map import places_of
from splitkit.runtime.ranks.stage_chain import chain_of

KINDS = ("relu", "add", "view", "slice", "buffer", "early", "index", "strided", "plain")


class Writing(nn.Module):
    """Layers each of which writes memory in its own way."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = kinds
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in kinds)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = getattr(self, f"_{kind}")(layer(x), x)
        return x.sum()

    def _plain(self, h, x):
        return torch.tanh(h)

    def _relu(self, h, x):
        return h.relu_()

    def _add(self, h, x):
        y = h * 1
        z = y.sin()
        y += x
        return y + z

    def _view(self, h, x):
        y = h.clone()
        y.view(-1).mul_(2)
        return y + 1

    def _slice(self, h, x):
        y = h * 1
        y[:, 2:4].zero_()
        return y

    def _buffer(self, h, x):
        self.count.add_(1)
        return h + self.count

    def _early(self, h, x):
        y = h.detach() * 2
        early = y.sin()
        y.mul_(3)
        return h + early + y

    def _index(self, h, x):
        y = torch.zeros_like(h)
        y[h > 0] = 1
        return h * y

    def _strided(self, h, x):
        y = h.t()
        return torch.as_strided(y, (4, 8), (8, 1)) + 1


ASKED = (
    {},
    {"links": "nvlink4"},
    {"schedule": "1f1b", "links": "nvlink4", "memory": "least"},
    {"schedule": "zbv", "links": "nvlink4"},
)


SHORT = [(0, 0), (4, 0), (2, 1), (6, 3)]
CASES = [
    pytest.param(shift, ASKED[asked], marks=() if (shift, asked) in SHORT else pytest.mark.campaign)
    for shift in range(len(KINDS))
    for asked in range(len(ASKED))
]


@pytest.mark.parametrize(("shift", "asked"), CASES)
def test_no_plan_is_refused_by_the_runtime(shift, asked):
    kinds = [*KINDS[shift:], *KINDS[:shift], "buffer"][:7]
    gm = sk.capture(Writing(kinds), torch.randn(4, 8))
    split = sk.split(gm, sk.plan(gm, Stages(4, **asked)))
    assert chain_of(split).stages == 4
    places_of(split, {key: torch.device("cuda", number) for number, key in enumerate(split.parts)})


def sets_of(kinds):
    gm = sk.capture(Writing(kinds), torch.randn(4, 8))
    return [{node.name for node in nodes} for nodes in together(sk.analyze(gm))]


def test_what_reads_after_the_last_write_is_free():
    assert sets_of(["relu", "plain"]) == [{"linear", "relu_"}]
    assert sets_of(["plain", "plain"]) == []


def test_all_that_touches_a_buffer_that_is_written_is_together():
    (found,) = sets_of(["buffer", "plain", "buffer"])
    assert {"add_", "add", "add__1", "add_1"} <= found


def test_a_model_that_writes_one_memory_throughout_has_no_stages():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            x = x.clone()
            for layer in self.layers:
                x += layer(x.detach())
            return x

    gm = sk.capture(Running(), torch.randn(4, 8))
    with pytest.raises(sk.errors.NoPlanError, match="SK303.*memory that is written"):
        sk.plan(gm, Stages(4))


def test_what_makes_a_value_that_cannot_be_sent_is_with_all_that_reads_it():
    def write(g):
        x = g.placeholder("x")
        for value in (object(), None, 2.0):
            made = g.create_node("call_function", torch.sin, (x,), name="made")
            made.meta["val"] = value
            made.name = {None: "unknown", 2.0: "number"}.get(value, "odd")
            read = g.create_node("call_function", torch.cos, (made,), name=f"reads_{made.name}")
            read.meta["val"] = torch.ones(1)
        g.output(read)

    assert [[node.name for node in nodes] for nodes in together(sk.analyze(graph_of(write)))] == [["odd", "reads_odd"]]
