"""Stages, steps of all schedules and what they say, as they are stored; messages, deadlocks and traces among them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from ownorders import idle_of, own_order
from storedmodels import chain, forward
from storedtexts import assert_stored, assert_stored_row

import splitkit as sk
from splitkit.costs import Links
from splitkit.errors import ScheduleError
from splitkit.pipeline.memory import memory_over_time
from splitkit.pipeline.schedules import known_schedules
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.synthesize import order_from_csv, order_to_csv
from splitkit.plans.parts import Part
from splitkit.policies import Stages
from splitkit.view.console import to_text
from splitkit.view.data.report import rank_table

STAGES = [
    StageCosts(1e-3, 2e-3, 1e-3, saved_bytes=2**20, deferred_bytes=2**18, temporary_bytes=2**10, parameter_bytes=2**16,
               activation_bytes=2**14, input_gradient_bytes=2**13, optimizer_bytes=2**17),
    StageCosts(2e-3, 3e-3, 5e-4, saved_bytes=2**19, deferred_bytes=2**17, temporary_bytes=2**12, parameter_bytes=2**15,
               activation_bytes=2**15, input_gradient_bytes=2**12, optimizer_bytes=2**16),
]  # fmt: skip
SLOW = Links.uniform(1e8, 1e-4)


def numbers(costs):
    return {name: value for name, value in asdict(costs).items() if value}


@pytest.mark.parametrize("optimizer", ["adam", "sgd", None])
def test_the_costs_of_stages(optimizer):
    _, flow, prices = forward()
    plan = Stages(3).assign(flow, prices)
    changed = replace(plan, parts={**plan.parts, 1: Part(1, call="checkpoint"), 2: Part(2, replicas=2)})
    for name, one in (("plain", plan), ("changed", changed)):
        found = sk.stage_costs(flow, one, prices, optimizer=optimizer)
        assert_stored_row("pipeline/stages.json", f"{name} {optimizer}", list(map(numbers, found)))


BUILT_IN = {schedule.name: schedule for schedule in known_schedules()}
"""Before tests register others."""


def steps():
    for name, schedule in BUILT_IN.items():
        yield name, 2 if schedule.stages_per_rank == 1 else 4


@pytest.mark.parametrize(("name", "count"), steps())
def test_a_step_of_each_schedule(name, count):
    stages = STAGES * (count // 2)
    for options in ({}, {"links": SLOW}, {"links": SLOW, "static_buffers": True}):
        run = sk.simulate_schedule(stages, name, 4, ranks=2, **options)
        row = {
            "order": [" ".join(map(str, rank)) for rank in run.order.ranks],
            "seconds": [run.seconds, run.busy, run.bubble, idle_of(run)],
            "bytes": [run.peaks, run.in_flight, run.in_flight_of_stages, [m.to_dict() for m in run.memory]],
            "told": [str(run), run.told, run.figures, run.fullest(), run.limiting_rank, run.busiest_rank],
            "moments": [sum(nbytes for _, nbytes in rank) for rank in memory_over_time(run)],
        }
        key = " ".join([name, *(k if k != "links" else "slow" for k in options)])
        assert_stored_row("pipeline/steps.json", key, row)
        assert order_from_csv(order_to_csv(run.order)).ranks == run.order.ranks


def test_a_step_as_data_as_a_table_and_as_a_trace():
    run = sk.simulate_schedule(STAGES * 2, "1f1b", 6, links=SLOW)
    trace = "\n".join(map(json.dumps, run.to_chrome_trace()["traceEvents"]))
    table = to_text(rank_table(run, memory=2**22))
    assert_stored("pipeline/step.txt", f"{table}\n{json.dumps(run.to_dict(), indent=1)}\n{trace}\n")


@pytest.mark.parametrize(
    "rows",
    [
        ["0F0 0F1 0B0 0B1", "1F0 1B1 1F1 1B0"],
        ["0B0 0F0", "1F0 1B0"],
        ["0F0 0B0", "1F0"],
        ["0F0 0F0 0B0", "1F0 1B0"],
        ["0F0 0B0 1F0", "1F0 1B0"],
        ["0F0 0I0", "1F0 1B0"],
        ["0F0 0B0", "1F0 1W0 1I0"],
        ["1I0 1F0 1W0", "0F0 0B0"],
        ["0F0 0B0", ""],
        ["0F0 0B0", "2F0 2B0"],
        [""],
    ],
)
def test_an_order_that_is_wrong(rows):
    with pytest.raises(ScheduleError) as caught:
        sk.simulate_schedule(STAGES, own_order(rows))
    assert_stored_row("pipeline/refusals.json", " / ".join(rows), str(caught.value))


def test_numbers_that_a_schedule_does_not_allow():
    for name, schedule in BUILT_IN.items():
        for stages, microbatches, ranks in ((3, 2, None), (4, 0, 2), (5, 4, 2), (8, 3, 3), (1, 4, 1)):
            try:
                run = sk.simulate_schedule((STAGES * 4)[:stages], name, microbatches, ranks=ranks)
                row = f"{run.ranks} ranks"
            except ScheduleError as error:
                row = str(error)
            assert_stored_row("pipeline/numbers.json", f"{schedule.word} {stages} {microbatches} {ranks}", row)


def test_a_chain_without_a_plan_of_its_own():
    gm, flow, prices = chain()
    halves = flow.nodes[:5], flow.nodes[5:]
    row = [list(map(numbers, sk.stage_costs(gm, halves, prices))), list(map(numbers, sk.stage_costs(flow, halves)))]
    assert_stored_row("pipeline/stages.json", "two sets", row)
