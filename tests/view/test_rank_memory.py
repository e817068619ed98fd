"""The memory of ranks, divided by module and listed at an instant, is what Python simulates and autograd saves."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from browser import NEEDS_CHROMIUM
from campaigns import these_first
from steeredpages import GPT2, assert_quiet, border, planned, shown, side

import splitkit as sk
from splitkit.graph.dataflow import readers_of
from splitkit.graph.storages import storage_key
from splitkit.memory.saved_storages import activations
from splitkit.pipeline.memory import memory_over_time
from splitkit.prices import kernels_of
from splitkit.units import duration, size
from splitkit.view.data.joint_ladder import source_line, type_text
from splitkit.view.data.ladder import LadderView

pytestmark = NEEDS_CHROMIUM
OTHERS = {"layers": 3, "width": 64, "heads": 2, "vocab": 100}
SLOW = sk.costs.Links.uniform(1e9, 1e-5)
SCHEDULES = [
    ("gpipe", {"links": SLOW}),
    ("1f1b", {"links": SLOW}),
    ("1f1b", {"links": SLOW, "static_buffers": True}),
    ("interleaved-1f1b", {"links": SLOW, "ranks": 2}),
    ("zbv", {"links": SLOW, "ranks": 2}),
]
TOLD = """(data => { const p = new Ladder(data, {}), seen = [];
p.folded = false; p.layout(); cancelAnimationFrame(p.pending);
const {run} = p, stages = run.by.units.map((_, k) => ({...p.heldIn(run, k), weights: weightsIn(p, run, k)}));
const bands = run.by.points.map((points, rank) => points.map((point, i) =>
  [point[0], bandsOfRank(p, run, rank).reduce((total, band) => total + band.bytes[i], 0)]));
return {stages, bands}; })"""
ROWS = "[...document.querySelectorAll('.alive tbody tr')].map(r => [...r.cells].map(c => c.textContent))"


@pytest.fixture(scope="module")
def ladder_of():
    """The picture of a plan of a model, with a step."""
    known = {}

    def make(name, schedule="1f1b", **options):
        if name not in known:
            flow, plan, costs = planned(name, 4, **GPT2 if name == "gpt2" else OTHERS)
            known[name] = LadderView(flow, plan, costs), sk.stage_costs(flow, plan, costs)
        view, stages = known[name]
        return replace(view, run=sk.simulate_schedule(stages, schedule, 6, **options))

    return make


@pytest.fixture(scope="module")
def ladder(ladder_of):
    return ladder_of("gpt2", links=SLOW)


@pytest.fixture
def page(browser, ladder, tmp_path):
    return shown(browser, tmp_path, ladder)


def steps(points, times):
    """The most bytes at each time, and those after it."""
    known, now, found = {}, 0, []
    for time, nbytes in points:
        known[time] = max(known.get(time, (nbytes, 0))[0], nbytes), nbytes
    for time in times:
        most, now = known.get(time, (now, now))
        found.append((most, now))
    return found


def assert_adds_up(told, run):
    """The bands of each rank are the bytes of the simulation at every instant."""
    for own, points in zip(told["bands"], memory_over_time(run), strict=True):
        own, points = ([(round(time, 15), nbytes) for time, nbytes in each] for each in (own, points))
        times = sorted({time for time, _ in (*own, *points)})
        assert steps(own, times) == steps(points, times)


def kept_by(view, nodes):
    """The bytes that autograd saves in a stage by the name of the op that makes them, or of the one that saves them."""
    flow = view.flow
    known, found, maker, seen = flow.fact(activations, kernels_of(view.costs)), {}, {}, set()
    for node, storages in known.values.items():
        for storage in storages:
            maker.setdefault(storage, flow.producer(node))
    own, placed = {*nodes}, {*flow.nodes}
    for node, storages in known.saved.items():
        for storage in storages if flow.producer(node) in own else ():
            if storage not in seen:
                seen.add(storage)
                made = maker.get(storage)
                owner = made if made in placed else flow.producer(node)
                found[owner.name] = found.get(owner.name, 0) + known.nbytes[storage]
    return found


def crossing(view, rows):
    """The names of ops of contiguous values that a stage of these rows receives or sends: of each its first owner."""
    flow, row_of = view.flow, view.rows.of
    values, owner = flow.fact(activations, kernels_of(view.costs)).values, {}
    for node, storages in values.items():
        for storage in storages:
            owner.setdefault(storage, flow.producer(node))
    found = set()
    for node in flow.nodes:
        after = [row_of[r] for r in readers_of(flow).get(node, ()) if r in row_of]
        crosses = any((row_of[node] in rows) != (row in rows) and row > row_of[node] for row in after)
        value = node.meta["val"]
        if crosses and isinstance(value, torch.Tensor) and value.is_contiguous() and value.nbytes:
            found |= {owner[s].name for s in values[node] if owner[s] in row_of}
    return found


def weights_of(view, rows):
    """The bytes of weights, gradients and Adam's state by row; what several rows read counts in the first."""
    seen, found = set(), []
    for row in rows:
        owned = [t for node in view.nodes_of_rows[row] for t in view.flow.owned(node)]
        fresh = {storage_key(t): t for t in owned if storage_key(t) not in seen}
        seen |= {*fresh}
        found.append(sum(t.untyped_storage().nbytes() + 3 * t.nbytes * t.requires_grad for t in fresh.values()))
    return found


