"""What a user takes home from a page: its state in the address, undone and redone moves, a picture, and a plan."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from browser import NEEDS_CHROMIUM
from capturedmodels import joint_graph
from steeredpages import GPT2, STEP, assert_quiet, border, borders, planned, shown, side

import splitkit as sk
from splitkit.cli import main
from splitkit.plans.parts import Part
from splitkit.policies import MinCut, SaveAll, Stages
from splitkit.view.data.joint_ladder import HalvesView
from splitkit.view.data.ladder import LadderView

pytestmark = NEEDS_CHROMIUM
PLAN_FILE = "JSON.stringify(planFile(splitkit))"


@pytest.fixture(scope="module")
def ladder():
    return LadderView(*planned("gpt2", 3, **GPT2))


@pytest.fixture
def page(browser, ladder, tmp_path):
    return shown(browser, tmp_path, ladder)


def drag(page, number, far):
    x, y = border(page, number)
    page.drag(x, y, x, y + far)


def pressed(page, name):
    page.value(f"[...document.querySelectorAll('header button')].find(b => b.textContent === {name!r}).click()")
    page.settle()


def test_a_drag_is_undone_and_redone_as_a_whole(page):
    first = borders(page)
    drag(page, 1, 150)
    moved = borders(page)
    page.value("splitkit.setBorders([0, 2, splitkit.data.rows.length])")
    assert moved != first and len(borders(page)) == 3
    pressed(page, "undo")
    assert borders(page) == moved and "moved by hand" in side(page)
    page.value("splitkit.canvas.focus()")
    page("Input.dispatchKeyEvent", type="keyDown", key="z", modifiers=2)
    page.settle()
    assert borders(page) == first
    pressed(page, "undo")  # there is nothing more to undo
    assert borders(page) == first
    pressed(page, "redo")
    assert borders(page) == moved
    page("Input.dispatchKeyEvent", type="keyDown", key="Z", modifiers=2 | 8)
    page.settle()
    assert len(borders(page)) == 3
    pressed(page, "undo")
    drag(page, 1, -150)  # a new move ends what could be redone
    assert borders(page) != moved
    assert page.value("splitkit.future.length") == 0 and page.value("splitkit.past.length") == 2
    assert_quiet(page)


def test_the_address_shows_the_same_again(browser, page, tmp_path):
    drag(page, 1, 150)
    page.value("splitkit.toggle(2)")
    moved, address = borders(page), page.value("location.href")
    assert "borders=" in address and "open=2" in address
    for bad in ("", "#borders=0,99,2&open=x", "#borders=1,2&open=999", "#%%%", "#borders=0,,5"):
        browser("Page.navigate", url="about:blank")
        browser("Page.navigate", url=address.split("#")[0] + bad)
        browser.value("new Promise(done => setTimeout(done, 200))")
        assert borders(browser) == browser.value("splitkit.shipped") and browser.value("splitkit.open.size") == 0, bad
    browser("Page.navigate", url="about:blank")
    browser("Page.navigate", url=address)
    browser.value("new Promise(done => setTimeout(done, 300))")
    assert borders(browser) == moved and browser.value("[...splitkit.open]") == [2]
    pressed(browser, "as planned")
    assert "borders=" not in browser.value("location.href")
    assert browser.faults() == []


def test_the_address_of_forward_and_backward_names_the_plan(browser, tmp_path):
    joint = joint_graph("gpt2", **STEP)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    shown(browser, tmp_path, HalvesView(joint.flow, [joint.split(p, costs) for p in (SaveAll(), MinCut())], costs))
    browser.value("splitkit.setChoice(1)")
    assert browser.value("location.hash") == "#plan=1"
    browser.value("splitkit.setChoice(0)")
    assert browser.value("location.hash") == ""


def test_a_dragged_plan_is_saved_as_a_file_that_gives_the_same_stages(page, ladder):
    gm = ladder.flow.root
    for change in (lambda: None, lambda: drag(page, 1, 150), lambda: page.value("splitkit.setCount(2)")):
        change()
        told = json.loads(page.value(PLAN_FILE))
        plan = sk.Plan.from_dict(gm.graph, told)
        now, rows = borders(page), ladder.rows
        for node in ladder.flow.nodes:
            stage = next(k for k in range(len(now) - 1) if now[k] <= rows.of[node] < now[k + 1])
            assert plan.places[node] == (stage,)
        assert plan.prices == ladder.plan.prices and plan.claim is None
        stages = sk.stage_costs(ladder.flow, plan, ladder.costs)
        shown_peaks = page.value("splitkit.stages.map(s => s.peak)")
        assert shown_peaks == [s.fixed_bytes + s.saved_bytes + s.temporary_bytes for s in stages]
    assert plan.note == "2 stages, divided evenly here"


def test_the_command_runs_a_plan_that_was_dragged_on_its_page(browser, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = f"{Path(__file__).parents[1] / 'cli' / 'tinynet.py'}:net"
    words = [net, "--size", "layers=2,width=8,vocab=32", "--stages", "3"]
    assert main(["plan", *words, "-o", "plan.json"]) == 0
    assert main(["view", "plan.json", "--model", net, "-o", "page.html"]) == 0
    browser.open(tmp_path / "page.html")
    drag(browser, 1, 80)
    moved = json.loads(browser.value(PLAN_FILE))
    assert len(borders(browser)) == 4 and moved["model"]["spec"] == net and "torch" in moved
    (tmp_path / "moved.json").write_text(json.dumps(moved))
    capsys.readouterr()
    assert main(["run", "moved.json", "--model", net, "--check"]) == 0
    assert "same: yes" in capsys.readouterr().out
    assert main(["view", "moved.json", "--model", net, "-o", "again.html"]) == 0


def test_the_buttons_give_a_picture_and_a_file(page, tmp_path):
    page("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "down"))
    pressed(page, "plan.json")
    pressed(page, "PNG")
    pressed(page, "SVG")
    for name in ("plan.json", "splitkit.png", "splitkit.svg"):
        for _ in range(100):
            if (tmp_path / "down" / name).exists():
                break
            page.value("new Promise(done => setTimeout(done, 50))")
    assert json.loads((tmp_path / "down" / "plan.json").read_text())["kind"] == "splitkit plan"
    assert (tmp_path / "down" / "splitkit.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(tmp_path / "down" / "splitkit.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    picture = page.value("flattened(splitkit.root, splitkit.ink.bg).toDataURL().split(',')[1]")
    assert len(base64.b64decode(picture)) > 10_000
    assert page.faults() == []


ON_A_CANVAS = """(() => {
  const p = splitkit, {x, y, zoom} = p, below = p.chart ? p.chart.canvas.clientHeight : 0;
  const made = document.createElement("canvas"), c = made.getContext("2d");
  Object.assign(made, {width: p.right + 230, height: p.height + 80 + below});
  Object.assign(p, {x: 20, y: 50, zoom: 1});
  p.paintOn(c, made.width, p.height + 80);
  if (p.chart) { c.translate(0, p.height + 80); p.chart.paintOn(c, made.width, below); }
  Object.assign(p, {x, y, zoom});
  return made.toDataURL(); })()"""

DIFFERENCE = """(async () => {
  const pixels = async image => { await image.decode(); const made = document.createElement("canvas");
    Object.assign(made, {width: image.naturalWidth, height: image.naturalHeight}); const c = made.getContext("2d");
    c.fillStyle = "#fff"; c.fillRect(0, 0, made.width, made.height);  // pictures clear their canvas
    c.drawImage(image, 0, 0); return c.getImageData(0, 0, made.width, made.height).data; };
  const [one, other] = await Promise.all([...document.images].map(pixels));
  let far = 0, ink = 0;
  for (let i = 0; i < one.length; i += 4) {
    const at = [i, i + 1, i + 2];
    far += at.reduce((sum, k) => sum + Math.abs(one[k] - other[k]), 0) > 150;
    ink += at.reduce((sum, k) => sum + other[k], 0) < 700;
  }
  return [one.length === other.length, far / ink, ink]; })()"""


def assert_like_the_canvas(page, folder):
    """The SVG and the canvas, drawn by a page that may show images, have the same pixels but for smoothed edges."""
    text, png = page.value("svgOf(splitkit)"), page.value(ON_A_CANVAS)
    assert_quiet(page)
    svg = f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}"
    (folder / "both.html").write_text(f'<img src="{svg}"><img src="{png}">')
    page.open(folder / "both.html")
    same_size, differing, ink = page.value(DIFFERENCE)
    assert same_size and differing < 0.02 and ink > 10_000, differing


def test_the_svg_is_the_whole_picture_as_the_canvas_draws_it(browser, tmp_path):
    flow, plan, costs = planned("gpt2", 4, **GPT2)
    run = sk.simulate_schedule(sk.stage_costs(flow, plan, costs), "1f1b", 6, links="nvlink4")
    view = LadderView(flow, plan, costs, '<b>"&</b>', run=run, memory=2**19)
    page = shown(browser, tmp_path, view)
    page.value("splitkit.toggle(3); splitkit.y -= 300; splitkit.draw()")
    page.settle()
    place = page.value("[splitkit.x, splitkit.y, splitkit.zoom]")
    root = ElementTree.fromstring(page.value("svgOf(splitkit)"))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for name in view.rows.names:
        assert any(name in text or text.endswith(name[-12:]) for text in texts), name  # also those that are not seen
    assert any("1F1B of 6 microbatches" in text for text in texts) and root[0].text.startswith('<b>"&</b>')
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    assert page.value("[splitkit.x, splitkit.y, splitkit.zoom]") == place
    assert_like_the_canvas(page, tmp_path)


def test_the_svg_of_forward_and_backward_is_as_the_canvas_draws_it(browser, tmp_path):
    joint = joint_graph("gpt2", **STEP)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    page = shown(browser, tmp_path, HalvesView(joint.flow, [joint.split(MinCut(), costs)], costs))
    page.value("splitkit.toggle(2)")
    page.settle()
    assert_like_the_canvas(page, tmp_path)


def test_parts_keep_their_devices_where_the_number_of_stages_is_the_same(browser, tmp_path, ladder):
    gm = ladder.flow.root
    plan = sk.plan(gm, Stages(2), ladder.costs)
    devices = {0: torch.device("cpu"), 1: torch.device("meta")}
    plan = replace(plan, parts={key: Part(key, device) for key, device in devices.items()})
    page = shown(browser, tmp_path, LadderView(ladder.flow, plan, ladder.costs))
    page.value("splitkit.setBorders([0, 1, splitkit.data.rows.length])")
    told = sk.Plan.from_dict(gm.graph, json.loads(page.value(PLAN_FILE)))
    assert told.parts == plan.parts
