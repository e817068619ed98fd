"""`Frontier`: its points are legal plans that no other plan beats, and it renders itself."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from campaigns import few_of_many, these_first
from choices import Prices, every_plan, saved, spent, steps
from hulls import lower_hull
from jointgraphs import Hand
from jointmodels import MODELS, assert_steps_alike, captured, ran, step_of
from rich.console import Console

import splitkit as sk
from splitkit import capture, costs
from splitkit.engine.pair import divide
from splitkit.errors import NoPlanError, PolicyError
from splitkit.graph.dataflow import analyze
from splitkit.memory.profile import simulate_memory
from splitkit.policies import Budget, MinCut
from splitkit.studies.frontier import Frontier
from splitkit.view.renderers import svg


@few_of_many(20, 40, steps())
def test_the_points_are_the_hull_of_all_plans(step):
    flow, prices = step
    points = Frontier(flow, prices).points
    found = [(p.saved, spent(flow, p.pair, prices)) for p in points]
    hull = lower_hull(every_plan(flow, prices))
    assert lower_hull(found) == hull
    # A point between two corners, on the line, may be there or not: time is counted in ticks.
    on_line = np.interp([x for x, _ in found], [x for x, _ in hull], [y for _, y in hull])
    assert np.allclose(on_line, [y for _, y in found])
    assert [saved(p.pair) for p in points] == [p.saved for p in points]


def blocks(count):
    """x -> a0 -> b0 -> a1 -> ...; backward reads each b, which runs in a second or is saved for 2 KiB; a is 1 KiB"""
    h, names, before = Hand().inputs(x=1).gradients(g=1), [], "x"
    for i in range(count):
        h.op(f"a{i}", 1, before).op(f"b{i}", 2, f"a{i}")
        names += [f"a{i}", f"b{i}"]
        before = f"a{i}"
    return h.op("loss", 1, *names).back("gx", 1, "g", *names).flow("loss", "gx")


def test_within_goes_over_block_by_block_on_the_line():
    seconds = {f"b{i}": 1.0 for i in range(6)} | {f"a{i}": 1000.0 for i in range(6)}
    frontier = Frontier(blocks(6), Prices(**seconds))
    assert [(p.saved // 1024, p.seconds) for p in frontier.points] == [(0, 6006.0), (6, 6.0), (18, 0.0)]
    for kib in range(6, 19):
        point = frontier.within(kib * 1024)
        assert (point.saved // 1024, point.seconds) == (kib - kib % 2, 6 - (kib - kib % 2 - 6) / 2)
    assert frontier.bound(7 * 1024) == pytest.approx(5.5)
    assert {n.name for n, keys in frontier.within(10 * 1024).plan.items() if len(keys) == 2} == {"b0", "b1", "b2", "b3"}


def test_less_is_a_share_of_what_saving_all_takes():
    frontier = Frontier(blocks(6), Prices(**{f"b{i}": 1.0 for i in range(6)}, **{f"a{i}": 1e3 for i in range(6)}))
    assert (frontier.less(0).saved, frontier.less(0).seconds) == (18 * 1024, 0.0)
    assert (frontier.less(0.12).saved, frontier.less(0.12).seconds) == (14 * 1024, 2.0)
    assert frontier.less(1).saved == 0
    for share in (-0.1, 1.1, float("nan"), "a", None, True):
        with pytest.raises(PolicyError, match="SK302"):
            frontier.less(share)


def test_bytes_as_people_write_them():
    frontier = Frontier(blocks(6), Prices(**{f"b{i}": 1.0 for i in range(6)}, **{f"a{i}": 1e3 for i in range(6)}))
    for nbytes in ("10KiB", "10240", 10240, 10240.9, np.int64(10240), np.float32(10240)):
        assert frontier.within(nbytes).saved == 10240
        assert frontier.bound(nbytes) == pytest.approx(4.0, rel=1e-3)
    assert frontier.within(float("inf")).saved == frontier.within(10**30).saved == 18 * 1024


@pytest.mark.parametrize("method", ["within", "bound"])
@pytest.mark.parametrize("nbytes", [float("nan"), -1, "much", "", None, True, [5]])
def test_what_is_no_number_of_bytes(method, nbytes):
    with pytest.raises(PolicyError, match=rf"SK302: Frontier.{method}\(nbytes=.*\n  nbytes must be bytes"):
        getattr(Frontier(blocks(1), Prices()), method)(nbytes)


def test_fewer_bytes_than_the_least_are_refused_with_the_least():
    h = Hand().inputs(x=1).gradients(g=1).op("r", 3, "x", target=torch.ops.aten.rand_like.default)
    frontier = Frontier(h.op("loss", 1, "r").back("gx", 1, "g", "r").flow("loss", "gx"), Prices())
    assert frontier.within(3072).saved == 3072
    assert frontier.bound(3071) == float("inf")
    with pytest.raises(NoPlanError, match=r"SK303.* takes 3.00 KiB\n  Allow 3072 bytes"):
        frontier.within(3071)


def test_another_graph_is_refused():
    with pytest.raises(PolicyError, match="SK302: Frontier"):
        Frontier(analyze(capture(torch.nn.Linear(2, 2), torch.zeros(1, 2)))).points  # noqa: B018


@pytest.fixture(scope="module")
def gpt2():
    joint = captured("gpt2").joint
    return Frontier(joint, costs.roofline(joint.graph_module, "a100"))


def test_points_of_a_model(gpt2):
    numbers = [(p.saved, p.seconds) for p in gpt2.points]
    assert len(numbers) > 5
    assert [b for b, _ in numbers] == sorted({b for b, _ in numbers})
    assert [s for _, s in numbers] == sorted({s for _, s in numbers}, reverse=True)
    assert numbers[-1][1] == 0
    slopes = [(b - d) / (a - c) for (a, b), (c, d) in pairwise(numbers)]
    assert slopes == sorted(slopes)
    for price in (1e9, 1e11, 1e12):
        best = gpt2.joint.split(MinCut(price), gpt2.costs)
        cost = saved(best) + price * spent(gpt2.flow, best, gpt2.costs)
        assert min(b + price * s for b, s in numbers) == pytest.approx(cost, rel=1e-6)
    for point in (gpt2.points[0], gpt2.points[3], gpt2.less(0.3)):
        pair = gpt2.joint.split(point.plan, gpt2.costs)
        assert saved(pair) == point.saved
        assert simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak == point.peak
        assert gpt2.bound(point.saved) <= point.seconds + 1e-12


@pytest.mark.parametrize("name", these_first(["gpt2", "conv"], [n for n in MODELS if n not in ("gpt2", "conv")]))
def test_points_run_like_eager(name):
    joint, args, kwargs, expected = captured(name)
    points = Frontier(joint).points
    for point in (points[0], points[len(points) // 2]):
        assert_steps_alike(ran(joint, divide(joint.flow, point.plan, point.costs), args, kwargs), expected)
    assert_steps_alike(ran(joint, joint.split(MinCut()), args, kwargs), expected)


def test_data_and_table(gpt2):
    data = json.loads(json.dumps(gpt2.to_dict(peaks=True)))
    assert [p["saved"] for p in data["points"]] == [p.saved for p in gpt2.points]
    assert [p["peak"] for p in data["points"]] == [p.peak for p in gpt2.points]
    assert "peak" not in gpt2.to_dict()["points"][0]
    assert data["costs"] == "roofline of a100"
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(gpt2.table(peaks=True))
    text = console.export_text()
    assert "\u2026" not in text
    assert text.count("KiB") + text.count("MiB") >= 2 * len(gpt2.points)
    assert str(gpt2).startswith(f"{len(gpt2.points)} points: ")


def test_the_picture_has_every_point_and_mark_and_escapes_names(gpt2, tmp_path):
    marks = {"<torch> & 1.0": (gpt2.points[2].saved, gpt2.points[2].seconds), "chosen": gpt2.points[1]}
    gpt2.to_svg(tmp_path / "frontier.svg", marks=marks)
    picture = ET.parse(tmp_path / "frontier.svg").getroot()
    dots = [e for e in picture.iter() if e.tag.endswith("}circle")]
    assert len(dots) == len(gpt2.points) + 2
    assert {"<torch> & 1.0", "chosen"} <= {e.text for e in picture.iter()}
    wide, high = map(float, picture.get("viewBox").split()[2:])
    for dot in dots:
        assert 0 <= float(dot.get("cx")) <= wide and 0 <= float(dot.get("cy")) <= high
    assert "<svg" in gpt2._repr_mimebundle_()["text/html"] and "sandbox" in gpt2.view(marks=marks)._repr_html_()


def test_a_still_picture_divides_no_step(monkeypatch):
    """Rendering a frontier in a notebook does not build forward and backward of its points."""
    frontier = Frontier(blocks(3), Prices(**{f"b{i}": 1.0 for i in range(3)}))
    monkeypatch.setattr("splitkit.studies.frontier.divide", lambda *given: pytest.fail("divided"))
    assert "<svg" in frontier._repr_mimebundle_()["text/html"]


@cache
def peak_frontier():
    joint, prices = step_of(1)
    return sk.Frontier(joint, prices, of="peak", budgets=4)


def test_the_lowest_peak_is_the_first_point_of_a_frontier():
    joint, prices = step_of(1)
    least = {of: joint.split(Budget("least", of=of), prices) for of in ("peak", "saved")}
    profiles = {
        of: simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs) for of, pair in least.items()
    }
    assert f"({profiles['peak'].peak} bytes, the least found)" in least["peak"].plan.note
    assert f"({profiles['saved'].saved} bytes, the fewest found)" in least["saved"].plan.note
    frontier = peak_frontier()
    assert frontier.points[0].peak == profiles["peak"].peak and frontier.points[-1].seconds == 0
    assert frontier.to_dict() == sk.Frontier(joint, prices, of="peak", budgets=4).to_dict()


def test_a_frontier_of_the_peak_falls_and_keeps_to_what_it_says():
    joint, prices = step_of(1)
    frontier = peak_frontier()
    peaks, seconds = ([getattr(p, what) for p in frontier.points] for what in ("peak", "seconds"))
    assert len(peaks) > 2 and peaks == sorted(set(peaks)) and seconds == sorted(set(seconds), reverse=True)
    for point in frontier.points[::3]:
        pair = point.pair
        assert simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak == point.peak
        assert frontier.bound(point.peak) <= point.seconds * (1 + 1e-9)
    assert frontier.less(0.05).peak <= 0.95 * peaks[-1] < frontier.points[-1].peak
    assert "peak" in svg(frontier) and "at the peak" in str(frontier)
    with pytest.raises(NoPlanError, match=f"lowest is .*[\\s\\S]*{peaks[0]} bytes"):
        frontier.within(peaks[0] - 1)
    with pytest.raises(PolicyError, match="SK302"):
        sk.Frontier(joint, prices, of="time")
