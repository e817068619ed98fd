from __future__ import annotations

import json

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit.plans.parts import Part
from splitkit.plans.record import Plan
from splitkit.units import quantity, size
from splitkit.view.console import show, to_text
from splitkit.view.data.report import collapse


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.second = nn.Linear(8, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())


@pytest.fixture
def gm():
    return sk.capture(Two(), torch.ones(2, 4))


def test_the_numbers_of_each_part(gm):
    flow = sk.analyze(gm)
    plan = Plan.of({n: int(i > 0) for i, n in enumerate(flow.nodes)}, note="by hand")
    report = sk.report(gm, plan)
    first, second = report.parts
    assert (first.part, first.modules, first.ops, first.parameters) == ("0", "first", 1, 32)
    assert (first.bytes_in, first.bytes_out, first.parameter_bytes) == (2 * 4 * 4, 2 * 8 * 4, 32 * 4)
    assert (second.bytes_in, second.bytes_out, second.parameters) == (2 * 8 * 4, 2 * 4 * 4, 36)
    assert first.flops == 2 * 2 * 4 * 8 and second.modules == "second, (top level) (1 of 1 own)"
    assert first.share + second.share == pytest.approx(1)
    assert report.total.parameters == 68 and report.note == "by hand"
    assert (report.total.bytes_in, report.total.bytes_out) == (2 * 4 * 4, 2 * 4 * 4)
    assert json.loads(json.dumps(report.to_dict()))["parts"][0]["modules"] == "first"


def test_the_parent_has_a_row_when_it_computes_and_devices_a_column(gm):
    flow = sk.analyze(gm)
    plan = Plan({flow.nodes[0]: ("gpu",)}, {"gpu": Part("gpu", torch.device("cuda:0"))})
    report = sk.report(gm, plan)
    assert [p.part for p in report.parts] == ["gpu", "parent"]
    assert "device" in str(report) and "cuda:0" in str(report)


def test_a_graph_without_sizes_has_a_report_without_sizes(chain):
    report = sk.report(chain, Plan.of(dict.fromkeys(sk.analyze(chain).nodes, 0)))
    assert not report.sizes_known and report.parts[0].share == 1
    assert " - " in str(report)


def test_shared_and_called_parameters_count_once_a_part():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    for how in ("export", "symbolic_trace"):
        gm = sk.capture(Tied(), torch.ones(1, 4), how=how)
        assert sk.report(gm, sk.plan(gm, lambda n: 0)).parts[0].parameters == 16
        assert [p.parameters for p in sk.report(gm, sk.plan(gm, sk.policies.Stages(2))).parts] == [16, 16]


def test_names_are_never_truncated(gm, capsys):
    name = "x" * 300
    text = str(sk.report(gm, Plan.of(dict.fromkeys(sk.analyze(gm).nodes, name))))
    assert name in text
    show(text)
    assert name in capsys.readouterr().out


def test_text_off_a_terminal_is_plain(gm, capsys):
    report = sk.report(gm, sk.plan(gm, sk.policies.Stages(2)))
    show(report.table())
    out = capsys.readouterr().out
    assert "\x1b" not in out and to_text(report.table()) in out


@pytest.mark.parametrize(
    ("here", "everywhere", "names"),
    [
        (
            ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "h.2.attn"],
            ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "h.2.attn", "h.2.mlp"],
            ["h.0-1", "h.2 (1 of 2)"],
        ),
        (["a", "b"], ["a", "b"], ["(the whole model)"]),
        (["", "a"], ["", "", "a"], ["a", "(top level) (1 of 2 own)"]),
        (["h.0", "h.2", "h.3"], ["h.0", "h.1", "h.2", "h.3"], ["h.0", "h.2-3"]),
        (["h.9", "h.10"], ["h.9", "h.10", "x"], ["h"]),
        (["enc.h.0", "dec.h.1"], ["enc.h.0", "enc.h.1", "dec.h.0", "dec.h.1"], ["enc.h.0", "dec.h.1"]),
        ([], ["a"], []),
    ],
)
def test_modules_collapse_to_ranges(here, everywhere, names):
    assert collapse(here, everywhere) == names


def test_numbers_for_people():
    assert [quantity(v) for v in (0, 7, 999, 1000, 12345, 999_999, 1.5e9, 0.25)] == [
        "0", "7", "999", "1.00 k", "12.35 k", "1.00 M", "1.50 G", "0.25",
    ]  # fmt: skip
    assert [size(v) for v in (0, 1000, 1536, 5 * 2**30)] == ["0 B", "1000 B", "1.50 KiB", "5.00 GiB"]


def test_parameters_of_bodies_count():
    root, graph = nn.Module(), fx.Graph()
    root.body = nn.Linear(4, 4)
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("body"), "one", x)))
    gm = fx.GraphModule(root, graph)
    (part,) = sk.report(gm, sk.plan(gm, lambda node: 0), sk.costs.unit(gm)).parts
    assert (part.parameters, part.parameter_bytes) == (20, 80)


def test_replicas_are_shown_where_there_are_some(gm):
    flow = sk.analyze(gm)
    places = {n: (int(i > 0),) for i, n in enumerate(flow.nodes)}
    report = sk.report(gm, Plan(places, {0: Part(0, replicas=2), 1: Part(1)}))
    assert [part.replicas for part in report.parts] == [2, 1] and "x2" in str(report)
    assert "replicas" not in str(sk.report(gm, Plan(places, {0: Part(0), 1: Part(1)})))
