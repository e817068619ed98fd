"""A page in the browser: where things are in it, and what it says."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from capturedmodels import captured_example

import splitkit as sk
from splitkit.policies import Stages
from splitkit.view.page import page, style
from splitkit.view.page.bundle import script

GPT2 = {"layers": 4, "width": 64, "heads": 4, "seq": 16, "vocab": 100}
"""Of one size in all files, so that a process captures it once."""

SMALL = {"layers": 2, "width": 32, "heads": 2, "vocab": 100}
"""Of other language models."""

STEP = {"layers": 3, "width": 64, "heads": 2, "vocab": 100}
"""Also of GPT-2, for `joint_graph`."""


@cache
def priced(name, **sizes):
    """A graph's facts, and the prices of its training on an A100; nobody may change them."""
    gm = captured_example(name, **sizes).graph
    return sk.analyze(gm), sk.costs.training(sk.costs.roofline(gm, "a100"))


@cache
def planned(name, count, **sizes):
    """A graph's facts, a plan of it in stages, and the prices; nobody may change them."""
    flow, costs = priced(name, **sizes)
    return flow, sk.plan(flow.root, Stages(count), costs), costs


LAST: list[tuple[Any, str]] = []
"""The views that were shown last, and their pages: tests of a file show one view again and again."""


def page_of(view):
    for known, text in LAST:
        if known is view:
            return text
    text = page(view.to_dict())
    LAST[:] = [(view, text), *LAST[:3]]
    return text


def shown(browser, folder, view):
    (folder / "page.html").write_text(page_of(view), "utf-8")
    browser.open(folder / "page.html")
    assert_quiet(browser)
    return browser


def assert_quiet(browser):
    assert browser.faults() == [] and browser.requests() == [] and browser.value("window.harmed") is None


def middle(browser, name):
    """Where a row's box in forward is, in pixels of the window."""
    return browser.value(
        f"""(() => {{ const s = splitkit, box = s.canvas.getBoundingClientRect();
        const item = s.items.find(i => s.name(i) === {name!r});
        return [box.left + s.x + (170 + s.wide / 2) * s.zoom, box.top + s.y + (item.y + 13) * s.zoom]; }})()"""
    )


def border(browser, number):
    """Where a border is at the left, where no box is."""
    return browser.value(
        f"""(() => {{ const s = splitkit, item = s.itemOf[s.borders[{number}]], box = s.canvas.getBoundingClientRect();
        return [box.left + s.x + 60 * s.zoom, box.top + s.y + (item.y - 5) * s.zoom]; }})()"""
    )


def borders(browser):
    return browser.value("splitkit.borders")


def side(browser):
    return browser.value("splitkit.side.textContent")


MODEL = """<!doctype html><style>%s</style><script id=state type=application/json>%s</script><script type=module>%s
  const listeners = {}, states = JSON.parse(document.getElementById("state").textContent), state = states[0];
  const model = {
    get: name => state[name], set: (name, value) => { state[name] = value; }, save_changes() {}, off() {},
    send: content => { (window.sent ||= []).push(content); },
    on: (name, listener) => { listeners[name] = listener; },
  };
  const mount = Ladder.prototype.mount;
  Ladder.prototype.mount = function(place) { return window.drawn = mount.call(this, place); };
  widget.render({model, el: document.body});
  window.told = message => listeners["msg:custom"](message);
  window.planned = (number = 1) => {
    Object.assign(state, states[number]);
    for (const name of ["borders", "data"]) listeners["change:" + name]();
  };
</script>"""
"""A page that stands for Jupyter, which may tell of the cuts before it tells of the plan."""


def firsts(parts):
    """The first row of each part, and the number of rows."""
    return [0, *(row for row in range(1, len(parts)) if parts[row] != parts[row - 1]), len(parts)]


def widget(browser, folder, *views):
    """The widget of the first, in a page that stands for Jupyter; ``planned()`` there is the answer of Python."""
    states = [
        {"data": made.to_dict(), "height": 500, "borders": firsts(made.rows.parts), "answers": 0} for made in views
    ]
    code = script(widget=True).replace("export default", "const widget =")
    (folder / "widget.html").write_text(MODEL % (style(), json.dumps(states).replace("<", "\\u003c"), code), "utf-8")
    browser.open(folder / "widget.html")
    return states


SLIDE = """(count => { const slider = document.querySelector("input[type=range]");
slider.value = count; slider.dispatchEvent(new Event("input")); })(%d)"""


OVERLAPS = """(() => { const s = splitkit, wrong = [];
  for (const item of s.items) for (const [, , inner] of s.innerOf(item)) {
    const within = (a, b) => a.x >= b.x && a.y >= b.y + 17 && a.x + a.w <= b.x + b.w && a.y + a.h <= b.y + b.h;
    const apart = (a, b) => a.x + a.w <= b.x || b.x + b.w <= a.x || a.y + a.h <= b.y || b.y + b.h <= a.y;
    const boxes = [...inner.boxes].map(([op, box]) => ({ops: [op], x: box.x, y: box.y, w: 178, h: 19}));
    for (const f of inner.frames) for (const other of [...boxes, ...inner.frames]) if (other !== f) {
      const mine = other.ops.every(op => f.ops.includes(op)), around = f.ops.every(op => other.ops.includes(op));
      const isRight = mine && around ? within(f, other) || within(other, f)
        : mine ? within(other, f) : around || apart(f, other);
      if (!isRight) wrong.push([f.key, String(other.ops)]);
    }
    for (const a of boxes) for (const b of boxes)
      if (a !== b && !apart(a, b)) wrong.push([String(a.ops), String(b.ops)]);
  }
  return wrong; })()"""
"""The ops and frames of open rows that overlap, or lie outside of their modules."""
