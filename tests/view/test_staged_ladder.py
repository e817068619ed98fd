"""The picture of a training step in stages: what it says is what the stages, the plan and the simulator say."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from stagedsteps import captured, divided, recomputed
from svgtexts import outside, overlaps, texts_of

import splitkit as sk
from splitkit.errors import ViewError
from splitkit.plans.parts import Part
from splitkit.units import duration, size
from splitkit.view.data.staged_ladder import StagedView
from splitkit.view.renderers import pictured
from splitkit.view.svg.drawing import stacked
from splitkit.view.svg.ladder_svg import StagedDrawing, staged_svg


def texts(picture):
    return [text for text, *_ in texts_of(picture)]


def view_of(step):
    joint, costs = captured()
    return StagedView(joint.flow, step, costs)


@pytest.mark.parametrize("make", [divided, recomputed])
def test_ribbons_and_held_values_add_up_to_the_bytes_of_each_stage(make):
    step = make()
    view = view_of(step)
    data, costs = view.to_dict(), step.stage_costs(captured()[1])
    for number, stage in enumerate(step.stages):
        rows = range(view.borders[number], view.borders[number + 1])
        for name, whole in (("saved", stage.saved_bytes), ("waits", stage.waiting_bytes)):
            inside = [(a, b, nbytes) for a, b, nbytes in data[name] if a in rows]
            assert all(b in rows for _, b, _ in inside), "saved values stay in their stage"
            assert sum(nbytes for *_, nbytes in inside) == whole
        assert sum(nbytes for *_, nbytes in data["held"][number]) == costs[number].saved_bytes
        assert sum(data["weights"][row] for row in rows) == costs[number].fixed_bytes
    for ribbons, makers in (("saved", "kept"), ("waits", "left")):
        assert [sum(nbytes for _, nbytes in of) for of in data[makers]] == [nbytes for *_, nbytes in data[ribbons]]


def test_a_ribbon_goes_from_the_row_of_the_maker_to_the_row_of_the_reader():
    """Each block is three rows: what its norm makes is read by the backward of its linear layer, and so on."""
    view = view_of(divided())
    held, waiting = ({v.maker.name: v.rows for v in of} for of in (view.held_values, view.waiting_values))
    for block, end in enumerate(("", "_1", "_2")):  # the last one is in two stages
        row, late = 3 * block, f"_{3 - block}"
        assert held[f"native_layer_norm{end}"] == waiting[f"native_layer_norm{end}"] == (row, row + 1)
        assert held[f"addmm{end}"] == (row + 1, row + 2)
        assert waiting[f"gelu_backward{late}"] == (row + 2, row + 1)


@pytest.mark.parametrize("make", [divided, recomputed])
def test_times_are_those_of_the_plan_and_ops_are_where_it_puts_them(make):
    step = make()
    view, costs = view_of(step), captured()[1]
    data = view.to_dict()
    halves = {"forward": ("forward",), "backward": ("backward", "input"), "weight": ("weight",)}
    for column, names in halves.items():
        for stage in range(len(step.stages)):
            rows = range(view.borders[stage], view.borders[stage + 1])
            nodes = [n for name in names for n in step.plan.members((name, stage)) if n.op == "call_function"]
            assert sum(data["times"][column][row] for row in rows) == pytest.approx(sum(map(costs.seconds, nodes)))
    for node, places in zip(view.nodes, data["places"], strict=True):
        found = {(view.rows.parts[row], column) for row, column in zip(places[::2], places[1::2], strict=True)}
        column_of = {"forward": 0, "backward": 1, "input": 1, "weight": 2}
        assert found == {(key[1], column_of[key[0]]) for key in step.plan[node]}


def test_recomputed_ops_are_counted_and_views_are_not():
    again = view_of(recomputed()).still()["stages"]["again"]
    assert again[0] > 0
    assert view_of(divided()).still()["stages"]["again"] == [0, 0, 0, 0]
    graph = recomputed().stages[0]
    both = {n.name for n in graph.forward.graph.nodes} & {n.name for n in graph.backward.graph.nodes}
    nodes = {n.name: n for n in graph.backward.graph.nodes}
    assert again[0] <= sum(nodes[name].op == "call_function" for name in both)


def test_borders_say_what_the_messages_are():
    step = divided()
    data, costs = view_of(step).to_dict(), step.stage_costs(captured()[1])
    borders = data["marks"]
    for k in range(3):
        on, back = data["crossing"][k]
        assert data["down"][borders[k + 1]] == costs[k].activation_bytes == sum(nbytes for _, nbytes in on)
        assert data["up"][borders[k + 1]] == costs[k + 1].input_gradient_bytes == sum(nbytes for _, nbytes in back)


def test_the_step_of_stages_is_never_longer_than_the_pipeline_said():
    """The plan's prices count views of constants, which stages do not run; all else is equal to the byte."""
    step = recomputed()
    run = sk.simulate_schedule(step.stage_costs(captured()[1]), "1f1b", 4)
    assert 0.9 * step.plan.claim.value <= run.seconds <= step.plan.claim.value * (1 + 1e-9)
    told = re.search(r"Rank (\d+) is .* limit of .*: (\S+ \S+) \(", step.plan.note)
    assert size(run.peaks[int(told[1])]) == told[2]


