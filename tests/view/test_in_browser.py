"""The page in a real browser: what is shown is what Python says, and all of it can be steered by mouse and keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from browser import NEEDS_CHROMIUM
from smallnets import loss_or_sum
from steeredpages import GPT2, SLIDE, assert_quiet, border, borders, middle, planned, shown, side, widget
from torch import nn

import splitkit as sk
from splitkit.policies import RecomputeAll, SaveAll, Stages
from splitkit.units import duration, size
from splitkit.view.data.joint_ladder import HalvesView
from splitkit.view.data.ladder import LadderView

pytestmark = NEEDS_CHROMIUM
HARMFUL = "<img src=x onerror=window.harmed=1></script><script>window.harmed=1</script>"


@pytest.fixture(scope="module")
def ladder():
    flow, plan, costs = planned("gpt2", 3, **GPT2)
    run = sk.simulate_schedule(sk.stage_costs(flow, plan, costs), "1f1b", 4)
    return LadderView(flow, plan, costs, HARMFUL, run=run)


@pytest.fixture
def opened(browser, ladder, tmp_path):
    return shown(browser, tmp_path, ladder)


def test_it_is_mounted_without_a_request_and_text_stays_text(opened):
    assert HARMFUL in opened.value("document.querySelector('header').textContent")
    assert opened.value("document.images.length") == 0
    assert "3 stages" in side(opened) and "moved by hand" not in side(opened)


def test_a_cut_is_dragged_and_put_back_and_the_numbers_are_those_of_python(opened, ladder):
    before = borders(opened)
    x, y = border(opened, 1)
    opened.drag(x, y, x, y + 60)
    moved = borders(opened)
    assert moved[1] > before[1] and moved[2:] == before[2:] and "moved by hand" in side(opened)
    part = {node: sum(row >= b for b in moved[1:-1]) for node, row in ladder.rows.of.items()}
    stages = sk.stage_costs(ladder.flow, sk.plan(ladder.flow.root, lambda n: part.get(n, 0)), ladder.costs)
    told = opened.value("splitkit.prices.stages(splitkit.borders, splitkit.isShipped)")
    for stage, here in zip(stages, told, strict=True):
        assert here["forward"] == pytest.approx(stage.forward, rel=1e-6)
        assert here["backward"] == pytest.approx(stage.backward, rel=1e-6)
        assert (here["saved"], here["fixed"]) == (stage.saved_bytes, stage.fixed_bytes)
        assert here["peak"] == stage.fixed_bytes + stage.saved_bytes + stage.temporary_bytes
    assert [here["down"] for here in told[:-1]] == [stage.activation_bytes for stage in stages[:-1]]
    opened.value("splitkit.reset.click()")
    assert borders(opened) == before and "moved by hand" not in side(opened)


def test_the_timeline_is_that_of_the_plan(opened):
    before = opened.value("splitkit.run.seconds")
    place = opened.value(
        """(() => { const t = splitkit.timeline, box = t.canvas.getBoundingClientRect();
        const e = t.run.events.find(e => e[2] === 2 && e[1] === "F");
        return [box.left + t.x((e[4] + e[5]) / 2), box.top + t.y(e[0]) + 4]; })()"""
    )
    opened.click(*place)
    assert opened.value("splitkit.selected") == {"stage": 2}
    x, y = border(opened, 1)
    opened.drag(x, y, x, y + 60)
    assert opened.value("splitkit.run") is None and "step: peak of each rank" not in side(opened)
    opened.value("splitkit.slider.value = 5; splitkit.slider.dispatchEvent(new Event('input'))")
    assert opened.value("splitkit.run") is None
    opened.settle()
    opened.value("splitkit.reset.click()")
    assert opened.value("splitkit.run.seconds") == before and "step: peak of each rank" in side(opened)
    assert_quiet(opened)


def test_the_slider_sets_how_many_stages_there_are(opened):
    for count in (1, 2, 5):
        opened.value(f"splitkit.slider.value = {count}; splitkit.slider.dispatchEvent(new Event('input'))")
        assert len(borders(opened)) == count + 1
        told = f"{count} stage{'s' if count > 1 else ''}, balance"
        assert told in side(opened) and "divided evenly" in side(opened) and "by hand" not in side(opened)
    best = opened.value("splitkit.prices.stages(splitkit.borders, false).map(s => s.seconds)")
    others = opened.value(
        """(() => { const s = splitkit, n = s.data.rows.length;
        const least = (start, left) => left === 1 ? s.prices.of(start, n).seconds : Math.min(
          ...[...Array(n - left + 1 - start).keys()].map(i => start + 1 + i).map(
            end => Math.max(s.prices.of(start, end).seconds, least(end, left - 1))));
        return least(0, 5); })()"""
    )
    assert max(best) == pytest.approx(others)


def test_boxes_and_tables_and_the_timeline_are_linked_both_ways(opened):
    opened.click(*middle(opened, "transformer.h.1"))
    assert opened.value("splitkit.selected") == {
        "row": opened.value("splitkit.items.find(i => splitkit.name(i) === 'transformer.h.1').start")
    }
    assert "transformer.h.1" in side(opened)
    opened.value("splitkit.side.querySelectorAll('tbody tr')[2].click()")
    assert opened.value("splitkit.selected") == {"stage": 2}
    place = opened.value(
        """(() => { const t = splitkit.timeline, box = t.canvas.getBoundingClientRect();
        const e = t.run.events.find(e => e[2] === 1 && e[1] === "B");
        return [box.left + t.x((e[4] + e[5]) / 2), box.top + t.y(e[0]) + 4]; })()"""
    )
    opened.click(*place)
    assert opened.value("splitkit.selected") == {"stage": 1} and opened.value("splitkit.hovered") == {"stage": 1}


def test_a_module_opens_and_an_op_is_told_of(opened):
    opened.click(*middle(opened, "transformer.h.2"), times=2)
    row = opened.value("[...splitkit.open][0]")
    assert opened.value("splitkit.itemOf[" + str(row) + "].inner.boxes.size") == opened.value(
        f"splitkit.data.rows[{row}].ops"
    )
    place = opened.value(
        f"""(() => {{ const s = splitkit, [left, top, inner] = s.innerOf(s.itemOf[{row}])[0];
        const [op, b] = [...inner.boxes][3], box = s.canvas.getBoundingClientRect();
        s.fit();
        return [box.left + s.x + (left + b.x + 20) * s.zoom, box.top + s.y + (top + b.y + 9) * s.zoom, op]; }})()"""
    )
    opened.click(*place[:2])
    assert opened.value("splitkit.selected") == {"op": place[2]}
    assert opened.value(f"splitkit.ops.op({place[2]})") in side(opened)


def test_search_reveals_an_op(opened):
    opened.value("splitkit.search.focus()")
    for letter in "gelu":
        opened.key(letter)
    opened.value("splitkit.search.value = 'tanh'; splitkit.search.dispatchEvent(new Event('input'))")
    assert opened.value("splitkit.hits.textContent") == f"{GPT2['layers']} found"
    opened.key("Enter")
    op = opened.value("splitkit.selected.op")
    assert "tanh" in opened.value(f"splitkit.ops.op({op})") and opened.value(
        f"splitkit.open.has(splitkit.ops.row[{op}])"
    )


def test_keys_select_open_and_move_cuts(opened):
    opened.value("splitkit.canvas.focus()")
    opened.key("ArrowDown")
    opened.key("ArrowDown")
    assert opened.value("splitkit.selected") == {"row": 1}
    opened.key("Enter")
    assert opened.value("splitkit.open.has(1)")
    before = borders(opened)
    opened.key("ArrowDown", alt=True)
    assert borders(opened)[1] == before[1] + 1
    opened.key("Escape")
    assert opened.value("splitkit.selected") is None


def test_dark_is_dark(opened):
    light = opened.value("getComputedStyle(splitkit.root).backgroundColor")
    opened.value("[...document.querySelectorAll('button')].pop().click()")
    assert opened.value("getComputedStyle(splitkit.root).backgroundColor") != light


def test_two_plans_beside_each_other(browser, ladder, tmp_path):
    other = sk.plan(ladder.flow.root, Stages(2), ladder.costs)
    shown(browser, tmp_path, LadderView(ladder.flow, ladder.plan, ladder.costs, beside=(other,)))
    assert "2 stages" in side(browser) and "3 stages" in side(browser) and "in another stage there" in side(browser)
    assert_quiet(browser)


def test_several_plans_beside_each_other_with_their_steps_and_one_selection(browser, ladder, tmp_path):
    others = tuple(sk.plan(ladder.flow.root, Stages(count), ladder.costs) for count in (2, 4))
    view = LadderView(ladder.flow, ladder.plan, ladder.costs, run=ladder.run, beside=others)
    page = shown(browser, tmp_path, view)
    for letter, other in zip("AB", others, strict=True):
        stages = sk.stage_costs(ladder.flow, other, ladder.costs)
        step = sk.simulate_schedule(stages, "1f1b", 4)
        assert f"{len(stages)} stages, balance" in side(page) and f", beside {letter}" in side(page)
        assert f"its step: {duration(step.seconds)}" in side(page)
        assert f"bubble {100 * step.bubble:.1f} %, highest peak {size(max(step.peaks))}" in side(page)
    for node, row in view.rows.of.items():
        assert [other["rows"][row] for other in view.to_dict()["beside"]] == [other.home(node) for other in others]
        break
    page.value("[...splitkit.side.querySelectorAll('table')][2].tBodies[0].rows[3].click()")  # B's last stage
    row = page.value("splitkit.selected.row")
    assert row == page.value("splitkit.data.rows.findIndex((_, row) => splitkit.othersOf(row)[1] === 3)")
    marked = page.value(
        "[...splitkit.side.querySelectorAll('table')].slice(1, 3)"
        ".map(t => [...t.tBodies[0].rows].findIndex(r => r.getAttribute('aria-current')))"
    )
    assert marked == page.value(f"splitkit.othersOf({row})")
    assert all(word in page.value("svgOf(splitkit)") for word in (">A<", ">B<", ">moved<"))
    page("Emulation.setDeviceMetricsOverride", width=700, height=900, deviceScaleFactor=1, mobile=False)
    try:
        page.settle()
        page.value("splitkit.scroll(5000, 0); splitkit.scroll(-9000, 0)")  # to the right end and back
        assert page.value("splitkit.x + (-28 - 34) * splitkit.zoom") > 0  # the second column is seen again
    finally:
        page("Emulation.setDeviceMetricsOverride", width=1400, height=900, deviceScaleFactor=1, mobile=False)
    assert_quiet(page)


def test_the_page_shows_the_plan_before_until_python_has_planned(browser, ladder, tmp_path):
    other = replace(ladder, plan=sk.plan(ladder.flow.root, Stages(5), ladder.costs), run=None)
    widget(browser, tmp_path, ladder, other)
    text = "document.body.innerText"
    browser.value(SLIDE % 5)
    assert browser.value("sent") == [{"stages": 5}]
    assert "3 stages, balance" in browser.value(text) and "planning" in browser.value(text)
    browser.value("told({refused: 'no five stages'})")
    assert "3 stages, balance" in browser.value(text) and "no five stages" in browser.value(text)
    assert browser.value("document.querySelector('input[type=range]').value") == "3"
    browser.value(SLIDE % 5)
    browser.value("document.querySelector('input[type=range]').focus()")
    browser.value("planned(), told({planned: 5})")
    browser.settle()
    assert "5 stages, balance" in browser.value(text) and "by hand" not in browser.value(text)
    # in JupyterLab, which the campaign starts, the next key would go to the notebook otherwise
    assert browser.value("document.querySelector('input[type=range]').matches(':focus')")
    assert browser.value("document.querySelector('.sk').dataset.lmSuppressShortcuts") == "true"
    browser.value(SLIDE % 5)  # what is there need not be planned
    assert len(browser.value("sent")) == 2 and browser.faults() == []


def test_cuts_of_a_plan_made_anew_are_drawn_on_its_own_rows(browser, ladder, tmp_path):
    other = replace(ladder, plan=sk.plan(ladder.flow.root, Stages(5), ladder.costs), run=None)
    states = widget(browser, tmp_path, ladder, other)
    assert states[0]["borders"][-1] != states[1]["borders"][-1]
    browser.value("planned()")
    browser.settle()
    assert "5 stages" in browser.value("document.body.innerText") and browser.faults() == []


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(HARMFUL.replace(".", ""), nn.Linear(4, 4))

    def forward(self, x):
        return next(iter(self.children()))(x).tanh().sum()


def test_forward_and_backward_are_steered(browser, tmp_path):
    import torch

    joint = sk.capture_joint(Odd(), torch.ones(2, 4), loss=loss_or_sum)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    pairs = [joint.split(policy, costs) for policy in (RecomputeAll(), SaveAll())]
    view = HalvesView(joint.flow, pairs, costs, chosen=1, memory=2**20)
    shown(browser, tmp_path, view)
    data = view.to_dict()
    assert browser.value("splitkit.number") == 1 and "2 plans" in side(browser)
    browser.value("splitkit.slider.value = 0; splitkit.slider.dispatchEvent(new Event('input'))")
    assert browser.value("splitkit.number") == 0
    assert browser.value("[...splitkit.again]") == data["choices"][0]["again"]
    browser.value("splitkit.draw()")
    browser.settle()
    assert browser.value("Math.max(...splitkit.timeline.bytes)") == data["choices"][0]["peak"]
    step = browser.value("splitkit.timeline.ops.findIndex((op, i) => op >= splitkit.late)")
    place = browser.value(
        f"""(() => {{ const t = splitkit.timeline, box = t.canvas.getBoundingClientRect();
        return [box.left + t.x({step} + 0.5), box.top + 60]; }})()"""
    )
    browser.click(*place)
    op = browser.value("splitkit.selected.op")
    assert (
        op >= data["late"]
        and "backward" in side(browser)
        and browser.value(f"splitkit.open.has(splitkit.ops.row[{op}])")
    )
    assert_quiet(browser)


def test_a_kernel_that_does_not_answer_is_reported(browser, ladder, tmp_path):
    widget(browser, tmp_path, ladder, ladder)
    text = "document.body.innerText"
    browser.value("const later = setTimeout; window.setTimeout = (what, wait) => later(what, wait / 100)")
    browser.value(SLIDE % 5)
    browser.value("new Promise(done => later(done, 150))")
    assert "Python does not answer" in browser.value(text) and "planning" not in browser.value(text)
    assert browser.value("document.querySelector('input[type=range]').value") == "3"
    browser.value(SLIDE % 5)
    browser.value("told({planning: 5})")  # a kernel that plans for long has said so
    browser.value("new Promise(done => later(done, 150))")
    assert "planning" in browser.value(text) and "does not answer" not in browser.value(text)
    assert browser.value("sent") == [{"stages": 5}, {"stages": 5}] and browser.faults() == []


def test_a_selected_stage_that_is_gone_is_no_longer_selected(opened):
    opened.value("splitkit.side.querySelectorAll('tbody tr')[2].click()")
    opened.value(SLIDE % 2)
    opened.settle()
    assert opened.value("splitkit.selected") is None and "Double-click" in side(opened)
    opened.value("splitkit.side.querySelectorAll('tbody tr')[1].click()")
    opened.value(SLIDE % 3)
    assert opened.value("splitkit.selected") == {"stage": 1}
    assert_quiet(opened)
