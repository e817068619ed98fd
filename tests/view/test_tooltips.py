"""What the page says of what is below the mouse, and of the step, is what Python says."""

from __future__ import annotations

import pytest
from browser import NEEDS_CHROMIUM
from campaigns import these_first
from capturedmodels import joint_graph
from ownorders import idle_of
from steeredpages import GPT2, SMALL, STEP, assert_quiet, border, planned, shown, side

import splitkit as sk
from splitkit.policies import SaveAll
from splitkit.units import duration, size
from splitkit.view.data.joint_ladder import HalvesView, source_line
from splitkit.view.data.ladder import LadderView

pytestmark = NEEDS_CHROMIUM


def ladder_of(name, schedule="1f1b", count=3, **options):
    flow, plan, costs = planned(name, count, **GPT2 if name == "gpt2" else SMALL)
    run = sk.simulate_schedule(sk.stage_costs(flow, plan, costs), schedule, 6, links="nvlink4", **options)
    return LadderView(flow, plan, costs, run=run, memory=2**40)


@pytest.fixture(scope="module")
def ladder():
    return ladder_of("gpt2")


@pytest.fixture
def page(browser, ladder, tmp_path):
    return shown(browser, tmp_path, ladder)


def tip(browser, where="main .tip"):
    return browser.value(
        f"(() => {{ const t = document.querySelector('{where}');"
        " return t.style.display === 'none' ? '' : t.textContent; })()"
    )


@pytest.mark.parametrize("name", these_first(["gpt2"], ["mixtral", "t5", "llama"]))
def test_the_values_that_a_border_lists_are_those_that_cross_it(browser, tmp_path, name):
    view = ladder_of(name)
    page, data = shown(browser, tmp_path, view), view.to_dict()
    by_name = {node.name: node for node in view.flow.nodes}
    bytes_of = {node.name: view.costs.nbytes(node) for node in view.flow.nodes}
    for row in range(1, len(data["rows"])):
        listed = page.value(f"crossing(splitkit.ops, splitkit.readers, {row}).map(op => splitkit.ops.name[op])")
        several = [name for name in listed if isinstance(by_name[name].meta["val"], tuple | list)]
        assert several or sum(bytes_of[name] for name in listed) == data["down"][row], (row, listed)
        assert sum(bytes_of[name] for name in listed) >= data["down"][row]
        assert [bytes_of[name] for name in listed] == sorted((bytes_of[name] for name in listed), reverse=True)


def test_the_mouse_on_a_border_tells_what_crosses_with_maker_and_readers(page, ladder):
    data = ladder.to_dict()
    row = page.value("splitkit.borders[1]")
    page.mouse("moved", *border(page, 1))
    page.settle()
    first, *lines = tip(page).split("\n")
    told = f"{size(data['down'][row])} forward, {size(data['up'][row])} of gradients back, for each microbatch"
    assert first == f"0 to 1: {told}"
    largest = page.value(f"crossing(splitkit.ops, splitkit.readers, {row}).map(op => splitkit.ops.name[op])[0]")
    assert f"  {largest}  float32[" in lines[0] and lines[1].strip().startswith("from transformer.h.")
    assert " to transformer" in lines[1]


def test_the_mouse_on_a_ribbon_tells_what_is_saved(page, ladder):
    places = page.value(
        """splitkit.ribbons.filter(([a, b]) => a === b).map(([a, , nbytes]) => {
        const s = splitkit, box = s.canvas.getBoundingClientRect(), x = s.right - s.wide2 - 20;
        const y = box.top + s.y + (s.items[a].y + 13) * s.zoom;
        return [box.left + s.x + x * s.zoom, y, nbytes, s.name(s.items[a])]; })"""
    )
    x, y, nbytes, name = max(places, key=lambda place: place[2])
    page.mouse("moved", x, y)
    page.settle()
    head, made, *lines = tip(page).split("\n")
    assert head == f"saved for backward: {size(nbytes)}" and made == f"made in {name}" and len(lines) >= 4
    data = ladder.to_dict()
    for (_, _, whole), kept in zip(data["saved"], page.value("splitkit.kept"), strict=True):
        assert sum(own for _, own in kept) == whole


def test_the_mouse_on_a_ribbon_of_forward_and_backward_lists_values(browser, tmp_path):
    joint = joint_graph("gpt2", **STEP)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    pair = joint.split(SaveAll(), costs)
    page = shown(browser, tmp_path, view := HalvesView(joint.flow, [pair], costs))
    x, y, nbytes = page.value(
        """(() => { const s = splitkit, own = s.ribbons.filter(([a, b]) => a === b);
        const [a, , nbytes] = own.sort((p, q) => q[2] - p[2])[0];
        const box = s.canvas.getBoundingClientRect(), left = s.right - s.wide2 - 20;
        return [box.left + s.x + left * s.zoom, box.top + s.y + (s.items[a].y + 13) * s.zoom, nbytes]; })()"""
    )
    page.mouse("moved", x, y)
    page.settle()
    head, _, *lines = tip(page).split("\n")
    assert head == f"saved for backward: {size(nbytes)}" and len(lines) >= 4
    values = sorted(pair.saved_values, key=lambda value: -value.nbytes)
    assert f"{size(values[0].nbytes)}  " in "\n".join(lines) and "from transformer.h." in "\n".join(lines)
    choice = view.to_dict()["choices"][0]
    for (_, _, whole), kept in zip(choice["saved"], choice["kept"], strict=True):
        assert sum(own for _, own in kept) == whole
    assert_quiet(page)


