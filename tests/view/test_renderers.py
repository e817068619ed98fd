"""Every object that shows itself: what its still picture says, that texts do not overlap, what is refused."""

from __future__ import annotations

import inspect
import json
import sys
import typing
import xml.etree.ElementTree as ET
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from capturedmodels import captured_example
from smallnets import loss_or_sum
from svgtexts import SVG, outside, overlaps, texts_of
from torch import fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

import splitkit as sk
from splitkit import prices
from splitkit.engine.pair import Pair
from splitkit.engine.split import Split
from splitkit.errors import FileError, SplitError, ViewError
from splitkit.memory.profile import MemoryProfile
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.studies.sweep import Sweep
from splitkit.units import duration, size
from splitkit.view.data.ladder import LadderView
from splitkit.view.data.report import Report
from splitkit.view.renderers import bundle, pictured, svg
from splitkit.view.svg.ladder_svg import LadderDrawing

EVIL = "<script>alert(1)</script> & more"


@pytest.fixture(scope="module")
def gpt2():
    gm = captured_example("gpt2", layers=6, width=32, heads=2, vocab=200).graph
    costs = sk.costs.training(sk.costs.roofline(gm, "h100"))
    return gm, costs, sk.plan(gm, sk.policies.Stages(3), costs)


@pytest.fixture(scope="module")
def run(gpt2):
    gm, costs, plan = gpt2
    return sk.simulate_schedule(sk.stage_costs(sk.analyze(gm), plan, costs), "1f1b", 4, links="nvlink4")


@pytest.fixture(scope="module")
def pair():
    joint = sk.capture_joint(
        nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(8)]), X, loss=loss_or_sum
    )
    return joint.split(sk.policies.MinCut(price=0.0)), sk.Frontier(joint)


X = torch.ones(4, 16)


def test_a_plan_shows_the_step_of_the_schedule_that_it_was_made_for(gpt2):
    gm, costs, _ = gpt2
    policy = sk.policies.Stages(2, schedule="1f1b", microbatches=3, links="nvlink4")
    plan = sk.plan(gm, policy, costs)
    run = pictured(plan).ladder().run
    same = sk.simulate_schedule(sk.stage_costs(sk.analyze(gm), plan, costs), "1f1b", 3, links="nvlink4")
    assert (run.seconds, run.memory) == (same.seconds, same.memory)
    assert len(pictured(plan).tables()) == 2, "the second is of the ranks"
    other = sk.simulate_schedule(run.stages, "gpipe", 2)
    assert pictured(plan, run=other).ladder().run is other
    # FLOPs make no step, and neither does a plan without a schedule
    assert pictured(plan, costs=sk.costs.flops(gm)).ladder().run is None
    assert pictured(gpt2[2]).ladder().run is None


