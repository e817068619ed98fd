"""What is alive at a step of forward and backward, as the page lists it, is what the simulation says."""

from __future__ import annotations

import pytest
from browser import NEEDS_CHROMIUM
from capturedmodels import joint_graph
from steeredpages import STEP, assert_quiet, shown, side

import splitkit as sk
from splitkit.costs import unit_of
from splitkit.policies import RecomputeAll, SaveAll
from splitkit.units import duration, size
from splitkit.view.data.joint_ladder import TINY, HalvesView

pytestmark = NEEDS_CHROMIUM
LISTED = "[...document.querySelectorAll('.alive tbody tr')].map(r => [...r.cells].map(c => c.textContent))"


@pytest.fixture(scope="module")
def view():
    joint = joint_graph("gpt2", **STEP)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    return joint.model, HalvesView(joint.flow, [joint.split(p, costs) for p in (SaveAll(), RecomputeAll())], costs)


@pytest.fixture
def page(browser, tmp_path, view):
    return shown(browser, tmp_path, view[1])


def live_at(profile, step):
    alive = [b for b in profile.buffers if b.nbytes and b.born <= step <= b.dies]
    return sorted(alive, key=lambda b: -b.nbytes)


def profile_of(pair):
    return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)


@pytest.mark.parametrize("number", [0, 1])
def test_what_is_alive_at_each_step_is_that_of_the_profile(page, view, number):
    page.value(f"splitkit.setChoice({number})")
    profile = profile_of(view[1].pairs[number])
    for step in range(0, len(profile.steps), 17):
        told = page.value(f"aliveAt(splitkit.choice.memory, {step}).map(each => each[4])")
        assert told == [b.nbytes for b in live_at(profile, step) if b.nbytes >= profile.peak // TINY]


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
    assert "source" in side(page) and "pytorch_utils.py:" in side(page)
    assert_quiet(page)


BANDS = "splitkit.timeline.bands.map(band => [band.name, band.row, [...band.bytes]])"


@pytest.mark.parametrize("number", [0, 1])
def test_the_bands_are_the_bytes_of_each_step_by_module(page, view, number):
    page.value(f"splitkit.folded && splitkit.fold.click(); splitkit.setChoice({number})")
    page.settle()
    profile, rows = profile_of(view[1].pairs[number]), view[1].rows
    bands = page.value(BANDS)
    assert [sum(column) for column in zip(*(band[2] for band in bands), strict=True)] == list(profile.timeline)
    tiny = profile.peak // TINY
    row_of = {node.name: rows.of[node] for node in view[1].flow.nodes}
    weights = {name: p.nbytes for name, p in view[0].named_parameters() if p.nbytes >= tiny}
    for name, row, held in bands:
        if row < 0:
            continue
        assert rows.names[row] == name
        own = sum(nbytes for weight, nbytes in weights.items() if row_of_weight(rows.names, weight) == name)
        for step in range(0, len(profile.steps), 61):
            alive = [b for b in live_at(profile, step) if b.nbytes >= tiny and row_of.get(b.name) == row]
            assert own + sum(b.nbytes for b in alive) == held[step], (name, step)


def row_of_weight(names, weight):
    """The row of the innermost module that has the weight."""
    return max((name for name in names if weight.startswith(f"{name}.")), key=len, default=None)


def test_folded_layers_are_one_band_and_the_mouse_tells_it(page):
    page.value("splitkit.folded || splitkit.fold.click()")
    page.settle()
    names = [band[0] for band in page.value(BANDS)]
    assert "transformer.h.1 … 2  ×2" in names
    x, y = page.value(
        """(() => { const t = splitkit.timeline, box = t.canvas.getBoundingClientRect(), step = t.of.at;
        const base = t.h - 20, bytes = t.bands[0].bytes[step] / 2;
        return [box.left + t.x(step + 0.5), box.top + base - (base - 26) * bytes / t.most]; })()"""
    )
    page.mouse("moved", x, y)
    page.settle()
    assert f"of which {names[0]}: " in page.value("splitkit.timeline.caption()")
    page.value("document.querySelectorAll('.bands tbody tr')[0].click()")
    assert page.value("splitkit.selected.row") == page.value("splitkit.timeline.bands[0].row")
    assert page.value("document.querySelector('.bands [aria-current]').cells[0].textContent") == names[0]
    assert_quiet(page)


def test_not_keeping_a_value_costs_what_the_nearest_plan_without_it_says(page, view):
    """SaveAll beside RecomputeAll: the other plan recomputes nearly all that this one saves."""
    page.value("splitkit.setChoice(0)")
    pairs, costs = view[1].pairs, view[1].costs
    twice = {node.name for node in pairs[1].plan.places if len(pairs[1].plan.places[node]) > 1}
    more = sum(costs.seconds(node) for node in pairs[1].plan.places if len(pairs[1].plan.places[node]) > 1)
    saved = [cells for cells in page.value(LISTED) if cells[2] == "saved" and cells[0] in twice]
    assert saved and {cells[4] for cells in saved} == {f"+{duration(more, unit_of(costs))}"}
    title = page.value(
        "[...document.querySelectorAll('.alive tbody tr')].find(r => r.cells[2].textContent === 'saved').title"
    )
    assert "pytorch_utils.py:" in title and "peak" in title and "instead of" in title
    page.value("splitkit.setChoice(1)")
    again = [cells[4] for cells in page.value(LISTED) if cells[2] == "saved"]
    assert all(text.startswith(("recomputed", "≥ ")) for text in again)
