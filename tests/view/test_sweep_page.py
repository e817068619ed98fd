"""The dots of a sweep's page lead to the pictures of their plans, also in a notebook's frame."""

from __future__ import annotations

import re
import time
from html import escape

import pytest
from browser import NEEDS_CHROMIUM
from steeredpages import GPT2, assert_quiet, priced

import splitkit as sk


@pytest.fixture(scope="module")
def sweep():
    flow, costs = priced("gpt2", **GPT2)
    return sk.sweep(flow.root, costs, stages=(2, 3), microbatches=(2, 4), schedules=("gpipe", "1f1b", "zbv"))


def test_each_dot_has_the_picture_of_its_plan(sweep, tmp_path):
    sweep.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    ran = [row for row in sweep.rows if row.run is not None]
    plans = {id(row.plan.places) for row in ran}
    sections = dict(re.findall(r'<section id="(plan-\d+)">(.*?)</section>', text, re.DOTALL))
    assert len(sections) == len(plans) > 2 and len(ran) < len(sweep.rows)  # V schedules have no three stages
    dots = re.findall(r'<a href="#(plan-\d+)"><circle [^>]*><title>(\S+) of (\d+) stages, (\d+) microb', text)
    assert len(dots) == len(ran)
    for link, schedule, stages, microbatches in dots:
        assert f"{schedule} {stages}×{microbatches}" in sections[link] and f"{stages} stages" in sections[link]
    still = sweep._repr_mimebundle_()["text/html"]  # in a notebook's cell there is nothing to lead to
    assert "href=" not in still and still.count("<circle") == text.partition("<section")[0].count("<circle")


@NEEDS_CHROMIUM
def test_a_click_on_a_dot_goes_there_also_inside_a_frame(sweep, browser, tmp_path):
    sweep.to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    where = """(() => { const all = [...document.querySelectorAll('svg a')];
      const boxOf = a => a.getBoundingClientRect();
      const middle = a => [boxOf(a).x + boxOf(a).width / 2, boxOf(a).y + boxOf(a).height / 2];
      return all.map(a => [...middle(a), a.getAttribute('href')])
        .filter(([x, y], i) => document.elementFromPoint(x, y).parentElement === all[i]); })()"""
    places = browser.value(where)
    assert len(places) > 4  # some dots lie on each other
    x, y, link = places[0]
    browser.click(x, y)
    assert browser.value("location.hash") == link and browser.value("scrollY") > 100
    top = browser.value(f"document.querySelector({link!r}).getBoundingClientRect().top")
    assert abs(top) < 5 or browser.value("scrollY + innerHeight >= document.documentElement.scrollHeight - 2")
    assert_quiet(browser)
    frame = sweep.view(height=700)._repr_mimebundle_()["text/html"]
    assert escape('<base href="about:srcdoc">') in frame
    frame = frame.replace('sandbox="allow-scripts"', "")  # so that this test can look inside
    (tmp_path / "frame.html").write_text(f'<body style="margin:0">{frame}', "utf-8")
    browser.open(tmp_path / "frame.html")
    browser.value("window.scrolled = () => document.querySelector('iframe').contentWindow.scrollY")
    browser.click(x, y)
    for _ in range(40):
        if browser.value("scrolled()") > 100:
            break
        time.sleep(0.05)
    assert browser.value("scrolled()") > 100 and browser.value("location.hash") == ""
