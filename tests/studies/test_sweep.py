"""Sweeps over pipelines: each row compared with the library, refusals, what fits, and the best rows."""

import io
import json
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

import splitkit as sk
from splitkit.errors import CostError, PolicyError, ScheduleError
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.policies import Stages
from splitkit.studies.sweep import Sweep, SweepRow, combinations, sweep
from splitkit.units import size


@pytest.fixture(scope="module")
def gm():
    """A chain of different layers with skips, whose stages are proven optimal quickly, so a sweep takes seconds."""

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
            self.wide = nn.ModuleList(nn.Linear(64, 32 * (i + 1)) for i in range(8))

        def forward(self, x):
            for layer, wide in zip(self.layers, self.wide, strict=True):
                x = x + layer(torch.relu(x)) * wide(x).mean()
            return x.square().mean()

    return sk.capture(Skips(), torch.randn(16, 64))


@pytest.fixture(scope="module")
def costs(gm):
    return sk.costs.roofline(gm, "h200")


@pytest.fixture(scope="module")
def found(gm, costs):
    return sweep(gm, costs, stages=(2, 4), microbatches=(2, 4), links="nvlink4")


def test_there_is_a_row_for_each_combination(found):
    rows = [(row.stages, row.schedule, row.microbatches) for row in found.rows]
    assert rows == list(product((2, 4), ("gpipe", "1f1b", "interleaved-1f1b", "zbv"), (2, 4)))
    assert all(row.fits is None for row in found.rows)
    for row in found.rows:
        if row.run is not None:
            assert row.run.ranks == (row.stages if row.schedule in ("gpipe", "1f1b") else row.stages // 2)
            assert row.plan.claim.value > 0


def test_rows_are_simulations_of_their_plans(gm, costs, found):
    known = StagePrices(sk.analyze(gm), costs)
    links = sk.costs.Links.preset("nvlink4")
    for row in found.rows:
        if row.run is not None:
            run = simulate_schedule(known.of(row.plan), row.schedule, row.microbatches, links=links)
            assert (row.run.seconds, row.run.peaks) == (run.seconds, run.peaks)


def test_stages_are_as_good_as_those_of_the_policy(gm, costs, found):
    for row in found.rows:
        if row.stages == row.microbatches == 4 and row.schedule in ("1f1b", "zbv"):
            policy = Stages(row.stages, row.schedule, row.microbatches, links="nvlink4")
            assert sk.plan(gm, policy, costs).claim.value == pytest.approx(row.plan.claim.value, rel=2e-3)


def test_stages_are_found_once_for_the_same_ranks(gm, costs, monkeypatch):
    asked = []
    assign = Stages.assign
    monkeypatch.setattr(Stages, "assign", lambda self, *a: asked.append(self.n) or assign(self, *a))
    sweep(gm, costs, stages=(2, 4), microbatches=(4, 8))
    assert asked == [2] * 5 + [4] * 5  # a rank for each stage; two schedules with two stages a rank, 4 and 8 each
    asked.clear()
    sweep(gm, costs, stages=(4,), microbatches=(4, 8), links="pcie4")
    assert asked == [4] * 5


def test_what_a_schedule_or_the_graph_refuses_is_a_row(gm, costs):
    found = sweep(gm, costs, stages=(3, 4, 9999), microbatches=(2,), schedules=("1f1b", "zbv"))
    why = {(row.stages, row.schedule): row.why for row in found.rows}
    assert "split into 2 or 4 stages" in why[3, "zbv"].lower()
    assert "GPipe takes fewer" in why[4, "1f1b"] and why[4, "zbv"] == ""
    assert "microbatches" in why[9999, "1f1b"]
    found = sweep(gm, costs, stages=(9999,), microbatches=(2,), schedules=("gpipe",))
    assert "has only" in found.rows[0].why and found.pareto == ()
    assert found.to_dict()["rows"][0]["seconds"] is None


class Wide(nn.Module):
    """Large parameters that cost no time, and work without parameters."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1 << 16)), nn.Parameter(torch.ones(1 << 16))

    def forward(self, x):
        x = x + self.a[:8].sum()
        x = x + self.b[:8].sum()
        for _ in range(6):
            x = x @ x
        return x.sum()


def test_memory():
    gm = sk.capture(Wide(), torch.ones(64, 64) / 64)
    costs = sk.costs.flops(gm)
    free = sweep(gm, costs, stages=(2,), microbatches=(2, 4, 8), schedules=("1f1b",))
    assert max(free.rows[0].run.peaks) > 4 * 2 * 4 * (1 << 16)  # both parameters are in the first stage
    limit = 6 * 4 * (1 << 16)  # room for one, its two gradients and moments
    limited = sweep(gm, costs, stages=(2,), microbatches=(2, 4, 8), schedules=("1f1b",), memory=limit)
    for before, row in zip(free.rows, limited.rows, strict=True):
        assert row.fits and max(row.run.peaks) <= limit < max(before.run.peaks)
        assert row.numbers[0] >= before.numbers[0]
    hopeless = sweep(gm, costs, stages=(2,), microbatches=(2,), schedules=("1f1b",), memory="1KiB")
    (row,) = hopeless.rows
    assert row.fits is False and "on average" in row.why and row.run is not None and hopeless.pareto == ()
    tight = sweep(gm, costs, stages=(2,), microbatches=(2, 4), schedules=("1f1b",), memory=limit * 7 // 8)
    assert all(row.fits and max(row.run.peaks) <= limit * 7 // 8 for row in tight.rows)  # once refused, wrongly
    less = sweep(gm, costs, stages=(2,), microbatches=(2, 4), schedules=("1f1b",), memory=limit // 2)
    assert [row.fits for row in less.rows] == [False, False] and less.rows[0].why


def test_none_of_the_best_is_beaten(found):
    ran = [row for row in found.rows if row.run is not None]
    best = {row.numbers for row in found.pareto}
    assert len(best) == len(found.pareto) > 0
    for row in ran:
        beaten = any(
            other != row.numbers and all(a <= b for a, b in zip(other, row.numbers, strict=True))
            for other in (r.numbers for r in ran)
        )
        assert beaten == (row.numbers not in best)
    assert [row.numbers for row in found.pareto] == sorted(best)


def test_data_table_and_html(found):
    data = json.loads(json.dumps(found.to_dict()))
    assert [row["pareto"] for row in data["rows"]] == [row in found.pareto for row in found.rows]
    for row, told in zip(found.rows, data["rows"], strict=True):
        if row.run is not None:
            assert told["seconds"] == row.run.seconds and told["peak"] == max(row.run.peaks)
            assert told["seconds_per_microbatch"] == pytest.approx(row.run.seconds / row.microbatches)
    text = str(found)
    assert "\u2026" not in text and text.count(" best") == len(found.pareto) + 1  # and the title of the column
    assert text.count("interleaved-1f1b") == 4
    for width in (60, 200):  # nothing is cut off
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(found.table())
        shown = [line for line in console.export_text().splitlines()[1:] if not line.startswith("(too narrow")]
        assert "\u2026" not in "".join(shown) and {line[-1] for line in shown} <= set("┓┃┩│┘┤")
    assert len(found.refused) == 1 and "GPipe takes fewer" in found.refused[0] and found.refused[0] in text
    strange = Sweep((SweepRow(2, 2, "<b>", why="a < b & c"),), note="<i>")
    html = strange._repr_mimebundle_()["text/html"]
    assert "&lt;b&gt;" in html and "a &lt; b &amp; c" in html and "<i>" not in html and "<b>" not in html
    with pytest.raises(ValueError, match="nothing runs"):
        strange.rows[0].numbers  # noqa: B018


@pytest.mark.parametrize(
    "words, error, code",
    [
        ({"stages": ()}, PolicyError, "SK302"),
        ({"stages": (0,)}, PolicyError, "SK302"),
        ({"stages": (2.0,)}, PolicyError, "SK302"),
        ({"microbatches": (True,)}, PolicyError, "SK302"),
        ({"schedules": "1f1b"}, PolicyError, "SK302"),
        ({"schedules": ()}, PolicyError, "SK302"),
        ({"schedules": ("1f2b",)}, ScheduleError, "SK330"),
        ({"memory": "much"}, PolicyError, "SK302"),
        ({"memory": -1}, PolicyError, "SK302"),
        ({"links": "nvlink9"}, CostError, "SK322"),
        ({"optimizer": None}, PolicyError, "SK302"),
        ({"optimizer": "lion"}, PolicyError, "SK302"),
    ],
)
def test_bad_input(gm, costs, words, error, code):
    with pytest.raises(error) as raised:
        sweep(gm, costs, **words)
    assert raised.value.code == code and raised.value.remedy


def test_combinations_come_once():
    assert combinations((2, 2), (4,), ("1f1b", "1f1b")) == [(2, "1f1b", 4)]


def row(seconds, peak, ranks=2, fits=None):
    """A row with given numbers, which fits or not."""
    run = SimpleNamespace(seconds=seconds, peaks=(peak,), ranks=ranks, unit="nodes", bubble=0.0)
    return SweepRow(ranks, 1, "1f1b", run=run, fits=fits)


def test_a_row_is_beaten_by_one_that_is_better_in_something_and_worse_in_nothing():
    fast, small, between, slow = row(1.0, 9), row(3.0, 1), row(2.0, 5), row(2.0, 6)
    few, same, large = row(4.0, 9, ranks=1), row(2.0, 5), row(0.5, 99, fits=False)
    refused = SweepRow(2, 1, "zbv", why="no")
    found = Sweep((slow, small, refused, between, few, same, large, fast), memory=50)
    assert found.pareto == (fast, between, small, few)
    assert found.refused == ("zbv of 2 stages, 1 microbatches: no",)
    assert [cells[-1] for cells in found._cells()] == ["", "best", "", "best", "best", "", "", "best"]


def test_recompute_runs_the_same_stages_again_in_backward(gm, costs):
    numbers = {"stages": (2,), "microbatches": (4,), "schedules": ("gpipe", "1f1b")}
    plain, again = sweep(gm, costs, **numbers), sweep(gm, costs, **numbers, recompute=True)
    prices = StagePrices(sk.analyze(gm), costs)
    for once, twice in zip(plain.rows, again.rows, strict=True):
        assert twice.plan.places == once.plan.places
        assert {part.call for part in twice.plan.parts.values()} == {"checkpoint"}
        run = simulate_schedule(prices.of(twice.plan), twice.schedule, 4)
        assert (twice.run.seconds, twice.run.peaks) == (run.seconds, run.peaks)
        assert twice.run.seconds > once.run.seconds
    peak = max(again.rows[1].run.peaks)
    for memory, fits in ((peak, True), (peak - 1, False)):
        row = sweep(gm, costs, stages=(2,), microbatches=(4,), schedules=("1f1b",), memory=memory, recompute=True).rows[
            0
        ]
        assert row.fits is fits and (fits or size(peak) in row.why)
