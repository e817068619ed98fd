"""In the cells and windows that people have: the whole width is seen, and keys and the slider are the picture's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from browser import NEEDS_CHROMIUM
from steeredpages import SLIDE, assert_quiet, shown, widget
from torch import nn

import splitkit as sk
from splitkit.policies import SaveAll, Stages
from splitkit.view.data.joint_ladder import HalvesView
from splitkit.view.data.ladder import LadderView

pytestmark = NEEDS_CHROMIUM

WINDOW = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
SIZES = {
    "cell of JupyterLab at 1400": (948, 720),
    "cell of JupyterLab at 1280": (828, 720),
    "200 % zoom": (700, 450),
    "cell of JupyterLab at 200 % zoom": (312, 720),
    "phone": (400, 800),
    "window of 1280": (1280, 800),
    "low window": (1400, 420),
}


@pytest.fixture(scope="module")
def model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(6)])


@pytest.fixture(scope="module")
def ladder(model):
    gm = sk.capture(model, torch.ones(2, 4))
    costs = sk.costs.training(sk.costs.roofline(gm, "a100"))
    flow, plan = sk.analyze(gm), sk.plan(gm, Stages(3), costs)
    run = sk.simulate_schedule(sk.stage_costs(flow, plan, costs), "1f1b", 4)
    return LadderView(flow, plan, costs, run=run)


@pytest.fixture(scope="module")
def pictures(model, ladder):
    joint = sk.capture_joint(model, torch.ones(2, 4), loss=torch.sum)
    costs = sk.costs.flops(joint.graph_module)
    return {
        "with a timeline": ladder,
        "without": replace(ladder, run=None),
        "of inference": LadderView(ladder.flow, ladder.plan, sk.costs.roofline(ladder.flow.root, "a100")),
        "of forward and backward": HalvesView(joint.flow, [joint.split(SaveAll(), costs)], costs),
    }


PLACES = """(() => { const s = %s, box = e => e.getBoundingClientRect(), main = box(s.main), side = box(s.side);
  const foot = s.chart && box(s.chart.canvas);
  return {left: s.x - s.leftRoom, right: s.x + (s.right + s.rightRoom) * s.zoom, zoom: s.zoom, wide: s.main.clientWidth,
    high: main.height, isBeside: side.left >= main.right,
    isApart: side.left >= main.right || side.top >= main.bottom, foot: foot ? foot.height : 150,
    isBelow: !foot || (foot.top >= main.bottom - 1 && foot.width > main.width - 1),
    isCut: main.right > innerWidth}; })()"""
"""Where the picture, the side panel and the chart below are."""


def assert_whole(page, picture="splitkit"):
    """The whole width of the picture is seen, high enough, and nothing covers it."""
    found = page.value(PLACES % picture)
    assert found["left"] >= 0 and found["right"] <= found["wide"] + 1, found
    assert found["high"] >= 200 and found["foot"] >= 100, found
    assert found["isApart"] and found["isBelow"] and not found["isCut"], found
    # a panel beside it never makes the picture too small to read
    assert found["zoom"] >= 0.8 or not found["isBeside"], found


@pytest.mark.parametrize("kind", ["with a timeline", "without", "of inference", "of forward and backward"])
def test_a_page_shows_the_whole_width_in_every_window(browser, pictures, tmp_path, kind):
    page = shown(browser, tmp_path, pictures[kind])
    try:
        for name, (width, height) in SIZES.items():
            page("Emulation.setDeviceMetricsOverride", **WINDOW | {"width": width, "height": height})
            for _ in range(3):
                page.settle()
            assert page.value("innerWidth") == width, name
            assert_whole(page)
    finally:
        page("Emulation.setDeviceMetricsOverride", **WINDOW)
    assert_quiet(page)


def test_a_widget_shows_the_whole_width_in_a_cell_that_is_narrower_than_the_window(browser, ladder, tmp_path):
    widget(browser, tmp_path, ladder)
    for width in (966, 846, 330, 1300):
        browser.value(f"document.body.style.width = '{width}px'")
        for _ in range(3):
            browser.settle()
        assert_whole(browser, "drawn")
    assert browser.faults() == []


WRITTEN = """(() => { const own = CanvasRenderingContext2D.prototype, write = own.fillText, found = [];
  own.fillText = function (text, x, y) {
    if (text.includes("bubble")) found.push([text, x + this.measureText(text).width, this.canvas.clientWidth]);
    write.call(this, text, x, y); };
  drawn.chart.paint(); own.fillText = write; return found; })()"""
"""The line above the timeline: its text, where it ends, and where the picture ends."""


def test_the_line_above_the_timeline_says_as_much_as_has_room(browser, ladder, tmp_path):
    widget(browser, tmp_path, ladder)
    said = []
    for width in (966, 330):
        browser.value(f"document.body.style.width = '{width}px'")
        for _ in range(3):
            browser.settle()
        [(text, end, room)] = browser.value(WRITTEN)
        assert end <= room, text
        said.append(text)
    assert "of 4 microbatches: step" in said[0] and "= warm-up" in said[0]
    assert said[1].startswith("1F1B: step ") and said[0].replace(" of 4 microbatches", "").startswith(said[1])


def test_a_long_note_does_not_stand_in_a_narrow_column(browser, ladder, tmp_path):
    page = shown(browser, tmp_path, replace(ladder, title="A sentence about stages. " * 12))
    wide, high = page.value("(e => [e.clientWidth, e.clientHeight])(document.querySelector('header .mut'))")
    assert wide > 900 and high < 60


def test_the_part_that_is_seen_first_scrolls_to_both_ends(browser, ladder, tmp_path):
    page = shown(browser, tmp_path, ladder)
    try:
        page("Emulation.setDeviceMetricsOverride", **WINDOW | {"height": 420})
        for _ in range(3):
            page.settle()
        page.value("splitkit.zoom = 1.5, splitkit.scroll(5000, 0)")
        right = page.value("splitkit.x + (splitkit.right + splitkit.rightRoom) * splitkit.zoom")
        assert right == pytest.approx(page.value("splitkit.main.clientWidth"))
    finally:
        page("Emulation.setDeviceMetricsOverride", **WINDOW)


def test_no_key_on_an_element_of_the_picture_goes_to_the_notebook(browser, ladder, tmp_path):
    """JupyterLab's commands match the focused element itself, so it is this element that must refuse them."""
    page = shown(browser, tmp_path, ladder)
    page.value("splitkit.select({row: 1})")
    found = page.value(
        "[...document.querySelectorAll('.sk input, .sk button, .sk select, .sk summary, .sk [tabindex]')]"
        ".map(e => [e.tagName, e.dataset.lmSuppressShortcuts])"
    )
    assert {tag for tag, _ in found} >= {"INPUT", "BUTTON", "CANVAS", "TR", "SUMMARY"}
    assert {told for _, told in found} == {"true"}


