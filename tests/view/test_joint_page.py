"""The page of forward and backward in a real browser: mouse and keys do there what they do on the page of stages."""

from __future__ import annotations

import pytest
from browser import NEEDS_CHROMIUM
from capturedmodels import joint_graph
from steeredpages import OVERLAPS, STEP, assert_quiet, middle, shown, side

import splitkit as sk
from splitkit.policies import SaveAll
from splitkit.view.data.joint_ladder import HalvesView

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def view():
    joint = joint_graph("gpt2", **STEP)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    return HalvesView(joint.flow, [joint.split(SaveAll(), costs)], costs)


@pytest.fixture
def opened(browser, view, tmp_path):
    page = shown(browser, tmp_path, view)
    page.value("splitkit.folded && splitkit.fold.click()")
    page.settle()
    return page


def test_the_mouse_over_a_module_shows_what_it_is(opened):
    x, y = middle(opened, "transformer.h.0")
    opened.mouse("moved", x, y)
    opened.settle()
    row = opened.value("splitkit.items.find(i => splitkit.name(i) === 'transformer.h.0').start")
    assert opened.value("splitkit.hovered") == {"row": row}
    assert "forward" in opened.value("splitkit.tip.textContent") and "saved" in opened.value("splitkit.tip.textContent")
    assert opened.value("splitkit.tip.style.display") == "block"
    assert_quiet(opened)


def test_a_click_selects_and_a_double_click_opens(opened):
    x, y = middle(opened, "transformer.h.0")
    opened.click(x, y)
    row = opened.value("splitkit.selected.row")
    assert opened.value(f"splitkit.name(splitkit.itemOf[{row}])") == "transformer.h.0"
    assert "recomputed" in side(opened)
    opened.click(x, y, times=2)
    assert opened.value("[...splitkit.open]") == [row]
    assert opened.value(f"splitkit.itemOf[{row}].inner.boxes.size > 0 && splitkit.itemOf[{row}].mirror.boxes.size > 0")
    assert_quiet(opened)


def test_dragging_moves_and_the_wheel_with_ctrl_zooms(opened):
    place = opened.value("[splitkit.x, splitkit.y]")
    x, y = middle(opened, "transformer.h.0")
    opened.drag(x, y, x + 100, y + 50)
    assert opened.value("[splitkit.x, splitkit.y]") == pytest.approx([place[0] + 100, place[1] + 50])
    zoom = opened.value("splitkit.zoom")
    opened.mouse("wheel", x, y, deltaX=0, deltaY=-200, modifiers=2)
    opened.settle()
    assert opened.value("splitkit.zoom") > zoom
    assert_quiet(opened)


def test_keys_select_and_open_and_there_is_no_cut_to_move(opened):
    opened.value("splitkit.canvas.focus()")
    for _ in range(2):
        opened.key("ArrowDown")
    opened.key("ArrowDown", alt=True)
    assert opened.value("splitkit.selected") == {"row": 1}
    opened.key("Enter")
    assert opened.value("splitkit.open.has(1)")
    opened.key("Escape")
    assert opened.value("splitkit.selected") is None
    assert_quiet(opened)


def test_the_background_selects_nothing_that_is_not_there(opened):
    """There are no stages: a click beside the boxes selects nothing."""
    x, y = opened.value(
        """(() => { const s = splitkit, box = s.canvas.getBoundingClientRect();
        return [box.left + s.x + 40 * s.zoom, box.top + s.y + (s.items[1].y + 13) * s.zoom]; })()"""
    )
    opened.click(x, y)
    assert opened.value("splitkit.selected") is None
    assert_quiet(opened)


def test_every_row_opens_also_one_without_backward(browser, tmp_path):
    """The position ids of a Llama are a row whose backward has no ops."""
    joint = joint_graph("llama", layers=1, width=32, heads=2, vocab=100)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    page = shown(browser, tmp_path, HalvesView(joint.flow, [joint.split(SaveAll(), costs)], costs))
    page.value("splitkit.folded && splitkit.fold.click()")
    assert 0 in page.value("splitkit.lateOf.map(ops => ops.length)")
    for row in range(page.value("splitkit.data.rows.length")):
        page.value(f"splitkit.toggle({row})")
    page.settle()
    found = page.value("splitkit.items.map(i => [i.inner.place.size, i.mirror.place.size])")
    assert found == page.value(
        "splitkit.data.rows.map((_, i) => [splitkit.opsOf[i].length, splitkit.lateOf[i].length])"
    )
    assert page.value(OVERLAPS) == []
    assert_quiet(page)