def test_the_mouse_on_boxes_and_bands_tells_lines_of_python_ranks_and_memory(page, ladder):
    stage = ladder.stages[1]
    peak = stage.fixed_bytes + stage.saved_bytes + stage.temporary_bytes
    about = page.value("splitkit.describe({stage: 1})")
    assert about.startswith("stage 1, rank 1\nforward ") and f"with one microbatch {size(peak)}:" in about
    op = next(node for node in ladder.flow.nodes if "gelu" in node.name or "tanh" in node.name)
    by_name = {node.name: node for node in ladder.flow.nodes}
    at = page.value("splitkit.ops.name").index(op.name)
    text = page.value(f"splitkit.describe({{op: {at}}})")
    assert source_line(op) in text.split("\n") and "activations.py:" in source_line(op)
    page.value(f"splitkit.select({{op: {at}}})")
    assert f"source{source_line(op)}" in side(page)
    row = page.value(f"splitkit.ops.row[{at}]")
    names = page.value(f"splitkit.opsOf[{row}].map(i => splitkit.ops.name[i])")
    lines = page.value(f"splitkit.describe({{row: {row}}})").split("\n")[2:]
    assert lines[:3] == list(dict.fromkeys(source_line(by_name[name]) for name in names))[:3]


def test_the_mouse_on_an_action_tells_its_stage_microbatch_times_and_memory(page, ladder):
    run = ladder.run
    event = next(e for e in run.timeline if (e.rank, e.kind, e.microbatch) == (1, "B", 2))
    x, y = page.value(
        f"""(() => {{ const t = splitkit.timeline, box = t.canvas.getBoundingClientRect();
        return [box.left + (t.x({event.start}) + t.x({event.end})) / 2, box.top + t.y(1) + 6]; }})()"""
    )
    page.mouse("moved", x, y)
    page.settle()
    first, second, third = tip(page, "footer .tip").split("\n")
    assert first == "backward of microbatch 2, stage 1"
    assert second == f"starts at {duration(event.start)}, takes {duration(event.end - event.start)}"
    peak = run.memory[1]
    assert third.endswith(f"its peak is {size(peak.peak)}, at {duration(peak.seconds)}") and "rank 1 holds " in third
    page.mouse("moved", x, y + 400)
    page.mouse("moved", 10, 10)
    page.settle()
    assert tip(page, "footer .tip") == ""


@pytest.mark.parametrize(
    ("schedule", "count", "options"),
    these_first(
        [("1f1b", 3, {}), ("interleaved-1f1b", 4, {"ranks": 2}), ("zbv", 4, {"ranks": 2})],
        [("gpipe", 3, {})],
    ),
)
def test_where_ranks_idle_and_when_they_peak_is_what_python_says(browser, tmp_path, schedule, count, options):
    view = ladder_of("gpt2", schedule, count, **options)
    run, page = view.run, shown(browser, tmp_path, view)
    told = page.value("idleOf(splitkit.run).map(of => [of.warmup, of.waiting, of.tail])")
    for own, other, bubble in zip(told, idle_of(run), run.bubbles, strict=True):
        assert own == pytest.approx(other, abs=1e-12) and sum(own) == pytest.approx(bubble * run.seconds, abs=1e-12)
    times = page.value("[...Array(splitkit.run.ranks).keys()].map(rank => peakTime(splitkit.run, rank))")
    assert times == pytest.approx([held.seconds for held in run.memory], abs=1e-12)
    made = "(run => run.peaks.map((_, rank) => kindsAt(run.by, rank, run.by.points[rank][run.by.highest[rank]])))"
    assert page.value(f"{made}(splitkit.run)") == [list(row.nbytes) for row in run.rows()]
    text = side(page)
    assert "warm-up" in text and f"highest on rank {run.limiting_rank}" in text
    assert ("gradients of weights" in text) == (schedule == "zbv")
    assert_quiet(page)


def test_a_legend_stands_on_each_kind_of_page_and_stays_closed(browser, tmp_path, page):
    assert "legend" in side(page) and "saved for backward, as wide as its bytes" in side(page)
    page.value("document.querySelector('.legend summary').click()")
    page.settle()
    page.value("splitkit.select({stage: 1})")
    assert page.value("document.querySelector('.legend').open") is False
    joint = joint_graph("gpt2", **STEP)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    shown(browser, tmp_path, HalvesView(joint.flow, [joint.split(SaveAll(), costs)], costs))
    assert "recomputed in backward" in side(browser)


def test_red_is_above_the_limit_and_nothing_else(browser, tmp_path, ladder):
    page = shown(browser, tmp_path, ladder)
    assert page.value("document.querySelectorAll('.bad').length") == 0 and " ◆" in side(page)


def test_a_page_is_as_dark_as_what_is_around_it(page):
    try:
        for scheme, around, dark in (
            ("light", "", False),
            ("dark", "", True),
            ("dark", "document.body.dataset.jpThemeLight = 'true'", False),
            ("light", "document.body.dataset.jpThemeLight = 'false'", True),
            ("light", "document.body.classList.add('vscode-dark')", True),
            ("light", "document.documentElement.classList.add('dark')", True),
        ):
            page("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            page.value("delete document.body.dataset.jpThemeLight; document.body.classList.remove('vscode-dark'); 1")
            page.value(f"{around}; splitkit.destroy(); window.splitkit = show(document.body, splitkit.data); 1")
            assert page.value("splitkit.root.classList.contains('dark')") is dark, (scheme, around)
    finally:
        page("Emulation.setEmulatedMedia", features=[])
