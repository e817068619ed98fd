"""The page of a training step in stages in a real browser: the mouse over every part of it."""

from __future__ import annotations

from functools import cache

import pytest
from browser import NEEDS_CHROMIUM
from stagedsteps import divided, recomputed
from steeredpages import OVERLAPS, assert_quiet, border, shown, side

from splitkit.units import duration, size
from splitkit.view.renderers import pictured

pytestmark = NEEDS_CHROMIUM
FORWARD, SAVED, INPUT, WAITS, WEIGHT, BESIDE = range(6)


@cache
def view():
    return pictured(divided()).ladder()


@pytest.fixture
def opened(browser, tmp_path):
    page = shown(browser, tmp_path, view())
    page.value("splitkit.folded && splitkit.fold.click()")
    page.settle()
    return page


def place(page, row, column):
    """Where the middle of a box is, or of the space between two columns or beside them, in pixels of the window."""
    return page.value(
        f"""(() => {{ const s = splitkit, box = s.canvas.getBoundingClientRect(), y = s.itemOf[{row}].y + 13;
        const x = [170 + s.wide / 2, s.left2 - 95, s.left2 + s.wide2 / 2, s.left3 - 95, s.left3 + s.wide3 / 2, 60];
        return [box.left + s.x + x[{column}] * s.zoom, box.top + s.y + y * s.zoom]; }})()"""
    )


def hovered(page, row, column):
    page.mouse("moved", *place(page, row, column))
    page.settle()
    return page.value("splitkit.hovered"), page.value("splitkit.tip.textContent")


def row_with(page, triples):
    """A row that has a ribbon to itself."""
    return page.value(f"splitkit.data.{triples}.find(([a, b, n]) => a === b && n > 100)[0]")


def test_the_mouse_over_forward_input_and_weight_parts_tells_their_times(opened):
    times = view().still()["times"]
    row = max(range(len(view().rows)), key=times["weight"].__getitem__)
    for column in (FORWARD, INPUT, WEIGHT):
        target, text = hovered(opened, row, column)
        assert target == {"row": row} and view().rows.names[row] in text
        assert f"forward {duration(times['forward'][row], 's')}" in text
        assert f"gradients of inputs {duration(times['backward'][row], 's')}" in text
        assert f"gradients of weights {duration(times['weight'][row], 's')}" in text
    assert_quiet(opened)


def test_the_mouse_over_ribbons_tells_what_is_saved_and_what_waits(opened):
    target, text = hovered(opened, row_with(opened, "saved"), SAVED)
    assert len(target["ribbon"]) == 2 and text.startswith("saved for backward: ")
    target, text = hovered(opened, row_with(opened, "waits"), WAITS)
    assert target["ribbon"][2] == 1 and text.startswith("waits for the weight part: ")
    assert_quiet(opened)


def test_the_mouse_over_a_border_tells_what_crosses_and_cannot_move_it(opened):
    before = opened.value("splitkit.borders")
    x, y = border(opened, 1)
    opened.mouse("moved", x, y)
    opened.settle()
    text = opened.value("splitkit.tip.textContent")
    assert f"{size(divided().stages[0].sent_bytes)} of activations" in text and "of gradients" in text
    opened.drag(x, y, x, y + 60)
    opened.value("splitkit.setBorders([0, splitkit.data.rows.length])")
    assert opened.value("splitkit.borders") == before
    assert_quiet(opened)


def test_the_mouse_beside_a_stage_tells_the_times_of_its_three_parts(opened):
    stage = view().stages[1]
    target, text = hovered(opened, opened.value("splitkit.borders[1]"), BESIDE)
    assert target == {"stage": 1}
    times = [duration(each, "s") for each in (stage.forward, stage.backward_input, stage.backward_weight)]
    assert "forward {}, gradients of inputs {}, of weights {}\n".format(*times) in text
    assert_quiet(opened)


def test_a_click_selects_and_a_double_click_opens_all_three_parts(opened):
    row = row_with(opened, "waits")
    opened.click(*place(opened, row, WEIGHT))
    assert opened.value("splitkit.selected") == {"row": row} and "weights, state" in side(opened)
    opened.click(*place(opened, row, INPUT), times=2)
    assert opened.value("[...splitkit.open]") == [row]
    found = opened.value(f"(i => [i.inner, i.mirror, i.late].map(of => of.place.size))(splitkit.itemOf[{row}])")
    assert found == opened.value(f"splitkit.columns.map(of => of[{row}].length)") and all(found)
    assert opened.value(OVERLAPS) == []
    op = opened.value(f"splitkit.columns[2][{row}][0]")
    opened.value(f"splitkit.select({{op: {op}}}, true)")
    opened.settle()
    assert f"weight part of stage {opened.value(f'splitkit.stageOf({row})')}" in side(opened)
    assert_quiet(opened)


def test_search_finds_ops_of_every_part(opened):
    opened.value("splitkit.search.value = 'mm'; splitkit.search.dispatchEvent(new Event('input'))")
    count = opened.value("splitkit.query.length")
    assert count > 0 and opened.value("splitkit.hits.textContent") == f"{count} found"
    kinds = set()
    for _ in range(count):
        opened.value("splitkit.nextHit()")
        kinds.update(opened.value("splitkit.staged.places[splitkit.selected.op].filter((_, i) => i % 2)"))
    assert kinds == {0, 1, 2}
    assert_quiet(opened)


def test_the_timeline_tells_what_runs_and_what_waits(opened):
    for kind, words in (("I", "gradients of inputs of"), ("W", "gradients of weights of"), ("F", "forward of")):
        x, y = opened.value(
            f"""(() => {{ const t = splitkit.timeline, box = t.canvas.getBoundingClientRect();
            const e = t.run.events.find(e => e[1] === {kind!r});
            return [box.left + t.x((e[4] + e[5]) / 2), box.top + t.y(e[0]) + 4]; }})()"""
        )
        opened.mouse("moved", x, y)
        opened.settle()
        assert words in opened.value("splitkit.timeline.tip.textContent")
    assert "alive on rank" in side(opened) and "the parts of each stage" in side(opened)
    values = opened.value("[0, 1, 2, 3].map(k => splitkit.heldIn(splitkit.run, k).rest)")
    assert values == [0, 0, 0, 0], "all that stages hold is told by module"
    assert_quiet(opened)


def test_recompute_is_hatched_and_there_is_no_weight_column(browser, tmp_path):
    page = shown(browser, tmp_path, pictured(recomputed(), memory="1MiB").ladder())
    assert page.value("splitkit.divided") is False and page.value("splitkit.wide3") == 0
    row = page.value("splitkit.data.counts.again.findIndex(count => count > 0)")
    _, text = hovered(page, row, INPUT)
    assert "ops computed again in backward" in text and "computed again" in side(page)
    assert_quiet(page)