def assert_is_what_is_saved(view, names, told, stages, rows_of_stages):
    """What the page says of each stage is what autograd saves there, and what crosses its borders."""
    for own, stage, rows in zip(told["stages"], stages, rows_of_stages, strict=True):
        nodes = sorted((n for row in rows for n in view.nodes_of_rows[row]), key=view.flow.index.__getitem__)
        wanted, inside = kept_by(view, nodes), {node.name for node in nodes}
        by_name = {names[op] if op >= 0 else "": (kind, nbytes) for op, kind, nbytes in own["values"]}
        assert {name for name in wanted if by_name[name][0] == "saved"} == {*wanted} & inside
        assert all(by_name[name][1] >= nbytes for name, nbytes in wanted.items())
        assert {kind for name, (kind, _) in by_name.items() if name not in wanted} <= {"sent", "received"}
        assert {name in inside for name, (kind, _) in by_name.items() if kind == "sent"} <= {True}
        assert {name in inside for name, (kind, _) in by_name.items() if kind == "received"} <= {False}
        assert crossing(view, rows) <= {*by_name}
        assert [row for row, _ in own["weights"]] == [*rows]
        assert [nbytes for _, nbytes in own["weights"]] == weights_of(view, rows)
        assert sum(nbytes for _, nbytes in own["weights"]) == stage.fixed_bytes


@pytest.mark.parametrize("name", these_first(["llama"], ["gpt2", "t5"]))
def test_the_bands_of_each_rank_are_its_bytes_and_by_what_autograd_saves(browser, tmp_path, ladder_of, name):
    page = shown(browser, tmp_path, ladder_of(name))
    # what is held when under the others is told by test_who_is_in_flight_is_what_the_timeline_says
    for schedule, options in SCHEDULES[::2] if name == "llama" else SCHEDULES:
        view = ladder_of(name, schedule, **options)
        run, priced, data = view.run, view.run.stages, view.to_dict()
        told = page.value(f"{TOLD}({json.dumps(data)})")
        assert_adds_up(told, run)
        if options.get("static_buffers"):  # what is received lies in them
            kinds = [{kind for op, kind, _ in own["values"] if op >= 0} for own in told["stages"]]
            assert all("received" not in kind for kind in kinds)
            # where buffers hold more than a stage saves of what it receives (Llama's rotary embeddings, GPT-2's mask),
            # the page tells no values
            assert any(kinds) and all("saved" in kind for kind in kinds if kind)
            assert all(own["values"] or own["rest"] for own in told["stages"])
        if schedule != "gpipe":  # what a stage saves of a microbatch is the same under each schedule
            continue
        rows = [[r for r in range(len(view.rows)) if view.part_of_row(r) == k] for k in range(4)]
        assert_is_what_is_saved(view, data["ops"]["name"], told, priced, rows)
        sums = [sum(each[2] for each in own["values"]) + own["rest"] for own in told["stages"]]
        assert sums == [stage.saved_bytes for stage in priced]
        assert all(own["rest"] < 0.15 * stage.saved_bytes for own, stage in zip(told["stages"], priced, strict=True))


