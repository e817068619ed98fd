"""The widget: what the page sends becomes a plan, and a plan that Python makes anew goes to the page."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import NoPlanError, ViewError

pytest.importorskip("anywidget")


@pytest.fixture(scope="module")
def gm():
    layers = [nn.Sequential(nn.Linear(16, 16 + 4 * i), nn.GELU(), nn.Linear(16 + 4 * i, 16)) for i in range(6)]
    return sk.capture(nn.Sequential(*layers), torch.ones(4, 16))


@pytest.fixture
def widget(gm):
    return sk.split(gm, sk.policies.Stages(3)).view(live=True)


def said(widget):
    """What goes to the page from now on."""
    found = []
    widget.send = lambda content, buffers=None: found.append(content)
    return found


def front(widget, **state):
    """What the page does: it changes a trait, as its comm says so."""
    widget._handle_msg({"content": {"data": {"method": "update", "state": state}}, "buffers": []})


def ask(widget, **content):
    widget._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})


def test_the_plan_comes_back_as_it_was_dragged(gm, widget):
    shipped = widget.plan
    assert shipped is widget.ladder.plan and len(widget.borders) == 4
    assert repr(widget) == "<3 stages to steer: .plan is the plan as it is now>"
    moved = [0, 1, widget.borders[2], widget.borders[3]]
    assert moved != widget.borders
    front(widget, borders=moved)
    plan = widget.plan
    assert plan is not shipped and set(plan.parts) == set(shipped.parts)
    flow, data = sk.analyze(gm), widget.data
    stages = sk.stage_costs(flow, plan, widget.ladder.costs)
    count = len(data["rows"])
    for (a, b), stage in zip(pairwise(moved), stages, strict=True):
        at = a * count - a * (a - 1) // 2 + (b - a - 1)
        peak = sum(data["stretches"][c][at] for c in ("fixed", "saved", "temporary"))
        assert peak == stage.fixed_bytes + stage.saved_bytes + stage.temporary_bytes
    x = torch.ones(4, 16)
    assert torch.equal(sk.split(gm, plan)(x), gm(x))
    front(widget, borders=[0, 2, count])
    assert set(widget.plan.parts) == {0, 1}
    front(widget, borders=moved[:1] + data_borders(data)[1:])
    assert widget.plan is shipped


def data_borders(data):
    parts = [row["part"] for row in data["rows"]]
    return [0, *(i for i in range(1, len(parts)) if parts[i] != parts[i - 1]), len(parts)]


def test_the_slider_plans_anew_in_python(widget):
    heard, before = said(widget), widget.data
    ask(widget, stages=2)
    assert heard == [{"planning": 2}, {"planned": 2}] and len(widget.plan.parts) == 2 and widget.data is not before
    assert widget.borders == data_borders(widget.data) and "Slowest" in widget.plan.note
    widget.planner = lambda count: sk.plan(widget.ladder.flow.root, sk.policies.Stages(count + 1))
    ask(widget, stages=3)
    assert len(widget.plan.parts) == 4


def test_the_step_follows_the_slider(gm):
    flow, plan, costs = sk.analyze(gm), sk.plan(gm, sk.policies.Stages(3)), sk.costs.roofline(gm, "h100")
    run = sk.simulate_schedule(sk.stage_costs(flow, plan, costs), "1f1b", 3, links=sk.costs.Links.uniform(1e3))
    widget = plan.view(live=True, costs=costs, run=run)
    ask(widget, stages=2)
    stages = sk.stage_costs(flow, widget.plan, costs)
    same = sk.simulate_schedule(stages, "1f1b", 3, links=sk.costs.Links.uniform(1e3))
    told = widget.data["run"]
    assert (told["stages"], told["seconds"], told["peaks"]) == (2, same.seconds, list(same.peaks))
    ask(widget, stages=4)  # more than there are microbatches
    assert len(widget.plan.parts) == 4 and widget.data["run"] is None
    ask(widget, stages=3)
    assert widget.data["run"]["stages"] == 3


@pytest.mark.campaign
def test_plans_of_the_slider_are_for_what_the_first_one_was_for(gm):
    asked = sk.policies.Stages(3, "1f1b", 6, links="pcie4", optimizer="sgd")
    plan = sk.plan(gm, asked, sk.costs.roofline(gm, "l4"))
    widget = plan.view(live=True)
    ask(widget, stages=2)
    made, run = widget.plan, widget.data["run"]
    figures = made.explain(again=False).to_dict()["figures"]
    assert made.request == plan.request and figures["bottleneck"] == pytest.approx(made.claim.value)
    assert (figures["step"], figures["peaks"]) == (run["seconds"], run["peaks"])


def test_what_is_dragged_on_devices_that_differ_is_priced_on_them(gm):
    ends = {"0": [0], "5": [1]}
    plan = sk.plan(gm, sk.policies.Devices(["h100", "l4"], links="pcie4", optimizer="adam", only=ends))
    widget = plan.view(live=True)
    moved = [0, widget.borders[1] + 1, widget.borders[2]]
    front(widget, borders=moved)
    on, again = widget.data["times"]["on"], widget.plan.view(live=True).data["stages"]
    for column in ("forward", "backward"):
        told = [sum(on[column][k][a:b]) for k, (a, b) in enumerate(pairwise(moved))]
        assert told == pytest.approx(again[column])
    work = [forward + backward for forward, backward in zip(again["forward"], again["backward"], strict=True)]
    shares = [row.share for row in sk.report(gm, widget.plan).parts]
    assert shares == pytest.approx([one / sum(work) for one in work])
    assert widget.plan.request == plan.request and "backward op by op" in str(sk.report(gm, widget.plan).note)


def test_what_no_plan_can_do_is_said_in_the_page(widget):
    heard, plan = said(widget), widget.plan

    def refused(count):
        raise NoPlanError("SK303", f"no {count} stages <here>", "Take two.")

    widget.planner = refused
    ask(widget, stages=5)
    assert heard == [{"planning": 5}, {"refused": "no 5 stages <here>. Take two."}] and widget.plan is plan
    ask(widget, stages="many")
    ask(widget)
    assert len(heard) == 2


def test_the_page_hears_of_a_planner_that_fails(widget):
    heard = said(widget)
    widget.planner = lambda count: {}[count]
    ask(widget, stages=2)
    assert heard == [{"planning": 2}, {"refused": "The planner failed: KeyError: 2"}]


def test_borders_that_are_none_are_refused(widget):
    before = widget.borders
    for borders in ([], [0], [1, 7], [0, 3, 3, 7], [0, 5, 2, 7], [0, 999]):
        with pytest.raises(ViewError, match="SK901"):
            widget.borders = borders
        assert widget.borders == before


def test_a_notebook_is_given_the_widget_and_a_still_picture_for_where_no_kernel_runs(widget):
    bundle, _ = widget._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle and "<svg" in bundle["text/html"]
    assert bundle["text/plain"] == "<3 stages to steer: .plan is the plan as it is now>"
    assert "class Ladder" in widget._esm and "export default" in widget._esm and "http" not in widget._css
