"""What is alive at a step of forward and backward, as the page lists it, is what the simulation says."""

from __future__ import annotations

import pytest
from browser import BINARY
from steeredpages import assert_quiet, shown, side

import splitkit as sk
from splitkit.policies import RecomputeAll, SaveAll
from splitkit.testing import models
from splitkit.units import size
from splitkit.view.data.joint_ladder import TINY, HalvesView

pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no Chromium: apt-get install chromium")
LISTED = "[...document.querySelectorAll('.alive tbody tr')].map(r => [...r.cells].map(c => c.textContent))"


@pytest.fixture(scope="module")
def view():
    example = models.build("llama", layers=2, width=64, heads=2, vocab=100)
    joint = sk.capture_joint(example.model, *example.args, **example.kwargs)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    return example.model, HalvesView(joint.flow, [joint.split(p, costs) for p in (SaveAll(), RecomputeAll())], costs)


@pytest.fixture
def page(browser, tmp_path, view):
    return shown(browser, tmp_path, view[1])


def profile_of(pair):
    return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)


@pytest.mark.parametrize("number", [0, 1])
def test_what_is_alive_at_each_step_is_that_of_the_profile(page, view, number):
    page.value(f"splitkit.setChoice({number})")
    profile = profile_of(view[1].pairs[number])
    for step in range(0, len(profile.steps), 17):
        told = page.value(f"aliveAt(splitkit.choice.memory, {step}).map(each => each[4])")
        assert told == [b.nbytes for b in profile.live_at(step) if b.nbytes >= profile.peak // TINY]


def test_the_peak_is_listed_until_another_step_is_clicked(page, view):
    model, profile = view[0], profile_of(view[1].pairs[0])
    assert f"alive at step {profile.index}, {profile.at.name}: {size(profile.peak)}" in side(page)
    rows = page.value(LISTED)
    assert [row[3] for row in rows] == [size(b.nbytes) for b in profile.live_at_peak[:12]]
    parameters = dict(model.named_parameters())
    assert {row[0] for row in rows if row[2] == "parameter"} <= set(parameters) and rows[0][2] in ("parameter", "saved")
    x, y = page.value(
        """(() => { const t = splitkit.timeline, box = t.canvas.getBoundingClientRect();
        return [box.left + t.x(10.5), box.top + 60]; })()"""
    )
    page.click(x, y)
    assert f"alive at step 10, {profile.steps[10].name}: {size(profile.timeline[10])}" in side(page)
    page.value("splitkit.setChoice(1)")
    other = profile_of(view[1].pairs[1])
    assert f"alive at step {other.index}, " in side(page)


def test_a_value_of_the_list_is_selected_with_its_line_of_python(page):
    row = next(i for i, cells in enumerate(page.value(LISTED)) if cells[2] == "saved")
    name = page.value(LISTED)[row][0]
    page.value(f"document.querySelectorAll('.alive tbody tr')[{row}].click()")
    assert page.value("splitkit.ops.name[splitkit.selected.op]") == name
    assert "source" in side(page) and "modeling_llama.py:" in side(page)
    assert_quiet(page)