def test_a_plan_remembers_its_schedule_and_its_picture_shows_the_step():
    step, (joint, _) = divided(), captured()
    asked = step.plan.request
    assert (asked.schedule, asked.microbatches, asked.links) == ("zbv", 4, "nvlink4")
    again = sk.Plan.from_dict(joint.graph_module.graph, json.loads(json.dumps(step.plan.to_dict())))
    assert again.prices == step.plan.prices and again.request == asked
    drawn = pictured(again).ladder()
    assert drawn.run.order.name == "ZBVZeroBubble" and drawn.run.order.microbatches == 4
    svg = texts(pictured(again).svg())
    assert any("ZBVZeroBubble of 4 microbatches" in text for text in svg)
    assert {"gradients of inputs ↑ (time)", "gradients of weights (time)"} <= {*svg}
    plain = replace(step.plan, request=replace(asked, schedule=None, microbatches=None))
    assert pictured(plain).ladder().run is None
    odd = replace(step.plan, request=replace(asked, schedule="zbv of another hand"))
    assert pictured(odd).ladder().run is None


def test_texts_and_tables_of_the_still_picture_are_the_figures():
    step = divided()
    view = view_of(step)
    found = texts(staged_svg(view))
    for stage in step.stages[:-1]:
        assert any(f"▼ {size(stage.sent_bytes)}" in text for text in found)
    costs = step.stage_costs(captured()[1])[0]
    whole = costs.forward + costs.backward_input + costs.backward_weight
    assert duration(whole, "s") in found and f"{size(step.stages[0].waiting_bytes)} waits" in found
    table = next(iter(pictured(step).tables()))
    cells = [str(cell) for column in table.columns for cell in column.cells]
    assert size(costs.saved_bytes) in cells and size(costs.fixed_bytes) in cells


def test_a_box_is_empty_only_where_none_of_its_rows_has_an_op():
    drawing = StagedDrawing(view_of(divided()).still(), lambda start, end: 0)
    row = drawing.items[0]
    assert drawing.data["counts"]["weight"][:3] == [0, 6, 0]
    assert [drawing._is_empty(replace(row, end=end), "weight") for end in (1, 2, 3)] == [True, False, False]
    assert not drawing._is_empty(row, "forward")


@pytest.mark.parametrize("make", [divided, recomputed])
def test_no_texts_lie_on_each_other(make):
    picture = staged_svg(view_of(make()))
    assert overlaps(picture) == [] and outside(picture) == []


def test_a_notebook_shows_steps_and_their_plans():
    for shown in (divided(), divided().plan):
        bundle = shown._repr_mimebundle_()
        assert bundle["image/svg+xml"].startswith("<svg") and "No picture" not in bundle["text/html"]
        assert "gradients of weights" in bundle["image/svg+xml"]


def test_what_does_not_go_with_stages_is_refused():
    step, (joint, costs) = divided(), captured()
    run = sk.simulate_schedule(step.stage_costs(costs)[:2], "1f1b", 4)
    with pytest.raises(ViewError, match=r"SK901.*run has 2 stages, but the plan has 4 stages"):
        step.view(run=run)
    with pytest.raises(ViewError, match=r"SK901.*beside"):
        step.plan.view(beside=step.plan)
    with pytest.raises(ViewError, match=r"SK901.*moved by hand"):
        step.plan.view(live=True)
    with pytest.raises(ViewError, match="SK903"):
        step.view(run=run_of(step), costs=sk.costs.flops(joint.graph_module))
    with pytest.raises(sk.errors.PolicyError, match="SK302"):
        step.stage_costs(costs, optimizer="lion")


def run_of(step):
    return sk.simulate_schedule(step.stage_costs(captured()[1]), "zbv", 4)


def test_a_stage_without_forward_has_a_row_of_its_own():
    """A plan of another hand may leave a stage without ops in forward."""
    joint, costs = captured()
    step = recomputed()
    parts = {("forward", 2): Part(("forward", 2)), ("backward", 2): Part(("backward", 2))}
    wider = replace(step.plan, parts={**step.plan.parts, **parts}, claim=None)
    view = StagedView(joint.flow, joint.split(wider), costs)
    assert view.rows.names[-1] == "stage 2: no forward" and view.to_dict()["counts"]["forward"][-1] == 0
    assert "stage 2" in texts(staged_svg(view))


def test_pictures_below_each_other_do_not_overlap():
    one = '<svg xmlns="x" role="img" aria-label="a" viewBox="0 0 10 20" width="10" height="20" style="s"></svg>'
    both = stacked([one, one.replace('"a"', '"b"')], gap=5)
    assert 'width="10" height="45"' in both and '<svg y="25"' in both and 'aria-label="a, b"' in both
    assert both.count('style="') == 1