SLIDER = "document.querySelector('input[type=range]')"


def told(page):
    """What the slider and the number beside it say, and how many stages are drawn."""
    return page.value(f"[Number({SLIDER}.value), Number(drawn.count.textContent), drawn.borders.length - 1]")


@pytest.fixture(scope="module")
def others(ladder):
    return [replace(ladder, plan=sk.plan(ladder.flow.root, Stages(n), ladder.costs), run=None) for n in (5, 2, 4)]


def test_an_answer_to_an_older_request_does_not_move_the_slider(browser, ladder, others, tmp_path):
    widget(browser, tmp_path, ladder, *others)
    for count in (5, 4, 2):
        browser.value(SLIDE % count)
    assert browser.value("sent") == [{"stages": 5}] and told(browser) == [2, 2, 3]
    browser.value("told({planning: 5}), planned(1)")
    browser.value("drawn.select({row: 1})")  # fills the side panel anew
    browser.value("told({planned: 5})")
    assert browser.value("sent") == [{"stages": 5}, {"stages": 2}]
    assert told(browser)[:2] == [2, 2]
    browser.value("told({planning: 2}), planned(2), told({planned: 2})")
    browser.value("new Promise(done => setTimeout(done, 20))")
    assert told(browser) == [2, 2, 2] and browser.faults() == []


def test_an_answer_that_comes_after_a_newer_request_is_not_taken_for_its_answer(browser, ladder, others, tmp_path):
    widget(browser, tmp_path, ladder, *others)
    browser.value("const later = setTimeout; window.setTimeout = (what, wait = 0) => later(what, wait / 100)")
    browser.value(SLIDE % 5)
    browser.value("new Promise(done => later(done, 150))")
    assert "does not answer" in browser.value("document.body.innerText") and told(browser) == [3, 3, 3]
    browser.value(SLIDE % 2)
    browser.value("told({planning: 5}), planned(1), told({planned: 5})")  # the kernel was only busy
    assert told(browser) == [2, 2, 3] and "planning" in browser.value("document.body.innerText")
    browser.value("told({planning: 5}), told({refused: 'no five'})")
    assert told(browser) == [2, 2, 3] and "no five" not in browser.value("document.body.innerText")
    browser.value("told({planning: 2}), told({planned: 2}), planned(2)")  # Jupyter may tell of the plan last
    browser.value("new Promise(done => later(done, 20))")
    assert told(browser) == [2, 2, 2] and browser.faults() == []
    browser.value(SLIDE % 4)
    browser.value("told({planning: 4}), told({refused: 'no four'})")
    assert told(browser) == [2, 2, 2] and "no four" in browser.value("document.body.innerText")


def test_a_slider_that_is_dragged_is_drawn_anew_when_it_is_released(browser, ladder, others, tmp_path):
    widget(browser, tmp_path, ladder, *others)
    left, wide, y, most = browser.value(
        "(s => { const b = s.getBoundingClientRect(); return [b.left, b.width, b.top + b.height / 2, s.max]; })"
        f"({SLIDER})"
    )

    def move(kind, count, **more):
        x = left + 8 + (wide - 16) * (count - 1) / (int(most) - 1)
        browser.mouse(kind, x, y, button="left", **more)
        browser.settle()

    browser.value(f"window.first = {SLIDER}")
    move("pressed", 3, buttons=1, clickCount=1)
    move("moved", 5, buttons=1)
    browser.value("told({planning: 5}), planned(1), told({planned: 5})")
    assert browser.value(f"first === {SLIDER}") and told(browser) == [5, 5, 3]
    browser.value("new Promise(done => setTimeout(done, 20))")
    assert told(browser) == [5, 5, 3]
    move("moved", 2, buttons=1)
    assert browser.value("sent") == [{"stages": 5}, {"stages": 2}]
    browser.value("told({planning: 2}), planned(2), told({planned: 2})")
    move("released", 2, clickCount=1)
    assert told(browser) == [2, 2, 2] and browser.value(f"first !== {SLIDER}") and browser.faults() == []


def test_a_plan_of_another_number_of_stages_puts_the_slider_to_its_own(browser, ladder, others, tmp_path):
    """A planner of the user's may return the plan that is there, of which Jupyter tells nothing."""
    widget(browser, tmp_path, ladder, *others)
    browser.value(SLIDE % 5)
    browser.value("told({planning: 5}), told({planned: 5})")
    browser.value("new Promise(done => setTimeout(done, 20))")
    assert told(browser) == [3, 3, 3] and browser.faults() == []
