"""Pictures, tables and the data of pages, whole, as they are stored: what no law says is the same as before.

Prices are formulas and weights are not read, so that a picture is the same on every machine.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from stagedsteps import captured, divided, recomputed
from storedtexts import as_lines, assert_stored
from torch import nn

import splitkit as sk
from splitkit.errors import CaptureError
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.trace import MeasuredStep
from splitkit.plans.record import checkpointed
from splitkit.policies import Budget
from splitkit.view import renderers
from splitkit.view.console import to_text
from splitkit.view.data.joint_ladder import HalvesView
from splitkit.view.data.report import report
from splitkit.view.data.staged_ladder import StagedView
from splitkit.view.renderers import capture_failure_html, pictured
from splitkit.view.svg.ladder_svg import halves_svg, staged_svg


class Block(nn.Module):
    """Reads the input of the model again, so that a border is crossed by more than the stream."""

    def __init__(self, wide):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, wide), nn.Linear(wide, 8)

    def forward(self, x, first):
        return x + self.down(torch.relu(self.up(self.norm(x)))) * first


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block(wide) for wide in (32, 32, 16))
        self.head = nn.Linear(8, 4)
        self.head.weight = nn.Parameter(self.embed.weight.detach().t().reshape(4, 8))

    def forward(self, x):
        h = first = self.embed(x)
        for layer in self.layers:
            h = layer(h, first)
        return self.head(h)


@cache
def planned():
    """The graph, three parts of it by module, prices, and stages; nobody may change them."""
    gm = sk.capture(Net(), torch.randn(6, 4))
    prices = sk.costs.training(sk.costs.roofline(gm, "h100"))
    last = {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": 2, "head": 2}
    seen = [0]

    def part(node):
        path = sk.graph.dataflow.module_path(node)
        seen[0] = max([seen[0], *(number for name, number in last.items() if path.startswith(name))])
        return seen[0]

    flow, plan = sk.analyze(gm), sk.plan(gm, part)
    return flow, plan, prices, sk.stage_costs(flow, plan, prices)


def slower(run):
    """The step of a run in which one action took three times as long, and each rank holds memory of its own."""
    events = [e._replace(end=e.start + 3 * (e.end - e.start)) if e.action == "1B2" else e for e in run.timeline]
    return MeasuredStep.of(run.order.name, events, [[(0.0, 1000), (1e-6, 3000)] for _ in range(run.ranks)])


@pytest.mark.parametrize("what", ["plain", "run", "measured", "beside", "checkpointed"])
def test_the_picture_and_the_data_of_a_plan(what):
    flow, plan, prices, stages = planned()
    run = sk.simulate_schedule(stages, "1f1b", 4, links="nvlink4")
    even = sk.plan(flow.root, lambda n: 3 * flow.index.get(n, 0) // (len(flow.index) + 1))
    options = {
        "plain": {"costs": sk.costs.flops(flow.root), "title": "three <parts> & more"},
        "run": {"costs": prices, "run": run, "memory": 6000},
        "measured": {"costs": prices, "run": run, "measured": slower(run), "optimizer": "adam"},
        "beside": {"costs": prices, "beside": [even], "optimizer": None},
        "checkpointed": {"costs": prices, "optimizer": "sgd"},
    }[what]
    picture = pictured(checkpointed(plan) if what == "checkpointed" else plan, **options)
    assert_stored(f"view/plan {what}.svg", picture.svg())
    assert_stored(
        f"view/plan {what}.txt", as_lines(picture.ladder().to_dict()) + "\n".join(map(to_text, picture.tables()))
    )


@cache
def joint():
    found = sk.capture_joint(Net(), torch.randn(6, 4), loss=torch.sum)
    return found, sk.costs.roofline(found.graph_module, "h100")


def test_the_picture_and_the_data_of_forward_and_backward():
    found, prices = joint()
    pairs = [found.split(Budget(share, "saved"), prices) for share in (0.5, 1.0)]
    view = HalvesView(found.flow, pairs, prices, "two choices", memory=4000)
    assert_stored("view/halves.svg", halves_svg(view))
    assert_stored("view/halves.txt", as_lines(view.to_dict()))
    picture = pictured(pairs[0], costs=prices, title="half")
    assert_stored("view/pair.svg", picture.fallback())
    assert_stored("view/pair.txt", "\n".join(map(to_text, picture.tables())))
    assert_stored("view/pair alone.svg", picture.svg())


@pytest.mark.parametrize("make", [divided, recomputed])
def test_the_picture_and_the_data_of_a_step_in_stages(make):
    step, prices = make(), captured()[1]
    view = StagedView(captured()[0].flow, step, prices, "stages", "sgd", 5000)
    assert_stored(f"view/stages {make.__name__}.svg", staged_svg(view))
    assert_stored(f"view/stages {make.__name__}.txt", as_lines(view.to_dict()))
    picture = pictured(step, costs=prices, memory="6KiB")
    assert_stored(f"view/step {make.__name__}.svg", picture.svg())
    assert_stored(f"view/step {make.__name__}.txt", "\n".join(map(to_text, picture.tables())))


STAGE = StageCosts(1e-3, 2e-3, 1e-3, saved_bytes=2**20, temporary_bytes=2**10, parameter_bytes=2**16)
LAST = StageCosts(2e-3, 3e-3, 1e-3, saved_bytes=2**19, activation_bytes=2**14, input_gradient_bytes=2**13)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "memory"),
    [
        ("gpipe", 2, 3, None),
        ("1f1b", 4, 6, "3MiB"),
        ("zbv", 4, 3, 2**20),
        ("interleaved1f1b", 6, 3, None),
        ("gpipe", 20, 3, None),
    ],
)
def test_the_picture_of_a_step(schedule, stages, microbatches, memory):
    ranks = None if schedule in ("gpipe", "1f1b", "zbv") else 3
    run = sk.simulate_schedule(
        [*[STAGE] * (stages - 1), LAST], schedule, microbatches, ranks=ranks, links=sk.costs.Links.uniform(1e9, 1e-5)
    )
    picture = pictured(run, memory=memory)
    assert_stored(f"view/{schedule} {stages}.svg", picture.svg())
    assert_stored(f"view/{schedule} {stages}.txt", "\n".join(map(to_text, picture.tables())))


def test_the_picture_of_memory_over_time():
    flow, plan, *_ = planned()
    found, prices = joint()
    pair = found.split(Budget(0.5, "saved"), prices)
    both = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    for name, profile, memory in (
        ("parts", sk.simulate_memory(sk.split(flow.root, plan)), None),
        ("pair", both, 3000),
        ("room", both, "1MiB"),
    ):
        picture = pictured(profile, memory=memory)
        assert_stored(f"view/memory {name}.svg", picture.svg())
        assert_stored(f"view/memory {name}.txt", "\n".join(map(to_text, picture.tables())))


def test_bars_and_the_table_of_a_report():
    flow, plan, prices, _ = planned()
    for name, found in (
        ("report", report(flow.root, plan, prices)),
        ("report flops", report(flow.root, sk.plan(flow.root, sk.policies.Stages(2)), sk.costs.flops(flow.root))),
    ):
        picture = pictured(found)
        assert_stored(f"view/{name}.svg", picture.svg())
        assert_stored(f"view/{name}.txt", to_text(found.table()) + "\n" + as_lines(found.to_dict()))


def test_the_dots_of_a_frontier_and_of_a_sweep():
    found, prices = joint()
    frontier = sk.Frontier(found, prices)
    assert_stored("view/frontier.svg", renderers.svg(frontier))
    assert_stored("view/frontier.txt", f"{frontier}\n" + "\n".join(map(to_text, pictured(frontier).tables())))
    flow, _, times, _ = planned()
    rows = sk.sweep(flow.root, times, stages=(2, 3), microbatches=(2, 4), schedules=("gpipe", "1f1b"), memory="9KiB")
    assert_stored("view/sweep.svg", renderers.svg(rows))
    assert_stored("view/sweep.txt", f"{rows}\n" + "\n".join(map(to_text, pictured(rows).tables())))


class Stops(Net):
    def forward(self, x):
        h = super().forward(x)
        if h.sum() > 0:
            return h * 2
        return h


def test_the_page_of_a_capture_that_failed(monkeypatch):
    pages = []
    monkeypatch.setattr("splitkit.view.renderers.page", lambda data: pages.append(data) or "")
    with pytest.raises(CaptureError) as caught:
        sk.capture(Stops(), torch.randn(6, 4))
    capture_failure_html(caught.value, "stopped")
    (data,) = pages
    nodes = [n for n in caught.value.reached.graph.nodes if n.op != "output"]
    assert data["stopped"]["why"] == str(caught.value) and data["stopped"]["node"] == nodes[-1].name
    assert data["stopped"]["row"] == max(data["ops"]["row"]) and "if h.sum() > 0:" in data["stopped"]["at"]
    assert data["note"] == "" and data["title"].startswith("stopped")


def test_a_frame_is_as_high_as_its_picture_needs():
    _, plan, prices, stages = planned()
    run = sk.simulate_schedule(stages, "gpipe", 2)
    frames = [plan.view(costs=prices), run.view(), plan.view(costs=prices, height=300), run.view(height=200)]
    assert [frame.height for frame in frames] == [720, 560, 300, 200]
    assert frames[1].svg() == renderers.svg(run)