def every(gpt2, run, pair):
    gm, costs, plan = gpt2
    split = sk.split(gm, plan)
    of = sk.simulate_memory(pair[0].forward, pair[0].backward, user_outputs=pair[0].outputs)
    return {
        "plan": (plan, {"costs": costs, "memory": "1MiB", "title": EVIL}),
        "split": (split, {"run": run}),
        "inference": (split, {"optimizer": None}),
        "report": (sk.report(gm, plan, costs), {}),
        "run": (run, {"memory": max(run.peaks) // 2}),
        "memory": (of, {"memory": of.peak * 2}),
        "memory of a split": (sk.simulate_memory(split), {}),
        "pair": (pair[0], {}),
        "frontier": (pair[1], {"marks": {EVIL: pair[1].points[0], "other": (1e4, 1e-6)}}),
        "sweep": (sk.sweep(gm, costs, stages=(2,), microbatches=(2,), schedules=("gpipe", "1f1b")), {}),
    }


NAMES = ("plan", "split", "inference", "report", "run", "memory", "memory of a split", "pair", "frontier", "sweep")


@pytest.fixture(scope="module")
def shown(gpt2, run, pair):
    found = every(gpt2, run, pair)
    assert tuple(found) == NAMES
    return found


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_still_pictures_are_escaped_and_do_not_overlap(shown, name):
    one, options = shown[name]
    picture = svg(one, **options)
    assert "<script" not in picture and "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    assert overlaps(picture) == [] and outside(picture) == []
    assert len(picture) < 60_000


@pytest.mark.parametrize("name", NAMES)
def test_every_object_is_text_html_page_and_file(shown, name, tmp_path):
    one, options = shown[name]
    made = one._repr_mimebundle_()
    assert set(made) == {"text/plain", "text/html", "image/svg+xml"} and made["text/plain"] == str(one)
    assert (
        ElementTree.fromstring(made["image/svg+xml"]).tag.endswith("svg") and made["image/svg+xml"] in made["text/html"]
    )
    assert "<svg" in made["text/html"] and "<table" in made["text/html"] and "<script" not in made["text/html"]
    framed = one.view(**options)._repr_mimebundle_()
    assert "<iframe srcdoc=" in framed["text/html"] and framed["image/svg+xml"].startswith("<svg")
    one.to_html(tmp_path / "page.html", **options)
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "<script>alert" not in page
    one.to_svg(tmp_path / "picture.svg", **options)
    assert ET.parse(tmp_path / "picture.svg").getroot().tag == f"{SVG}svg"
    with pytest.raises(FileError, match="SK504"):
        one.to_svg(tmp_path / "none" / "picture.svg", **options)


def test_the_ladder_says_what_the_page_says(gpt2):
    gm, costs, plan = gpt2
    view = LadderView(sk.analyze(gm), plan, costs, memory=2**20)
    data = view.to_dict()
    drawing = LadderDrawing(data, view.saved_bytes)
    assert drawing.items[0].start == 0 and drawing.items[-1].end == len(data["rows"])
    assert all(a.end == b.start for a, b in zip(drawing.items, drawing.items[1:], strict=False))
    assert any(item.end - item.start > 1 for item in drawing.items), "equal layers are folded"
    texts = [text for text, *_ in texts_of(drawing.to_svg())]
    stages = sk.stage_costs(sk.analyze(gm), plan, costs)
    for stage, cost in enumerate(stages):
        assert f"stage {stage}" in texts and duration(cost.forward + cost.backward) in texts
    for below in stages[1:]:
        assert any(f"▲ {size(below.input_gradient_bytes)}" in text for text in texts)
    assert sum(text.startswith("▼ ") for text in texts) == 2
    inference = [text for text, *_ in texts_of(svg(plan, costs=costs, optimizer=None))]
    assert not any("∇" in text or "▲" in text for text in inference)


def test_a_ladder_of_very_many_rows_is_drawn_with_few_boxes():
    rows, columns = 150, ("forward", "backward", "saved", "temporary", "fixed")
    drawing = LadderDrawing(
        {
            "title": "", "unit": "s", "trains": True, "memory": None, "parts": ["0", "1"], "devices": ["", "cuda:1"],
            "rows": [{"name": f"layers.{i}", "part": i // 75, "ops": 1, "kind": i} for i in range(rows)],
            "borders": [0, 75, 150], "times": dict.fromkeys(columns[:2], [1.0] * rows),
            "stages": dict.fromkeys(columns, [75.0] * 2), "down": [1] * (rows + 1), "up": [1] * (rows + 1),
            "edges": [(i, i + 1, 4) for i in range(rows - 1)], "saved": [(i, i, 4) for i in range(rows)],
        },
        lambda start, end: 4 * (end - start),
    )  # fmt: skip
    assert len(drawing.items) <= 80 and drawing.items[-1].end == rows
    picture = drawing.to_svg()
    assert overlaps(picture) == [] and outside(picture) == [] and "stage 1 cuda:1" in picture


def test_a_run_has_a_box_for_each_action_that_can_be_told_apart(run):
    root = ET.fromstring(svg(run))
    boxes = [
        e for e in root.iter(f"{SVG}rect") if (e.findtext(f"{SVG}title") or "").startswith(("forward", "backward"))
    ]
    assert len(boxes) == len(run.timeline)
    large = sk.simulate_schedule(run.stages, "1f1b", 3000)
    picture = svg(large)
    assert picture.count("<rect") <= 3 * 2 * 860 and len(picture) < 1_000_000
    ends = [float(e.get("x")) + float(e.get("width")) for e in ET.fromstring(picture).iter(f"{SVG}rect") if e.get("x")]
    assert max(ends) == pytest.approx(860 - 84, abs=1)


def test_many_ranks_are_drawn_without_their_memory(run):
    wide = sk.simulate_schedule([run.stages[0]] * 20, "1f1b", 20)
    picture = svg(wide)
    assert overlaps(picture) == [] and picture.count("<polygon") == 0 and "rank 19" in picture


def test_memory_has_peak_capacity_and_what_ran(shown):
    profile, options = shown["memory"]
    texts = " ".join(text for text, *_ in texts_of(svg(profile, **options)))
    for part in (
        f"peak {size(profile.peak)}",
        f"capacity {size(profile.peak * 2)}",
        "forward",
        "backward",
        "bytes alive",
    ):
        assert part in texts


def test_a_limit_that_is_far_off_does_not_make_all_flat(shown, run):
    for name in ("memory", "run", "sweep"):
        one = shown[name][0]
        one = replace(one, memory=2**50) if name == "sweep" else one
        options = {} if name == "sweep" else {"memory": 2**50}
        root = ET.fromstring(svg(one, **options))
        heights = [y for e in root.iter(f"{SVG}polygon") for y in points_of(e)]
        assert name == "sweep" or max(heights) - min(heights) > 20
        dots = [float(e.get("cx")) for e in root.iter(f"{SVG}circle")]
        assert name != "sweep" or max(dots) > 400


def points_of(polygon):
    return [float(point.split(",")[1]) for point in polygon.get("points").split()]


def test_times_are_written_as_a_trace(shown, run, tmp_path):
    for one in (run, shown["memory"][0]):
        one.to_trace(tmp_path / "trace.json")
        trace = json.loads((tmp_path / "trace.json").read_text())
        assert trace == json.loads(json.dumps(one.to_chrome_trace())) and trace["traceEvents"]
    profile = shown["memory"][0]
    counted = [e["args"]["bytes"] for e in profile.to_chrome_trace()["traceEvents"] if e["ph"] == "C"]
    assert tuple(counted) == profile.timeline
    assert not hasattr(shown["pair"][0], "to_trace")


def test_what_cannot_be_drawn_is_refused_or_told_in_a_notebook(gpt2, run):
    gm, _, plan = gpt2
    with pytest.raises(ViewError, match="SK901(.|\n)*splitkit.split"):
        sk.Plan.of({}).view()
    with pytest.raises(ViewError, match="SK901.*3 stages(.|\n)*stage_costs"):
        sk.plan(gm, sk.policies.Stages(2)).view(run=run)
    with pytest.raises(TypeError, match="live"):
        run.view(live=True)
    with pytest.raises(ViewError, match="SK901.*MemoryProfile(.|\n)*simulate_schedule"):
        plan.view(run=sk.simulate_memory(gm))
    with pytest.raises(SplitError, match="SK301"):
        plan.view(beside={"a": 0})
    with pytest.raises(SplitError, match="SK302"):
        plan.view(memory="much")
    with pytest.raises(ViewError, match="SK901"):
        svg(object())
    with pytest.raises(TypeError):
        plan.view(colour="red")
    empty = bundle(sk.Plan.of({}))
    assert "No picture" in empty["text/html"] and empty["text/plain"] == str(sk.Plan.of({}))


def test_a_plan_that_leaves_nodes_to_the_parent_is_shown_as_bars():
    gm = sk.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4))
    first = next(iter(sk.analyze(gm).nodes))
    part = sk.Plan.of({first: 0})
    with pytest.raises(SplitError, match="SK208"):
        part.view()
    html = part._repr_mimebundle_()["text/html"]
    assert "share of the FLOPs" in html and "No picture" in html


def test_a_plan_whose_parent_computes_between_parts_is_refused_before_anything_is_priced(tmp_path):
    gm = sk.capture(nn.Sequential(*[nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)] * 3), torch.ones(2, 4))
    plan = sk.plan(gm, sk.policies.BySupport(["aten.linear"]))
    for draw in (plan.view, lambda: plan.to_svg(tmp_path / "plan.svg")):
        with pytest.raises(SplitError, match="SK208"):
            draw()
    assert "No picture" in plan._repr_mimebundle_()["text/html"]


def test_a_plan_of_forward_and_backward_is_drawn_like_its_pair(pair, tmp_path):
    cut, plan = pair[0], pair[0].plan
    assert svg(plan) == svg(cut) and "No picture" not in plan._repr_mimebundle_()["text/html"]
    plan.to_html(tmp_path / "plan.html", memory="1MiB", title=EVIL)
    cut.to_html(tmp_path / "pair.html", memory="1MiB", title=EVIL)
    assert (tmp_path / "plan.html").read_text() == (tmp_path / "pair.html").read_text()
    with pytest.raises(SplitError, match="SK302"):
        plan.view(memory="much")
    wrong = plan.place({node: ("backward",) for node in plan.places if node.op != "placeholder"})
    assert "No picture" in wrong._repr_mimebundle_()["text/html"] and "<svg" in wrong._repr_mimebundle_()["text/html"]


def test_a_graph_without_sizes_is_shown_as_bars():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    html = sk.plan(gm, sk.policies.Stages(2))._repr_mimebundle_()["text/html"]
    assert "No picture" in html and "<table" in html


def test_a_large_plan_is_not_priced_unasked(gpt2, monkeypatch):
    from splitkit.view import renderers

    monkeypatch.setattr(renderers, "_MOST_NODES", 10)
    html = gpt2[2]._repr_mimebundle_()["text/html"]
    assert "<svg" not in html and ".view()" in html and "Plan of" in html


def test_very_many_parts_are_not_drawn_into_a_notebook_unasked(tmp_path):
    gm = sk.capture(nn.Sequential(*[nn.Tanh() for _ in range(130)]), torch.ones(2))
    plan = sk.plan(gm, sk.policies.RoundRobin(2))
    html = plan._repr_mimebundle_()["text/html"]
    assert "<svg" not in html and "<table" in html and "130 parts are too many to draw unless you ask" in html
    plan.to_svg(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().count("stage ") >= 130


def test_without_the_package_it_is_named(gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "splitkit.view.page.live_widget", raising=False)
    with pytest.raises(ViewError, match=r"SK902.*anywidget(.|\n)*pip install anywidget"):
        gpt2[2].view(live=True)


def test_points_of_pictures_are_circles(pair):
    profile = sk.simulate_memory(sk.capture(nn.Linear(4, 4), torch.zeros(2, 4)))
    for shown, dots in ((pair[1], 2), (profile, 1)):
        picture = svg(shown)
        assert picture.count("<circle") >= dots and "<cycle" not in picture


def test_a_joint_plan_refuses_what_only_stages_have(pair, run, tmp_path):
    """It has neither a step of stages, nor another plan beside it, nor a widget."""
    plan = pair[0].plan
    plan.to_html(tmp_path / "page.html", optimizer="sgd", memory="1GiB", title="one")
    for option in ({"run": run}, {"beside": plan}):
        with pytest.raises(ViewError, match=f"SK901.*{next(iter(option))} was given"):
            plan.to_svg(tmp_path / "plan.svg", **option)
    with pytest.raises(ViewError, match="SK901(.|\n)*plans and splits"):
        plan.view(live=True)


OPTIONS = {
    sk.Plan: {"costs", "optimizer", "memory", "run", "measured", "beside", "title"},
    Split: {"costs", "optimizer", "memory", "run", "measured", "beside", "title"},
    Pair: {"costs", "memory", "title"},
    sk.Frontier: {"marks", "memory", "title"},
    MemoryProfile: {"memory"},
    ScheduleRun: {"memory"},
    Report: set(),
    Sweep: set(),
}


@pytest.mark.parametrize("shown", OPTIONS, ids=lambda shown: shown.__name__)
def test_options_are_keywords_that_an_editor_completes(shown):
    """Those of ``view``, ``to_html`` and ``to_svg`` are the same, typed, described, and what the renderer takes."""
    steered = {"height", "live"} if "optimizer" in OPTIONS[shown] else {"height"}
    for method, more in (("view", steered), ("to_html", {"path"}), ("to_svg", {"path"})):
        given = inspect.signature(getattr(shown, method)).parameters
        assert {*given} == OPTIONS[shown] | more | {"self"}
        assert all(each.annotation is not inspect.Parameter.empty for name, each in given.items() if name != "self")
    told = inspect.getdoc(shown.view)
    assert all(f"\n    {name}: " in told for name in OPTIONS[shown] | steered)
    taken = inspect.signature(pictured.dispatch(shown)).parameters
    assert OPTIONS[shown] <= {*taken} or "more" in taken or "options" in taken


def test_the_optimizers_of_a_picture_are_those_that_are_priced():
    assert {*typing.get_args(typing.get_args(prices.Optimizer)[0])} == {*STATE_OF}


def drawn(plan, **options):
    return pictured(plan, **options).ladder().to_dict()


@pytest.fixture(scope="module")
def by_roofline(gpt2):
    gm, costs, _ = gpt2
    return sk.split(gm, sk.policies.Stages(3), costs=costs)


def stage_texts(split, costs):
    flow = split.flow
    return [duration(stage.forward + stage.backward, stage.unit) for stage in sk.stage_costs(flow, split.plan, costs)]


def test_a_split_is_drawn_by_the_prices_of_its_plan(gpt2, by_roofline):
    gm, costs, _ = gpt2
    wanted = drawn(by_roofline, costs=costs)
    for shown in (by_roofline, by_roofline.plan, sk.Plan.from_dict(gm.graph, by_roofline.plan.to_dict())):
        assert drawn(shown) == wanted and wanted["unit"] == "s"
    html = by_roofline._repr_mimebundle_()["text/html"]
    assert all(text in html for text in stage_texts(by_roofline, costs)) and "FLOP" not in html.replace("FLOPs", "")
    assert sk.report(by_roofline) == sk.report(gm, by_roofline.plan) == sk.report(gm, by_roofline.plan, costs)
    assert "roofline of h100" in sk.report(by_roofline).note and sk.report(by_roofline).unit == "s"


def test_other_prices_are_used_if_they_are_given(gpt2, by_roofline):
    gm, _, _ = gpt2
    assert drawn(by_roofline, costs=sk.costs.unit(gm))["unit"] == "nodes"
    assert sk.report(by_roofline, costs=sk.costs.flops(gm)).unit == "TFLOP"
    assert sk.stage_costs(by_roofline.flow, by_roofline.plan, sk.costs.unit(gm))[0].unit == "nodes"


def test_flops_are_called_flops_everywhere(gpt2):
    gm, _, _ = gpt2
    split = sk.split(gm, sk.policies.Stages(2))
    for shown in (split, sk.Plan.of({node: split.plan.home(node) for node in split.flow.nodes})):
        html = shown._repr_mimebundle_()["text/html"]
        texts = stage_texts(split, sk.costs.flops(gm))
        assert all(text.endswith("FLOP") and text in html for text in texts)
        assert "forward ↓ (FLOPs)" in html and "(time)" not in html
        assert drawn(shown)["unit"] == "TFLOP"
    assert "FLOP" in split.plan.note and " us" not in split.plan.note and " ms" not in split.plan.note
    assert "share of the FLOPs" in sk.report(split)._repr_mimebundle_()["text/html"]
    run = sk.simulate_schedule(sk.stage_costs(split.flow, split.plan), "1f1b", 4)
    assert run.unit == "TFLOP" == run.to_dict()["unit"] and "FLOP, bubble" in run.figures
    assert "FLOPs of the step" in svg(run)
    with pytest.raises(ViewError, match="SK903"):
        run.to_chrome_trace()


def test_a_schedule_is_drawn_with_times_only(gpt2, by_roofline, tmp_path):
    gm, costs, _ = gpt2
    timed = sk.simulate_schedule(sk.stage_costs(by_roofline.flow, by_roofline.plan), "1f1b", 4)
    for untimed in (sk.costs.flops(gm), sk.costs.unit(gm), sk.costs.training(sk.costs.flops(gm))):
        split = sk.split(gm, sk.policies.Stages(3), costs=untimed)
        run = sk.simulate_schedule(sk.stage_costs(split.flow, split.plan), "1f1b", 4)
        for bad in ({"run": run}, {"run": run, "costs": costs}, {"run": timed}):
            for show in (split.view, split.plan.view, lambda **o: split.to_html(tmp_path / "page.html", **o)):
                with pytest.raises(ViewError, match=r"SK903.*(FLOPs|nodes)") as caught:
                    show(**bad)
                assert "--costs roofline:h100" in caught.value.remedy and "costs=" in caught.value.remedy
    assert not (tmp_path / "page.html").exists()
    assert drawn(by_roofline, run=timed)["run"]["unit"] == "s"


def test_hostile_prices_are_escaped(gpt2, tmp_path):
    gm, _, plan = gpt2
    data = plan.to_dict()
    table = {node.name: 1e-6 for node in gm.graph.nodes}
    data["prices"] = {"name": EVIL, "kind": "table", "unit": EVIL, "table": table}
    data["note"] = EVIL
    hostile = sk.Plan.from_dict(gm.graph, data)
    hostile.to_html(tmp_path / "page.html")
    shown = [hostile._repr_mimebundle_()["text/html"], (tmp_path / "page.html").read_text("utf-8"), svg(hostile)]
    shown.append(sk.report(gm, hostile)._repr_mimebundle_()["text/html"])
    assert not any("<script>alert" in text for text in shown) and drawn(hostile)["unit"] == EVIL


def test_a_pair_is_drawn_by_the_prices_of_its_plan():
    joint = sk.capture_joint(nn.Sequential(nn.Linear(16, 16), nn.GELU()), X, loss=loss_or_sum)
    costs = sk.costs.roofline(joint.graph_module, "h100")
    pair = joint.split(sk.policies.MinCut(), costs)
    assert drawn(pair) == drawn(pair, costs=costs) and drawn(pair)["unit"] == "s"
    assert drawn(pair.plan)["unit"] == "s" and drawn(joint.split(sk.policies.MinCut()))["unit"] == "TFLOP"
    assert drawn(pair.plan, costs=sk.costs.flops(joint.graph_module))["unit"] == "TFLOP"


def test_the_bars_of_torchs_pair_are_modules_with_what_is_saved_in_them():
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8), nn.Sigmoid())
    joint = sk.capture_joint(net, X, loss=loss_or_sum)
    pair = joint.partition(min_cut_rematerialization_partition)
    picture = svg(pair)
    for label in {value.label for value in pair.saved_values if value.nbytes}:
        assert label in picture
    assert f"{size(sum(value.nbytes for value in pair.saved_values))} in " in picture
