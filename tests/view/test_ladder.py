"""The picture's data: what it says of stages is what `stage_costs` says of the same parts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from campaigns import these_first
from steeredpages import GPT2, SMALL, priced

import splitkit as sk
from splitkit.pipeline.memory import memory_over_time
from splitkit.plans.parts import Part
from splitkit.view.data.ladder import LadderView, _columns
from splitkit.view.page import page

NAMESPACE = r"http:\/\/www.w3.org/2000/svg"  # a name that every SVG has, which nothing fetches


def thirds(gm):
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    return sk.plan(gm, lambda n: 3 * order[n] // len(order))


@pytest.fixture(scope="module", params=these_first(["gpt2"], ["t5"]))
def ladder(request):
    flow, _ = priced(request.param, **GPT2 if request.param == "gpt2" else SMALL)
    gm = flow.root
    costs = sk.costs.training(sk.costs.roofline(gm, "h100"))
    return LadderView(flow, thirds(gm), costs, "a <script>alert(1)</script> title")


def test_the_shipped_stages_and_every_stretch_are_those_of_stage_costs(ladder):
    data, flow, count = ladder.to_dict(), ladder.flow, len(ladder.rows)
    stages = sk.stage_costs(flow, ladder.plan, ladder.costs)
    assert data["stages"] == _columns(stages)  # to the last digit
    for borders in ([0, 1, count], [0, 2, count // 2, count - 1, count]):
        part = {n: sum(row >= b for b in borders[1:-1]) for n, row in ladder.rows.of.items()}
        moved = sk.stage_costs(flow, sk.plan(flow.root, lambda n, part=part: part.get(n, 0)), ladder.costs)
        for k, (a, b) in enumerate(pairwise(borders)):
            at = a * count - a * (a - 1) // 2 + (b - a - 1)  # as the page looks it up
            for column in ("saved", "temporary", "fixed"):
                assert data["stretches"][column][at] == _columns(moved)[column][k], column
            for column in ("forward", "backward"):
                assert sum(data["times"][column][a:b]) == pytest.approx(_columns(moved)[column][k], rel=1e-12), column
            assert data["down"][b] == moved[k].activation_bytes and data["up"][a] == moved[k].input_gradient_bytes


def test_segments_whose_modules_alternate_have_the_peak_of_the_graphs_own_order():
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=200, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=32,
        max_target_positions=64, num_mel_bins=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    ids = torch.ones(2, 12, dtype=torch.long)
    gm = sk.capture(model, input_features=torch.ones(2, 16, 64), decoder_input_ids=ids)
    flow, costs = sk.analyze(gm), sk.costs.training(sk.costs.roofline(gm, "h100"))
    view = LadderView(flow, sk.plan(gm, sk.policies.Stages(3), costs), costs)
    data, count, alternating = view.to_dict(), len(view.rows), 0
    for middle in range(1, count):
        part = {node: int(row >= middle) for node, row in view.rows.of.items()}
        plan = sk.plan(gm, lambda node, part=part: part.get(node, 0))
        for stage, (a, b) in zip(sk.stage_costs(flow, plan, costs), ((0, middle), (middle, count)), strict=True):
            at = a * count - a * (a - 1) // 2 + (b - a - 1)
            assert data["stretches"]["temporary"][at] == stage.temporary_bytes
            index = [flow.index[node] for row in view.nodes_of_rows[a:b] for node in row]
            alternating += index != sorted(index)
    assert alternating  # or the model no longer has such modules


def test_ribbons_and_edges_go_down(ladder):
    data = ladder.to_dict()
    assert data["trains"] and all(a <= b for a, b, _ in data["saved"]) and all(a < b for a, b, _ in data["edges"])
    assert len(data["ops"]["name"]) == len(ladder.flow.nodes) == sum(row["ops"] for row in data["rows"])
    assert all(0 < step <= op for op, reads in enumerate(data["ops"]["reads"]) for step in reads)


def test_two_plans_share_their_rows(ladder):
    other = sk.plan(ladder.flow.root, sk.policies.Stages(2), ladder.costs)
    both = LadderView(ladder.flow, ladder.plan, ladder.costs, beside=(other,))
    data, flow = both.to_dict(), ladder.flow
    assert data["stages"] == ladder.to_dict()["stages"] and len(both.rows) >= len(ladder.rows)
    stages = sk.stage_costs(flow, other, ladder.costs)
    assert data["beside"][0]["stages"] == _columns(stages)
    for node, row in both.rows.of.items():
        if node in ladder.plan.places:
            assert data["rows"][row]["part"] == ladder.plan.home(node) and data["beside"][0]["rows"][row] == other.home(
                node
            )
    assert all(a < b for a, b, _ in data["edges"])


def test_inference_has_no_right_column(ladder):
    data = LadderView(ladder.flow, ladder.plan, ladder.costs, optimizer=None).to_dict()
    assert not data["trains"] and data["saved"] == [] and not any(data["up"]) and not any(data["stages"]["saved"])


def test_memory_over_time_has_the_peaks(ladder):
    stages = sk.stage_costs(ladder.flow, ladder.plan, ladder.costs)
    for schedule in ("gpipe", "1f1b"):
        run = sk.simulate_schedule(stages, schedule, 6, links="nvlink4")
        held = memory_over_time(run)
        assert [max(nbytes for _, nbytes in rank) for rank in held] == list(run.peaks)
        assert all([t for t, _ in rank] == sorted(t for t, _ in rank) for rank in held)
        assert [rank[-1][1] for rank in held] == [stage.fixed_bytes for stage in stages]  # all that came went


def test_the_page_stands_alone_and_text_stays_text(ladder):
    run = sk.simulate_schedule(sk.stage_costs(ladder.flow, ladder.plan, ladder.costs), "1f1b", 6)
    data = LadderView(ladder.flow, ladder.plan, ladder.costs, ladder.title, memory=2**30, run=run).to_dict()
    html = page(data)
    assert "<script>alert" not in html and "http" not in html.replace("http-equiv", "").replace(NAMESPACE, "")
    inside = html.partition('id="splitkit-data">')[2].partition("</script>")[0]
    assert json.loads(inside) == json.loads(json.dumps(data))
    assert len(html.encode()) - len(inside.encode()) < 115_000  # what is ours


def test_a_ribbon_goes_from_the_row_that_makes_a_value_to_the_row_whose_backward_wants_it():
    """The output of Tanh is saved twice: by Tanh, and by the layer that reads it. The input is nobody's."""
    gm = sk.capture(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)), torch.ones(3, 4)
    )
    data = LadderView(sk.analyze(gm), sk.plan(gm, lambda n: 0), sk.costs.flops(gm)).still()
    assert [row["name"] for row in data["rows"]] == ["0", "1", "2"]
    assert data["saved"] == [(0, 0, 3 * 4 * 4), (1, 1, 3 * 8 * 4), (1, 2, 3 * 8 * 4)]
    assert data["edges"] == [(0, 1, 3 * 8 * 4), (1, 2, 3 * 8 * 4)]


def test_a_ladder_of_inference_does_not_train_and_parts_name_their_devices():
    gm = sk.capture(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)), torch.ones(3, 4)
    )
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    plan = sk.Plan({n: (min(i, 1),) for i, n in enumerate(flow.nodes)}, {1: Part(1, torch.device("cuda:3"))})
    assert LadderView(flow, plan, costs).still()["devices"] == ["", "cuda:3"]
    assert LadderView(flow, plan, costs).trains and not LadderView(flow, plan, costs, optimizer=None).trains