@pytest.mark.parametrize(("schedule", "options"), these_first([SCHEDULES[n] for n in (1, 3, 4)], SCHEDULES[:3:2]))
def test_who_is_in_flight_is_what_the_timeline_says(browser, tmp_path, ladder_of, schedule, options):
    view = ladder_of("gpt2", schedule, **options)
    page, run = shown(browser, tmp_path, view), view.run
    told = page.value(
        """splitkit.run.by.points.map((points, rank) => points.map((point, i) => {
        const {sets, runs} = inFlight(splitkit.run, rank, i), {counts} = splitkit.run.by;
        const all = sets.map(set => [...set].sort()), sizes = sets.map(set => set.size);
        if (runs) sizes[counts * splitkit.run.by.owned[rank].indexOf(runs[2]) + 1] = 1;
        return [all, runs && runs.slice(1, 4), sizes.join() === point.slice(2).join()]; }))"""
    )
    each = page.value("splitkit.run.by.counts")
    times = page.value("splitkit.run.by.points.map(points => points.map(point => point[0]))")
    actions = {(e.kind, e.stage, e.microbatch): e for e in run.timeline}
    for rank, own in enumerate(told):
        stages = [stage for stage, of in enumerate(run.order.rank_of) if of == rank]
        for (sets, runs, is_exact), time in zip(own, times[rank], strict=True):
            assert is_exact
            for j, stage in enumerate(stages):
                saved, _, *waiting = sets[each * j : each * (j + 1)]
                ends = {m: actions.get(("B", stage, m)) or actions["I", stage, m] for m in range(6)}
                spans = [(saved, lambda m, stage=stage: actions["F", stage, m].start, lambda m, ends=ends: ends[m].end)]
                if waiting:
                    last = lambda m, stage=stage: actions["W", stage, m].end  # noqa: E731
                    spans += [(waiting[0], lambda m, ends=ends: ends[m].start, last)]
                    spans += [(waiting[1], lambda m, ends=ends: ends[m].end, last)]
                for found, begins, stops in spans:
                    # at the instant of a change, both the state before it and after it are true
                    assert {m for m in range(6) if begins(m) < time < stops(m)} <= {*found}
                    assert {*found} <= {m for m in range(6) if begins(m) <= time <= stops(m)}
            if runs:
                event = actions[tuple(runs)]
                assert event.start <= time <= event.end and event.rank == rank


def lane(browser, rank, seconds, share=0.5):
    """A place in the memory of a rank, in pixels of the window: ``share`` of its height above its foot."""
    return browser.value(
        f"""(() => {{ const t = splitkit.timeline, box = t.canvas.getBoundingClientRect(), [top, base] = t.lane({rank});
        return [box.left + t.x({seconds}), box.top + base - {share} * (base - top)]; }})()"""
    )


def test_the_highest_peak_is_listed_until_an_instant_is_clicked(page, ladder):
    run, worst = ladder.run, ladder.run.limiting_rank
    peak = run.memory[worst]
    assert f"alive on rank {worst} at {duration(peak.seconds)}: {size(peak.peak)}" in side(page)
    event = next(e for e in run.timeline if (e.rank, e.kind, e.microbatch) == (1, "F", 1))
    time = event.start + 0.4 * (event.end - event.start)
    held = [nbytes for at, nbytes in memory_over_time(run)[1] if at <= time][-1]
    page.click(*lane(page, 1, time))
    text, shown_time = side(page), page.value("splitkit.timeline.pinned.seconds")
    at = page.value("splitkit.timeline.instant.i")
    seconds = page.value(f"splitkit.run.by.points[1][{at}][0]")
    assert shown_time == pytest.approx(time, rel=0.05) and seconds <= shown_time
    assert f"alive on rank 1 at {duration(seconds)}: {size(held)}" in text
    stage = run.stages[1]
    assert f"stage 1 holds microbatches 0, 1, {size(stage.saved_bytes)} each; to keep only what it receives" in text
    assert f"would cost its forward again, {duration(stage.forward)} each" in text
    temporary = f"temporary memory of forward of microbatch 1 in stage 1 {size(stage.temporary_bytes)}"
    assert f"besides: weights and state {size(stage.fixed_bytes)}, messages " in text and temporary in text
    assert page.value("splitkit.selected") is None
    rows = page.value(ROWS)
    by_name = {node.name: node for node in ladder.flow.nodes}
    sizes = page.value("splitkit.heldIn(splitkit.run, 1).values.map(each => each[2])")
    assert [row[3] for row in rows] == [size(2 * nbytes) for nbytes in sizes[: len(rows)]] and len(rows) == 12
    for value, module, kind, _ in rows:
        name, kind_of_value = value.split("\n")
        assert kind_of_value == type_text(by_name[name]) and kind.endswith(" ×2")
        assert module.split("\n")[1] == source_line(by_name[name]).split(": ")[0] != ""
    page.value("document.querySelectorAll('.alive tbody tr')[0].click()")
    assert page.value("splitkit.ops.name[splitkit.selected.op]") == rows[0][0].split("\n")[0]
    assert_quiet(page)


