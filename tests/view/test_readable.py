"""A large picture is readable: it scrolls and has a map, modules open at every depth, equal layers stay folded."""

from __future__ import annotations

import pytest
import torch
from browser import NEEDS_CHROMIUM
from steeredpages import OVERLAPS, assert_quiet, middle, planned, shown, side
from torch import nn

import splitkit as sk
from splitkit.policies import Stages
from splitkit.view.data.ladder import LadderView

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def view():
    flow, plan, costs = planned("llama", 2, layers=10, width=32, heads=4, seq=16, vocab=100)
    return LadderView(flow, plan, costs)


@pytest.fixture
def opened(browser, view, tmp_path):
    """In a low window, where the picture of few layers is a tall one; folded, as that of more rows is at first."""
    sizes = {"width": 1400, "deviceScaleFactor": 1, "mobile": False}
    browser("Emulation.setDeviceMetricsOverride", height=500, **sizes)
    page = shown(browser, tmp_path, view)
    page.value("splitkit.folded || splitkit.fold.click()")
    page.settle()
    yield page
    browser("Emulation.setDeviceMetricsOverride", height=900, **sizes)


def frame(page, name):
    """The middle of the title of a module inside an open row, in pixels of the window, and its key."""
    return page.value(
        f"""(() => {{ const s = splitkit, box = s.canvas.getBoundingClientRect();
        for (const item of s.items) for (const [left, top, inner] of s.innerOf(item)) for (const f of inner.frames)
          if (f.module === {name!r})
            return [box.left + s.x + (left + f.x + f.w / 2) * s.zoom, box.top + s.y + (top + f.y + 8) * s.zoom, f.key];
        }})()"""
    )


def unfold(page):
    page.value("splitkit.folded && splitkit.fold.click()")
    page.settle()


def test_rows_of_a_tall_picture_stay_readable_and_the_wheel_scrolls_to_its_end(opened):
    unfold(opened)
    assert opened.value("splitkit.zoom") >= 0.85
    assert opened.value("splitkit.height * splitkit.zoom > splitkit.main.clientHeight")
    for _ in range(60):
        opened.mouse("wheel", 500, 400, deltaX=0, deltaY=100)
    opened.settle()
    last = opened.value("splitkit.y + splitkit.height * splitkit.zoom - splitkit.main.clientHeight")
    assert -60 < last < 0  # the last row is at the lower edge, not somewhere above it
    opened.value("splitkit.canvas.focus()")
    opened.key("Home")
    assert opened.value("splitkit.selected") == {"row": 0}
    assert_quiet(opened)


@pytest.mark.parametrize("pairs", [20, 21])
def test_a_picture_of_more_than_40_rows_is_folded_at_first(browser, tmp_path, pairs):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(pairs)])
    gm = sk.capture(model, torch.ones(2, 4))
    page = shown(browser, tmp_path, LadderView(sk.analyze(gm), sk.plan(gm, Stages(2)), sk.costs.flops(gm)))
    assert page.value("[splitkit.data.rows.length, splitkit.folded]") == [2 * pairs, pairs > 20]


def test_modules_inside_a_layer_open_and_close_at_every_depth(opened):
    unfold(opened)
    row = "model.layers.3"
    opened.click(*middle(opened, row), times=2)
    x, y, key = frame(opened, f"{row}.self_attn")
    visible = "splitkit.itemOf[splitkit.rowOf(splitkit.selected)].inner.boxes.size"
    before = opened.value(visible)
    opened.mouse("moved", x, y)
    opened.settle()
    assert opened.value("splitkit.hovered.frame") == key
    assert f"{row}.self_attn" in opened.value("splitkit.tip.textContent")
    found = f"splitkit.frameOf(splitkit.rowOf(splitkit.selected), {key!r})"
    assert opened.value(f"{found}.ops.length") > 20 and not opened.value(f"{found}.open")  # a layer of 45 ops
    opened.click(x, y, times=2)
    assert opened.value(f"{found}.open") and opened.value(visible) > before
    inside = frame(opened, f"{row}.self_attn")
    opened.click(*inside[:2], times=2)
    assert opened.value(visible) == before and not opened.value(f"{found}.open")
    op = opened.value(f"splitkit.ops.name[{found}.ops.at(-1)]")
    opened.value(f"splitkit.search.value = {op!r}; splitkit.find({op!r}); splitkit.nextHit()")
    assert opened.value(f"{found}.open") and opened.value(visible) > before  # an op in it was found
    assert_quiet(opened)


def test_no_frames_or_ops_overlap_and_each_op_lies_in_its_modules(opened):
    """Also upside down, in backward: see test_joint_page."""
    unfold(opened)
    opened.click(*middle(opened, "model.layers.1"), times=2)
    assert opened.value(OVERLAPS) == []


def test_equal_layers_stay_folded_when_one_of_them_is_opened(opened):
    assert opened.value("splitkit.folded")
    name = opened.value("splitkit.items.map(i => splitkit.name(i)).find(name => name.includes('×'))")
    count = opened.value("splitkit.items.length")
    opened.click(*middle(opened, name), times=2)
    assert opened.value("splitkit.items.length") == count
    assert opened.value(f"splitkit.items.find(i => splitkit.name(i) === {name!r}).inner.frames.length") >= 2
    opened.click(*middle(opened, name), times=2)
    assert opened.value("splitkit.open.size") == 0
    assert_quiet(opened)


def test_two_fingers_zoom_where_they_are(opened):
    opened("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
    try:
        zoom = opened.value("splitkit.zoom")
        spot = "(500 - splitkit.x) / splitkit.zoom"
        before = opened.value(spot)

        def touch(kind, *xs):
            points = [{"x": x, "y": 400, "id": i} for i, x in enumerate(xs)]
            opened("Input.dispatchTouchEvent", type=kind, touchPoints=points)

        touch("touchStart", 480)
        touch("touchStart", 480, 520)
        for step in range(1, 6):
            touch("touchMove", 480 - 4 * step, 520 + 4 * step)
        touch("touchEnd")
        opened.settle()
        assert opened.value("splitkit.zoom") == pytest.approx(2 * zoom, rel=0.02)
        assert opened.value(spot) == pytest.approx(before, abs=2)
        opened.drag(400, 300, 450, 300)  # afterwards one finger moves again
        assert_quiet(opened)
    finally:
        opened("Emulation.setTouchEmulationEnabled", enabled=False)


def test_an_address_tells_which_modules_are_closed(opened):
    unfold(opened)
    opened.click(*middle(opened, "model.layers.3"), times=2)
    x, y, key = frame(opened, "model.layers.3.mlp")
    opened.click(x, y, times=2)
    opened.settle()
    told = opened.value("new URLSearchParams(splitkit.state).toString()")
    opened.value(f"splitkit.toggled.clear(); splitkit.open.clear(); splitkit.restore(new URLSearchParams({told!r}))")
    opened.settle()
    assert opened.value("[...splitkit.toggled]") == [key] and opened.value("splitkit.open.size") == 1
    assert "help" in side(opened)
