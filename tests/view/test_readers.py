"""The page on paper and for screen readers: all of the picture is printed, and tables and the selection are read."""

from __future__ import annotations

import base64

import pytest
from browser import NEEDS_CHROMIUM
from steeredpages import GPT2, assert_quiet, middle, planned, shown

import splitkit as sk
from splitkit.view.data.ladder import LadderView

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def view():
    flow, plan, costs = planned("gpt2", 4, **GPT2)
    run = sk.simulate_schedule(sk.stage_costs(flow, plan, costs), "interleaved1f1b", 8, ranks=2)
    return LadderView(flow, plan, costs, run=run, memory=2**19)


@pytest.fixture
def page(browser, view, tmp_path):
    return shown(browser, tmp_path, view)


def test_the_whole_picture_and_the_tables_are_printed(page):
    page.value("splitkit.folded && splitkit.fold.click(); [1, 2, 3, 4].forEach(row => splitkit.toggle(row))")
    page.settle()
    assert page.value("splitkit.height * splitkit.zoom > splitkit.main.clientHeight")  # not all of it is seen
    pdf = base64.b64decode(page("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    page("Emulation.setEmulatedMedia", media="print")
    try:
        told = page.value(
            """(() => { const texts = [...splitkit.paper.querySelectorAll("text")].map(t => t.textContent);
            const seen = e => e.getBoundingClientRect().height > 0, s = splitkit;
            return [texts, seen(s.paper.querySelector("svg")), seen(s.side), seen(s.canvas), s.root.scrollHeight,
              s.root.clientHeight, document.documentElement.scrollWidth - innerWidth]; })()"""
        )
    finally:
        page("Emulation.setEmulatedMedia", media="")
    texts, picture, tables, canvas, inner, outer, too_wide = told
    assert picture and tables and not canvas and inner <= outer + 1 and too_wide <= 0
    for stage in range(4):
        assert f"stage {stage}" in texts
    assert any(text.startswith("interleaved1f1b") or "Interleaved" in text for text in texts)
    assert page.value("getComputedStyle(splitkit.paper).display") == "none"  # on the screen there are the canvases
    assert_quiet(page)


def test_tables_have_names_and_heads_and_the_selected_row_is_marked(page):
    x, y = middle(page, page.value("splitkit.name(splitkit.items[2])"))
    page.click(x, y)
    assert page.value("splitkit.said.textContent").startswith(page.value("splitkit.name(splitkit.items[2])"))
    page.value("splitkit.side.querySelectorAll('tbody tr')[3].click()")
    assert page.value("splitkit.said.textContent").startswith("stage 3, rank 1")
    marked = page.value("[...splitkit.side.querySelectorAll('[aria-current=true]')].map(r => r.cells[0].textContent)")
    assert marked == ["3"]
    nodes = page("Accessibility.getFullAXTree")["nodes"]
    tables = [n["name"]["value"] for n in nodes if n.get("role", {}).get("value") == "table"]
    assert any(name.startswith("4 stages, balance") for name in tables)
    assert "step: peak of each rank, and where it idles" in tables and "the same stages otherwise" in tables
    heads = {n["name"]["value"] for n in nodes if n.get("role", {}).get("value") == "columnheader"}
    assert {"stage", "warm-up", "bubble"} <= heads
    page.value("splitkit.canvas.focus()")
    page.key("Escape")
    assert page.value("splitkit.said.textContent") == "nothing is selected"
    assert_quiet(page)


def test_actions_say_their_stage_where_ranks_have_several(browser, tmp_path):
    flow, plan, costs = planned("gpt2", 4, **GPT2)
    run = sk.simulate_schedule(sk.stage_costs(flow, plan, costs), "interleaved1f1b", 4, ranks=2)
    page = shown(browser, tmp_path, LadderView(flow, plan, costs, run=run))
    names = set(page.value("svgOf(splitkit).match(/>[0-9]+·[0-9]+</g)"))
    assert names >= {f">{stage}·{microbatch}<" for stage in range(4) for microbatch in range(2)}
    assert "microbatch 0 in stage 3" in page.value("splitkit.side.textContent")
