"""What the page computes itself, once a cut has moved, is what Python says of that plan."""

from __future__ import annotations

import json

import pytest
from browser import NEEDS_CHROMIUM
from campaigns import these_first
from steeredpages import GPT2, planned, shown

import splitkit as sk
from splitkit.pipeline.memory import memory_over_time
from splitkit.policies import Stages
from splitkit.units import duration, size
from splitkit.view.data.ladder import LadderView

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def ladder():
    return LadderView(*planned("gpt2", 4, **GPT2))


@pytest.fixture(scope="module")
def opened(browser, ladder, tmp_path_factory):
    return shown(browser, tmp_path_factory.mktemp("page"), ladder)


ANEW = """(data, borders) => { const prices = new Prices(data);
const run = simulated(data.run, prices.stages(borders, false), prices.place);
return run && {...run, memory: memoryOf(run)}; }"""


def areas(memory, end):
    """Bytes times seconds of each rank, which the points of equal times do not change."""
    ends = [[*(time for time, _ in held[1:]), end] for held in memory]
    return [
        sum(nbytes * (stop - start) for (start, nbytes), stop in zip(held, stops, strict=True))
        for held, stops in zip(memory, ends, strict=True)
    ]


@pytest.mark.parametrize(
    ("schedule", "options"),
    these_first(
        [
            ("1f1b", {}),
            ("eager-1f1b", {"links": sk.costs.Links.uniform(1e7, 1e-5), "static_buffers": True}),
            ("gpipe", {"links": sk.costs.Links.uniform(1e7, 1e-5), "overlap": False}),
            ("interleaved-1f1b", {"links": sk.costs.Links.matrix([[0, 1e7], [3e7, 0]]), "ranks": 2}),
        ],
        [
            ("1f1b", {"links": "nvlink4"}),
            ("1f1b", {"links": sk.costs.Links.uniform(1e7, 1e-5), "static_buffers": True}),
            ("eager-1f1b", {"links": sk.costs.Links.uniform(1e7, 1e-5)}),
            ("eager-1f1b", {"static_buffers": True}),
        ],
    ),
)
def test_the_step_of_a_plan_that_was_moved_is_that_of_python(opened, ladder, schedule, options):
    flow, costs = ladder.flow, ladder.costs
    plan = sk.plan(flow.root, Stages(4), costs)
    view = LadderView(
        flow, plan, costs, run=sk.simulate_schedule(sk.stage_costs(flow, plan, costs), schedule, 6, **options)
    )
    data, rows = view.to_dict(), len(view.rows)
    moved = [[0, 1, 3, 4, rows], [0, 2, rows - 2, rows - 1, rows]]
    moved += [[0, rows], [0, 3, rows], [0, 1, 2, 3, 4, 5, rows]] if data["run"]["again"]["windows"] else []
    for borders in moved:
        part = {node: sum(row >= b for b in borders[1:-1]) for node, row in view.rows.of.items()}
        stages = sk.stage_costs(flow, sk.plan(flow.root, lambda n, part=part: part.get(n, 0)), costs)
        run = sk.simulate_schedule(stages, schedule, 6, **options)
        told = opened.value(f"({ANEW})({json.dumps(data)}, {borders})")
        assert [tuple(event[:4]) for event in told["events"]] == [tuple(event[:4]) for event in run.timeline]
        for here, event in zip(told["events"], run.timeline, strict=True):
            assert here[4:] == pytest.approx(event[4:], rel=1e-9)
        assert (told["seconds"], told["bubble"]) == pytest.approx((run.seconds, run.bubble), rel=1e-9)
        assert told["peaks"] == list(run.peaks)
        assert [held[-1][1] for held in told["memory"]] == [held[-1][1] for held in memory_over_time(run)]
        assert areas(told["memory"], run.seconds) == pytest.approx(areas(memory_over_time(run), run.seconds), rel=1e-9)
    if not data["run"]["again"]["windows"]:  # of another number of stages it is not told
        assert opened.value(f"({ANEW})({json.dumps(data)}, [0, {rows}])") is None


def test_numbers_are_rounded_as_in_python(opened):
    sizes = [0, 7, 1000, 1023, 1024, 5760, 5888, 102500, 2**20 - 1, 3 * 2**29, 7 * 2**40 + 2**33]
    times = [0, 1e-13, 4e-10, 0.9996e-6, 4.021e-6, 0.0123, 0.01225, 0.5, 99.96, 1234, 12345.6]
    assert opened.value(f"{sizes}.map(size)") == [size(nbytes) for nbytes in sizes]
    assert opened.value(f'{times}.map(s => duration(s, "s"))') == [duration(seconds) for seconds in times]
    assert opened.value(f'{sizes}.map(s => duration(s, "FLOPs"))') == [duration(n, "FLOPs") for n in sizes]
