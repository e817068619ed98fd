"""A page in the browser: where things are in it, and what it says."""

from __future__ import annotations

import splitkit as sk
from splitkit.policies import Stages
from splitkit.testing import models
from splitkit.view.page import page


def planned(name, count, **sizes):
    """A graph's facts, a plan of it in stages, and the prices of its training on an A100."""
    example = models.build(name, **sizes)
    gm = sk.capture(example.model, *example.args, **example.kwargs)
    flow, costs = sk.analyze(gm), sk.costs.training(sk.costs.roofline(gm, "a100"))
    return flow, sk.plan(gm, Stages(count), costs), costs


def shown(browser, folder, view):
    (folder / "page.html").write_text(page(view.to_dict()), "utf-8")
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
