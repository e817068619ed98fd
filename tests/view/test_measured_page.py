"""A step that ran, drawn beside the simulated one: what took longer is seen, read and counted."""

from __future__ import annotations

import json

import pytest
from browser import NEEDS_CHROMIUM
from steeredpages import GPT2, assert_quiet, border, planned, shown, side

import splitkit as sk
from splitkit.cli import main
from splitkit.errors import ViewError
from splitkit.pipeline.trace import MeasuredStep
from splitkit.policies import Stages
from splitkit.view.data.ladder import LadderView


@pytest.fixture(scope="module")
def made():
    flow, plan, costs = planned("gpt2", 3, **GPT2)
    return flow, plan, costs, sk.simulate_schedule(sk.stage_costs(flow, plan, costs), "1f1b", 4)


def ran(run, slower, factor=1.0):
    """The step of a run whose action ``slower`` took three times as long and delayed its rank; memory is 1000 bytes."""
    late, events = [0.0] * run.ranks, []
    for e in run.timeline:
        took = (e.end - e.start) * factor
        start = e.start * factor + late[e.rank]
        late[e.rank] += 2 * took * (e.action == slower)
        events.append(e._replace(start=start, end=start + took * (3 if e.action == slower else 1)))
    return MeasuredStep.of(run.order.name, events, [[(0.0, 1000)] for _ in range(run.ranks)])


def place(page, number):
    """The middle of a measured action, in pixels of the window."""
    return page.value(
        f"""(() => {{ const t = splitkit.timeline, box = t.canvas.getBoundingClientRect(), m = t.run.measured;
        const scale = ownScale(t.run, m), [start, end] = m.times[{number}], rank = t.run.events[{number}][0];
        return [box.left + t.x((start + end) / 2 / scale), box.top + t.y(rank) + t.high * t.share * 1.5]; }})()"""
    )


def colour(page, number):
    return page.value(f"colourOfChange(splitkit.run, splitkit.run.measured, {number})")


@NEEDS_CHROMIUM
def test_an_action_that_took_longer_is_coloured_and_told(browser, tmp_path, made):
    flow, plan, costs, run = made
    number = next(i for i, e in enumerate(run.timeline) if e.action == "1B2")
    step = ran(run, "1B2")
    page = shown(browser, tmp_path, LadderView(flow, plan, costs, run=run, measured=step))
    assert page.value("ownScale(splitkit.run, splitkit.run.measured)") == 1
    assert colour(page, number) == "#c51b7d" and colour(page, 0) == "#a9b0ba"
    x, y = place(page, number)
    page.mouse("moved", x, y)
    page.settle()
    told = page.value("splitkit.timeline.tip.textContent")
    assert "measured: backward of microbatch 2, stage 1, rank 1" in told and "+200.0 %" in told
    page.mouse("moved", x, y - page.value("splitkit.timeline.high * splitkit.timeline.share"))
    page.settle()
    assert "measured" not in page.value("splitkit.timeline.tip.textContent")
    rows = page.value(
        "[...[...splitkit.side.querySelectorAll('h3')].find(h => h.textContent.startsWith('step as it ran'))"
        ".nextElementSibling.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[0] for row in rows] == ["0", "1", "2"] and rows[0][3] == rows[2][3] == "+0.0 %"
    change = step.busy[1] / run.busy[1] - 1
    assert rows[1][3] == f"+{100 * change:.1f} %"
    assert_quiet(page)
    page.drag(*border(page, 1), border(page, 1)[0], border(page, 1)[1] + 80)
    assert "step as it ran" not in side(page)  # what ran is not the step of the borders as they are now
    assert_quiet(page)


@NEEDS_CHROMIUM
def test_an_action_that_ran_after_the_simulated_step_had_ended_is_told_too(browser, tmp_path, made):
    flow, plan, costs, run = made
    step = ran(run, "", 1.5)
    page = shown(browser, tmp_path, LadderView(flow, plan, costs, run=run, measured=step))
    number = max(range(len(run.timeline)), key=lambda i: run.timeline[i].end)
    last = run.timeline[number]
    assert 1.5 * last.start > run.seconds
    page.mouse("moved", *place(page, number))
    page.settle()
    told = page.value("splitkit.timeline.tip.textContent")
    assert f"of microbatch {last.microbatch}, stage {last.stage}" in told and "+50.0 %" in told
    assert_quiet(page)


@NEEDS_CHROMIUM
def test_a_step_that_is_far_slower_is_drawn_on_its_own_scale(browser, tmp_path, made):
    flow, plan, costs, run = made
    number = next(i for i, e in enumerate(run.timeline) if e.action == "1B2")
    page = shown(browser, tmp_path, LadderView(flow, plan, costs, run=run, measured=ran(run, "1B2", 1000.0)))
    assert "drawn on a scale of its own" in side(page)
    assert page.value("splitkit.timeline.span") == pytest.approx(run.seconds)
    x, y = place(page, number)
    page.mouse("moved", x, y)
    page.settle()
    assert "microbatch 2, stage 1" in page.value("splitkit.timeline.tip.textContent")
    assert colour(page, number) != "#a9b0ba" and colour(page, 0)[1] <= "a"
    assert_quiet(page)


def test_a_step_of_other_actions_is_refused(made):
    _, plan, costs, run = made
    other = sk.simulate_schedule(run.stages, "gpipe", 5)
    with pytest.raises(ViewError, match=r"SK901: the measured step is not the simulated one: 0B4 on rank 0 was only m"):
        plan.view(costs=costs, run=run, measured=ran(other, ""))
    with pytest.raises(ViewError, match="run is missing"):
        plan.view(costs=costs, measured=ran(run, ""))
    with pytest.raises(ViewError, match="measured is a dict"):
        plan.view(costs=costs, run=run, measured={})


@pytest.mark.campaign  # test_view draws a measured plan, too
def test_the_command_draws_a_trace_and_takes_its_schedule(tmp_path, made, capsys):
    words = ["--size", "layers=4,width=64,heads=4", "--size", "seq=16,vocab=100"]
    plan, trace, page = (str(tmp_path / name) for name in ("plan.json", "trace.json", "page.html"))
    assert main(["plan", "gpt2", *words, "--stages", "3", "--costs", "roofline:a100", "--training", "-o", plan]) == 0
    ran(made[3], "1B2").to_trace(trace)
    assert main(["view", plan, "--measured", trace, "-o", page]) == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    assert '"name":"1F1B"' in text and '"measured":{"seconds":' in text
    assert main(["view", plan, "--measured", trace, "--schedule", "gpipe", "--microbatches", "4", "-o", page]) == 0
    capsys.readouterr()
    assert main(["view", plan, "--measured", trace, "--schedule", "1f1b", "--microbatches", "8", "-o", page]) == 1
    assert "SK901" in capsys.readouterr().err
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": []}))
    assert main(["view", plan, "--measured", trace, "-o", page]) == 1
    assert "SK510" in capsys.readouterr().err
    assert main(["view", plan, "--measured", trace, "-o", trace]) == 2  # a page would overwrite the trace


def test_stages_of_another_number_are_refused(made):
    flow, _, costs, run = made
    two = sk.plan(flow.root, Stages(2), costs)
    with pytest.raises(ViewError, match="the run has 3 stages, but the plan has 2 parts"):
        two.view(costs=costs, run=run, measured=ran(run, ""))