def test_keys_go_from_instant_to_instant_and_from_rank_to_rank(page, ladder):
    page.click(*lane(page, 2, ladder.run.seconds / 2))
    page.value("splitkit.timeline.canvas.focus()")
    before = page.value("splitkit.timeline.instant.i")
    page.key("ArrowRight")
    assert page.value("splitkit.timeline.instant.i") == before + 1
    assert page.value("splitkit.said.textContent").startswith("rank 2 at ")
    page.key("ArrowLeft")
    page.key("ArrowUp")
    rank, i = page.value("[splitkit.timeline.instant.rank, splitkit.timeline.instant.i]")
    time = page.value(f"splitkit.run.by.points[1][{i}][0]")
    assert rank == 1 and f"alive on rank 1 at {duration(time)}: " in side(page)
    page.key("Escape")
    assert f"alive on rank {ladder.run.limiting_rank} at " in side(page)


def test_the_mouse_on_a_band_tells_its_module(page, ladder):
    run = ladder.run
    time = run.memory[1].seconds
    page.click(*lane(page, 1, time))
    i = page.value("splitkit.timeline.instant.i")
    bands = page.value(f"bandsOfRank(splitkit, splitkit.run, 1).map(b => [b.name, b.kind, b.bytes[{i}]])")
    most, below = page.value("splitkit.timeline.most(splitkit.run)"), 0
    for name, kind, nbytes in bands:
        below += nbytes
        if nbytes < most / 10:
            continue
        page.mouse("moved", *lane(page, 1, time, (below - nbytes / 2) / most))
        page.settle()
        told = page.value("document.querySelector('footer .tip').textContent")
        assert f"of which {name}, {kind}: {size(nbytes)}" in told and told.startswith("rank 1 holds ")
    rows = "[...document.querySelectorAll('.bands tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    assert [row[:3] for row in page.value(rows)] == [[n, kind, size(own)] for n, kind, own in bands if own]
    label = page.value("document.querySelector('.bands table').getAttribute('aria-label')")
    assert label.startswith("memory by module on rank 1 at ")


def test_undo_brings_the_memory_of_the_plan_back(page, ladder):
    first, rows = side(page), page.value(ROWS)
    x, y = border(page, 1)
    page.drag(x, y, x, y + 90)
    moved = page.value("splitkit.borders")
    assert moved != page.value("splitkit.shipped") and page.value("splitkit.timeline.instant") is None
    assert "alive on rank " not in side(page)
    page.value("splitkit.undo()")
    assert page.value(ROWS) == rows and side(page) == first
    assert_quiet(page)


def test_a_saved_picture_has_the_bands(page):
    colours = page.value(
        """splitkit.run.by.owned.flatMap((_, rank) =>
        bandsOfRank(splitkit, splitkit.run, rank, rank !== splitkit.timeline.told)
        .map(band => band.colour))"""
    )
    svg = page.value("svgOf(splitkit)")
    assert len(colours) > 4 and [c for c in colours if f'fill="{c}"' not in svg] == []


def test_a_step_of_other_stages_is_not_divided_by_module(browser, tmp_path, ladder):
    stages = [replace(stage, saved_bytes=stage.saved_bytes + 8) for stage in ladder.run.stages]
    run = sk.simulate_schedule(stages, "1f1b", 6)
    page = shown(browser, tmp_path, view := replace(ladder, run=run))
    assert_adds_up(page.value(f"{TOLD}({json.dumps(view.to_dict())}, null)"), run)
    assert page.value("bandsOfRank(splitkit, splitkit.run, 1).map(b => b.name)")[:2] == ["stage 1", "stage 1"]
    assert "not divided by module: the step was simulated with other stages" in side(page)
